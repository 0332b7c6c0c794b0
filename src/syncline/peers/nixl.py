"""Reads through NIXL over UCX: shared memory, RDMA or TCP, whatever `transports` lets UCX use."""

from __future__ import annotations

import base64
import binascii
import os
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from syncline.abc import ByteArray, PeerMemory
from syncline.errors import (
    ConfigError,
    FormatError,
    MovedOnError,
    PeerLostError,
    TransportError,
    TransportTimeoutError,
    TransportUnavailableError,
)
from syncline.peers import regions
from syncline.peers.interfaces import interface_of
from syncline.peers.regions import Description, Regions, batches
from syncline.peers.streams import Deadline
from syncline.types import Read

PACKAGE = "nixl-cu12"

_POLL_S = 0.0002
_started = threading.Lock()


class NixlPeer(PeerMemory):
    """Memory that peers read through NIXL.

    Args:
        bind: an address of the one interface that UCX uses; None: any of them.
        transports: `UCX_TLS`: `tcp,self` anywhere; with `cma` and `posix`, processes of one user on one machine
            copy from each other's memory; `all` takes RDMA where there is some, which never ran where this was written.

    UCX reads its settings when the first agent of a process starts, so all of a process share them.

    Raises:
        TransportUnavailableError: the package is missing, or UCX cannot start so.
        ConfigError: no interface has the address.

    After a `TransportTimeoutError` the read may still be under way where it could not be cancelled: then this
    object refuses to go on.
    """

    name = "nixl"

    def __init__(self, bind: str | None = "127.0.0.1", *, transports: str = "tcp,self") -> None:
        settings = {"UCX_TLS": transports}
        if bind is not None:
            settings["UCX_NET_DEVICES"] = interface_of(bind)
        self._agent_name = f"syncline-{secrets.token_hex(8)}"
        self._api = _api()
        with _started:
            os.environ.update(settings)  # how UCX takes settings, and only then
            try:
                config = self._api.nixl_agent_config(backends=["UCX"])
                self._agent = self._api.nixl_agent(self._agent_name, config)
            except Exception as error:
                raise TransportUnavailableError(
                    f"NIXL cannot start with {settings}: {error!r}"
                ) from error
        self._regions = Regions()
        self._registered: dict[str, Any] = {}
        self._peers: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._broken: str | None = None
        self._is_closed = False

    def register(self, region: str, memory: ByteArray) -> None:
        """Make memory readable; see `PeerMemory.register`."""
        with self._lock:
            self._check_usable()
            self._regions.add(region, memory)
            if not memory.size:
                return
            try:
                self._registered[region] = self._agent.register_memory(
                    [(int(memory.ctypes.data), memory.size, 0, "")], "DRAM"
                )
            except Exception as error:
                self._regions.remove(region)
                raise TransportError(
                    f"region {region!r}: NIXL refused to register it: {error!r}"
                ) from error

    def unregister(self, region: str) -> None:
        """Take a region back. NIXL lets peers that know it go on reading: keep the memory, see `peers.generation`."""
        with self._lock:
            self._regions.remove(region)
            handle = self._registered.pop(region, None)
            if handle is not None:
                self._agent.deregister_memory(handle)

    def describe(self) -> bytes:
        """Return what peers need; see `PeerMemory.describe`."""
        with self._lock:
            rows = {n: (m.size, int(m.ctypes.data)) for n, m in self._regions.items()}
            agent = base64.b64encode(self._agent.get_agent_metadata()).decode()
        fields = {"agent": agent, "name": self._agent_name}
        return Description(self.name, f"NIXL agent {self._agent_name}", fields, rows).dump()

    def read(self, peer: bytes, reads: Sequence[Read], timeout_s: float) -> None:
        """Read from the peer; see `PeerMemory.read`."""
        deadline = Deadline(timeout_s)
        places = dict(zip(reads, self._regions.places(reads), strict=True))
        described = regions.load(peer, self.name, ("agent", "name"), 1)
        located = described.locate(reads)
        with self._lock:
            self._check_usable()
            if not located:
                return
            self._meet(described)
            for batch in batches(located):
                self._batch(described, batch, places, deadline)

    def close(self) -> None:
        """Take all regions back and end the agent; harmless when called again."""
        for region in self._regions.names():
            self.unregister(region)
        self._is_closed = True
        self._agent = None

    def _meet(self, described: Description) -> None:
        """Load what the peer says of itself: regions that it took back or added count only then."""
        try:
            agent = base64.b64decode(described.fields["agent"], validate=True)
        except binascii.Error as error:
            raise FormatError(f"description of a peer: agent is not base64: {error}") from error
        name = described.fields["name"]
        if self._peers.get(name) == agent:
            return
        try:
            if self._peers.pop(name, None) is not None:
                # NIXL adds to what it knows of a peer and never takes away (ray-project/ray#60602).
                self._agent.remove_remote_agent(name)
            self._agent.add_remote_agent(agent)
        except Exception as error:
            raise PeerLostError(f"{described.place} cannot be met: {error!r}") from error
        self._peers[name] = agent

    def _batch(
        self,
        described: Description,
        batch: Sequence[tuple[Read, tuple[int, ...]]],
        places: dict[Read, ByteArray],
        deadline: Deadline,
    ) -> None:
        here = [(int(places[read].ctypes.data), read.nbytes, 0) for read, _ in batch]
        there = [(row[1] + read.offset, read.nbytes, 0) for read, row in batch]
        handle = None
        try:
            handle = self._agent.initialize_xfer(
                "READ",
                self._agent.get_xfer_descs(here, "DRAM"),
                self._agent.get_xfer_descs(there, "DRAM"),
                described.fields["name"],
            )
            state = self._agent.transfer(handle)
            while state == "PROC":
                deadline.left_s()
                time.sleep(_POLL_S)
                state = self._agent.check_xfer_state(handle)
        except TimeoutError as error:
            raise TransportTimeoutError(
                f"{described.place} did not answer in {deadline.timeout_s} s"
            ) from error
        except Exception as error:
            raise _mapped(error, described) from error
        finally:
            if handle is not None:
                self._release(handle)
        if state != "DONE":
            raise PeerLostError(f"{described.place}: the read ended as {state}")

    def _release(self, handle: Any) -> None:
        try:
            self._agent.release_xfer_handle(handle)
        except Exception:  # noqa: BLE001 - NIXL's own classes: it cannot cancel; the error is kept for later
            self._broken = "has a read that could not be cancelled"

    def _check_usable(self) -> None:
        if self._is_closed:
            raise ConfigError("this NIXL peer was closed; make a new one")
        if self._broken is not None:
            raise TransportUnavailableError(f"this NIXL peer {self._broken}; make a new one")


def _mapped(error: Exception, described: Description) -> TransportError:
    """Return our error for one of NIXL's."""
    kind = type(error).__name__
    if kind in ("nixlNotFoundError", "nixlInvalidParamError", "nixlMismatchError"):
        return MovedOnError(f"{described.place} has taken back what was asked for: {error}")
    return PeerLostError(f"{described.place} is gone: {kind}: {error}")


def _api() -> Any:
    for package in ("nixl", "nixl_cu12", "nixl_cu13"):
        with suppress(ModuleNotFoundError):
            if find_spec(package) is not None:
                try:
                    return import_module(f"{package}._api")
                except ImportError as error:
                    raise TransportUnavailableError(f"NIXL cannot be imported: {error}") from error
    raise TransportUnavailableError(f"NIXL is not installed; pip install --no-deps {PACKAGE}")
