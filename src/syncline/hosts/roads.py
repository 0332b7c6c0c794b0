"""Which transport reads from whom: the first of this side's own that the other side has, too."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from syncline.abc import ByteArray, PeerMemory
from syncline.errors import ConfigError, TransportUnavailableError
from syncline.hosts.offer import Catalog, Offer, Way, load_catalog
from syncline.peers import SharedPeer
from syncline.peers.generation import Checked
from syncline.peers.shared import machine
from syncline.types import Read


class Roads:
    """This side's transports, best first, and memory that all of them can read into.

    Args:
        memories: a `SharedPeer` is used for peers on the same machine alone.
        prefix: begins the names of this side's regions.
    """

    def __init__(self, memories: Sequence[PeerMemory], prefix: str) -> None:
        if not memories:
            raise ConfigError("memories: expected at least one transport, such as TcpPeer()")
        self.memories = tuple(memories)
        self.prefix = prefix
        shared = [peer for peer in memories if isinstance(peer, SharedPeer)]
        self._shared = shared[0] if shared else None
        self._names: list[str] = []
        self._rooms: list[ByteArray] = []
        self._checked = [
            Checked(memory, self._allocate, f"{prefix}.look") for memory in self.memories
        ]
        self._machine = machine()

    def room(self, name: str, nbytes: int) -> ByteArray:
        """Register zeros on all transports, as `prefix.name`, until `close`."""
        place = self._allocate(nbytes)
        self.add(name, place)
        return place

    def add(self, name: str, place: ByteArray) -> None:
        """Register memory of the caller's on all transports, as `prefix.name`, until `close`."""
        region = f"{self.prefix}.{name}"
        self._names.append(region)
        for memory in self.memories:
            memory.register(region, place)

    def ways(self) -> tuple[Way, ...]:
        """Return descriptions of this side, for those who read from it."""
        return tuple(Way(memory.name, memory.describe()) for memory in self.memories)

    def to(self, ways: Sequence[Way], there: str, nic: int = 0) -> tuple[Checked, bytes]:
        """Return the transport to read over, and the description to read by.

        Args:
            there: the other side's machine; `nic`: which of its NICs, where it has one transport for each.

        Raises:
            TransportUnavailableError: the sides have none in common.
        """
        for checked in self._checked:
            kind = checked.memory.name
            if kind == SharedPeer.name and there != self._machine:
                continue
            found = [way.described for way in ways if way.kind == kind]
            if found:
                return checked, found[nic % len(found)]
        raise TransportUnavailableError(
            f"no transport in common: they have {sorted({way.kind for way in ways})}, this side has "
            f"{[memory.name for memory in self.memories]}"
        )

    def catalog(self, offer: Offer, timeout_s: float) -> Catalog:
        """Read and check the catalog of an offer.

        Raises:
            MovedOnError: the host has another version by now. TransportError, FormatError, VerifyError.
        """
        name = f"catalog.{len(self._names)}"
        place = self.room(name, offer.catalog_bytes)
        checked, described = self.to(offer.ways, offer.machine)
        read = Read(offer.catalog, 0, f"{self.prefix}.{name}", 0, offer.catalog_bytes)
        checked.read(described, offer.header, offer.generation, [read], timeout_s)
        return load_catalog(place.tobytes(), offer)

    @property
    def read_bytes(self) -> int:
        """Bytes that were read from others so far."""
        return sum(checked.read_bytes for checked in self._checked)

    def close(self) -> None:
        """Take back all that was registered."""
        for checked in self._checked:
            checked.close()
        for memory in self.memories:
            for name in self._names:
                memory.unregister(name)
        if self._shared is not None:
            for room in self._rooms:
                self._shared.free(room)
            self._shared.forget()

    def _allocate(self, nbytes: int) -> ByteArray:
        """Return zeros that all transports can register, until `close`."""
        if self._shared is None:
            return np.zeros(nbytes, np.uint8)
        room = self._shared.allocate(nbytes)
        self._rooms.append(room)
        return room
