"""Reads through Mooncake's transfer engine: RDMA where there is some, TCP elsewhere.

It gives errors as numbers, without a reason, and cannot give a read up that has begun. Its ports have no
authentication, and on TCP release 0.3.13 listens on every interface whatever `MC_TCP_BIND_ADDRESS` says: hence
`accepts_open_ports`.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module, metadata
from typing import Any, Literal

from syncline.abc import ByteArray, PeerMemory
from syncline.errors import (
    ConfigError,
    PeerLostError,
    TransportError,
    TransportTimeoutError,
    TransportUnavailableError,
)
from syncline.peers import regions
from syncline.peers.regions import Description, Regions, batches
from syncline.peers.streams import Deadline
from syncline.types import Read

PACKAGE = "mooncake-transfer-engine-non-cuda"
LEAST = (0, 3, 12)
"""Before it a TCP transfer could be reported done before it was (kvcache-ai/Mooncake#2850)."""

_POLL_S = 0.0005
_UNDER_WAY_STILL = -2
"""Status of a read that Mooncake no longer waits for; it may yet write."""

_environment = threading.Lock()


class MooncakePeer(PeerMemory):
    """Memory that peers read through Mooncake.

    Args:
        bind: the address under which peers reach this side.
        protocol: `tcp`, or `rdma`, which never ran where this was written.
        device: RDMA devices by name, separated by commas; empty: Mooncake chooses.
        accepts_open_ports: must be True: the engine's ports are open on all interfaces, to whoever reaches them;
            a firewall or a network of their own has to guard them.

    Raises:
        TransportUnavailableError: the package, or a library that it needs, is missing, or is too old.
        ConfigError: the ports are not accepted.

    After a `TransportTimeoutError` the read may still be under way: this object refuses to go on
    (`TransportUnavailableError`), its memory must stay, and only `close` is left.
    """

    name = "mooncake"

    def __init__(
        self,
        bind: str = "127.0.0.1",
        *,
        protocol: Literal["tcp", "rdma"] = "tcp",
        device: str = "",
        accepts_open_ports: bool = False,
    ) -> None:
        if not accepts_open_ports:
            raise ConfigError(
                "Mooncake listens on every interface, without authentication; guard its ports and pass "
                "accepts_open_ports=True, or use another transport"
            )
        self._engine = _engine()
        settings = {"MC_TCP_BIND_ADDRESS": bind} | (
            {"MC_FORCE_TCP": "1"} if protocol == "tcp" else {}
        )
        with _set(settings):
            if self._engine.initialize(bind, "P2PHANDSHAKE", protocol, device):
                raise TransportUnavailableError(
                    f"Mooncake cannot start on {bind} with {protocol}; its own log says why"
                )
            self._target = f"{bind}:{self._engine.get_rpc_port()}"
        self._regions = Regions()
        self._lock = threading.Lock()
        self._broken: str | None = None
        self._is_closed = False
        self._kept: list[ByteArray] = []

    def register(self, region: str, memory: ByteArray) -> None:
        """Make memory readable; see `PeerMemory.register`. Not twice the same memory."""
        self._check_usable()
        self._regions.add(region, memory)
        if memory.size and self._engine.register_memory(memory.ctypes.data, memory.size):
            self._regions.remove(region)
            raise TransportError(
                f"region {region!r}: Mooncake refused to register {memory.size} bytes"
            )

    def unregister(self, region: str) -> None:
        """Take a region back; see `PeerMemory.unregister`."""
        memory = self._regions.remove(region)
        if memory is not None and memory.size:
            self._engine.unregister_memory(memory.ctypes.data)
            if self._broken is not None:
                self._kept.append(memory)

    def describe(self) -> bytes:
        """Return what peers need; see `PeerMemory.describe`."""
        rows = {n: (m.size, int(m.ctypes.data)) for n, m in self._regions.items()}
        place = f"Mooncake at {self._target}"
        return Description(self.name, place, {"target": self._target}, rows).dump()

    def read(self, peer: bytes, reads: Sequence[Read], timeout_s: float) -> None:
        """Read from the peer; see `PeerMemory.read`.

        Mooncake does not say why a read failed: a region that was taken back is found by what follows it, so
        `PeerLostError` may mean either.
        """
        deadline = Deadline(timeout_s)
        places = dict(zip(reads, self._regions.places(reads), strict=True))
        described = regions.load(peer, self.name, ("target",), 1)
        located = described.locate(reads)
        with self._lock:
            for batch in batches(located):
                self._check_usable()
                self._batch(described, batch, places, deadline)

    def close(self) -> None:
        """Take all regions back. The engine's threads and ports live as long as this object."""
        for region in self._regions.names():
            self.unregister(region)
        self._is_closed = True
        if not self._kept:
            self._engine = None

    def _batch(
        self,
        described: Description,
        batch: Sequence[tuple[Read, tuple[int, ...]]],
        places: dict[Read, ByteArray],
        deadline: Deadline,
    ) -> None:
        def ask() -> list[int]:
            return [self._ask(described, read, row, places[read]) for read, row in batch]

        try:
            # The first one to a peer waits for its answer, a minute if it must.
            numbers = _within(deadline.left_s(), ask)
            refused = numbers.count(0)
            failed = self._settle([number for number in numbers if number], deadline)
        except TimeoutError as error:
            self._broken = f"has a read from {described.place} that never ended"
            self._kept.extend(places.values())
            raise TransportTimeoutError(
                f"{described.place} did not answer in {deadline.timeout_s} s"
            ) from error
        if refused:
            raise PeerLostError(f"{described.place}: refused {refused} reads, or is gone")
        if failed:
            raise PeerLostError(
                f"{described.place}: {failed} reads failed; the peer is gone, or has taken the memory back"
            )

    def _ask(
        self, described: Description, read: Read, row: tuple[int, ...], place: ByteArray
    ) -> int:
        """Begin one read and return its number, 0 if it was refused.

        One number a read: the status of a number is that of its first read only, whatever else goes under it.
        """
        return int(
            self._engine.batch_transfer_async_read(
                described.fields["target"],
                [int(place.ctypes.data)],
                [row[1] + read.offset],
                [read.nbytes],
            )
        )

    def _settle(self, numbers: Sequence[int], deadline: Deadline) -> int:
        """Wait until every read has ended, so that no place is written to later; return how many failed."""
        failed = 0
        for number in numbers:
            while (status := self._engine.transfer_check_status(number)) == 0:
                deadline.left_s()
                time.sleep(_POLL_S)
            if status == _UNDER_WAY_STILL:
                raise TimeoutError
            failed += status < 0
        return failed

    def _check_usable(self) -> None:
        if self._is_closed:
            raise ConfigError("this Mooncake peer was closed; make a new one")
        if self._broken is not None:
            raise TransportUnavailableError(f"this Mooncake peer {self._broken}; make a new one")


def _within(timeout_s: float, call: Callable[[], list[int]]) -> list[int]:
    """Return what a call returns; raise `TimeoutError` if it takes longer, and leave it to itself."""
    found: queue.SimpleQueue[list[int] | Exception] = queue.SimpleQueue()

    def run() -> None:
        try:
            found.put(call())
        except Exception as error:  # noqa: BLE001 - it is raised by who waits
            found.put(error)

    threading.Thread(target=run, name="syncline-mooncake", daemon=True).start()
    try:
        result = found.get(timeout=timeout_s)
    except queue.Empty:
        raise TimeoutError from None
    if isinstance(result, Exception):
        raise PeerLostError(f"Mooncake: {result!r}") from result
    return result


def _engine() -> Any:
    try:
        found = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        raise TransportUnavailableError(
            f"Mooncake is not installed; pip install {PACKAGE}"
        ) from None
    numbers = tuple(int(part) for part in found.split(".")[:3])
    if numbers < LEAST:
        least = ".".join(map(str, LEAST))
        raise TransportUnavailableError(
            f"{PACKAGE} {found} may tear reads; install {least} or later"
        )
    try:
        return import_module("mooncake.engine").TransferEngine()
    except ImportError as error:
        raise TransportUnavailableError(
            f"Mooncake cannot be imported: {error}; Debian has the libraries in libibverbs1, libnl-3-200 and "
            "libnl-route-3-200"
        ) from error


@contextmanager
def _set(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables, which is how Mooncake takes settings, while it starts."""
    with _environment:
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
