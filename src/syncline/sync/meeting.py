"""Where a trainer and its engines meet when the way was chosen for them: the run's store says it (`LIVE.json`).

The publisher opens what was decided and writes down where; an engine looks there and joins. Both have the store
anyway, and who can write into it can give engines any weights, so it is no less safe a place for an address.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Literal

from syncline import config
from syncline.abc import Inlet, Store
from syncline.channels import (
    CollectiveInlet,
    CollectiveOutlet,
    SharedMemoryInlet,
    SharedMemoryOutlet,
)
from syncline.choice import Decision, Topology, Updater
from syncline.errors import ConfigError, ObjectNotFoundError
from syncline.format import head as head_format
from syncline.format import live, names
from syncline.format.live import LivePath
from syncline.sync.choosing import choose
from syncline.sync.history import read_head
from syncline.sync.options import PublisherOptions
from syncline.version import Head

_LOOPBACK = "127.0.0.1:0"
_PRIVATE = stat.S_IRWXU


def meet(
    transport: Literal["auto"] | Updater | Decision,
    topology: Topology | None,
    store: Store,
    head: Head,
    options: PublisherOptions,
) -> Meeting:
    """Choose how a publisher's versions travel, if it was not chosen, and open that.

    Raises:
        ConfigError: no way is left; or a topology is missing, or one too many. Else as `Meeting`.
    """
    if isinstance(transport, Decision):
        if topology is not None:
            raise ConfigError("topology: the decision has its own; expected one of the two")
        return Meeting(transport, store, head, options.live_address)
    if topology is None:
        raise ConfigError(f"transport {transport!r}: expected a topology beside it")
    asked = None if transport == "auto" else transport
    kind = None if options.live_kind == "auto" else options.live_kind
    decision = choose(topology, store, transport=asked, kind=kind)
    return Meeting(decision, store, head, options.live_address)


class Meeting:
    """The publisher's side: an outlet for what was decided, known to whoever reads the store.

    Args:
        head: of the run, as the publisher owns it.
        address: where engines join; None: a socket of this user's, or a port of this machine's loopback.

    Attributes:
        outlet: None if the engines pull from the store.

    Raises:
        ConfigError: the address is in use, or one is needed; the transport is not the publisher's business.
        TransportUnavailableError: it needs a package that is not installed.
    """

    def __init__(self, decision: Decision, store: Store, head: Head, address: str | None) -> None:
        self.decision = decision
        self._store = store
        self._head = head
        self.outlet = _opened(decision, head, address)
        try:
            self._announce(self.outlet)
        except BaseException:
            self._close_outlet()
            raise

    def wait(self, timeout_s: float) -> None:
        """Return when all engines of the topology have joined; at once if they pull from the store.

        Raises:
            TransportTimeoutError: they have not.
        """
        if self.outlet is not None:
            self.outlet.wait(self.decision.topology.engines, timeout_s)

    def close(self) -> None:
        """Let every engine go and say so in the store; harmless when called again."""
        self._close_outlet()
        if self.outlet is not None:
            self._announce(None)
        self.outlet = None

    def _announce(self, outlet: SharedMemoryOutlet | CollectiveOutlet | None) -> None:
        said = LivePath(self._head.run_id, self._head.epoch, None, None)
        if isinstance(outlet, SharedMemoryOutlet):
            said = LivePath(said.run_id, said.epoch, "shared-memory", outlet.address)
        elif outlet is not None:
            said = LivePath(said.run_id, said.epoch, "collective", outlet.address)
        before, new = _read(self._store), live.dump(said)
        if before is None and outlet is None:
            return
        if before != new:
            self._store.compare_and_swap(names.LIVE, before, new)

    def _close_outlet(self) -> None:
        if self.outlet is not None:
            self.outlet.close()
        with suppress(OSError):  # it was never made, or another run has its socket there
            _folder().rmdir()


class Doorway:
    """The engine's side: the inlet that the run's publisher waits for, as long as it does."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._said: LivePath | None = None
        self._inlet: Inlet | None = None

    def inlet(self) -> Inlet | None:
        """Return the inlet to join by; None if versions are to be pulled from the store.

        What an earlier publisher of the run said is of no account.

        Raises:
            FormatError: `LIVE.json` or `HEAD.json` is damaged.
        """
        raw, head = _read(self._store), read_head(self._store)
        said = None if raw is None else live.load(raw)
        owner = None if head is None else head_format.load(head)
        if said is not None and owner is not None:
            is_of_owner = (said.run_id, said.epoch) == (owner.run_id, owner.epoch)
            said = said if is_of_owner else None
        if said != self._said:
            self.close()
            self._inlet = None if said is None else _inlet(said)
            self._said = said
        return self._inlet

    def close(self) -> None:
        """Leave; harmless when called again."""
        if self._inlet is not None:
            self._inlet.close()
        self._inlet, self._said = None, None


def _opened(
    decision: Decision, head: Head, address: str | None
) -> SharedMemoryOutlet | CollectiveOutlet | None:
    if decision.transport == "peers":
        raise ConfigError(
            "transport: engines that join a running fleet take the version from peers, with "
            "syncline.hosts.enter or join; nothing is published for them: leave `joining` out of the topology"
        )
    if decision.transport in ("shared-memory", "collective") and decision.topology.writers > 1:
        raise ConfigError(
            f"transport: {decision.transport} from {decision.topology.writers} trainer ranks needs an outlet on each of them: "
            "make a ShardedPublisher with live=outlet on every rank"
        )
    if decision.transport == "shared-memory":
        return SharedMemoryOutlet(_socket(head) if address is None else address)
    if decision.transport == "collective":
        if address is None and decision.topology.hosts > 1:
            raise ConfigError(
                "live_address: expected host:port by which engines on other machines reach this one"
            )
        token = config.live_token_variable()
        return CollectiveOutlet(_LOOPBACK if address is None else address, token_env=token)
    return None


def _inlet(said: LivePath) -> Inlet | None:
    if said.address is None:
        return None
    if said.transport == "shared-memory":
        return SharedMemoryInlet(said.address)
    return CollectiveInlet(said.address, token_env=config.live_token_variable())


def _folder() -> Path:
    return config.runtime_dir() / f"syncline-{os.getuid()}"


def _socket(head: Head) -> str:
    """Return a path that only this user can reach, the same for every publisher of a run."""
    folder = _folder()
    folder.mkdir(mode=_PRIVATE, exist_ok=True)
    found = folder.lstat()
    if (
        not stat.S_ISDIR(found.st_mode)
        or found.st_uid != os.getuid()
        or stat.S_IMODE(found.st_mode) & ~_PRIVATE
    ):
        raise ConfigError(f"{folder}: expected a directory of this user's alone; pass live_address")
    return str(folder / head.run_id)


def _read(store: Store) -> bytes | None:
    try:
        return store.get(names.LIVE)
    except ObjectNotFoundError:
        return None
