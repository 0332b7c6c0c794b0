"""Peers in one process: the reference of what reading a peer's memory does."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from syncline.abc import ByteArray, PeerMemory
from syncline.errors import ConfigError, MovedOnError, PeerLostError
from syncline.peers import regions
from syncline.peers.regions import Description, Regions
from syncline.types import Read


class MemoryPeer(PeerMemory):
    """Memory that the other peers of one process, made with the same `network`, read.

    Args:
        network: who is there, by key; an empty dictionary that its peers share.

    Example:
        >>> import numpy as np
        >>> network = {}
        >>> here, there = MemoryPeer(network), MemoryPeer(network)
        >>> there.register("weights", np.arange(4, dtype=np.uint8))
        >>> place = np.zeros(2, np.uint8)
        >>> here.register("place", place)
        >>> here.read(there.describe(), [Read("weights", 2, "place", 0, 2)], timeout_s=1.0)
        >>> place.tolist()
        [2, 3]
    """

    name = "memory"

    def __init__(self, network: dict[str, Regions]) -> None:
        self._network = network
        self._key = secrets.token_hex(16)
        self._regions = Regions()
        network[self._key] = self._regions

    def register(self, region: str, memory: ByteArray) -> None:
        """Make memory readable; see `PeerMemory.register`."""
        if self._key not in self._network:
            raise ConfigError("register: this side was closed; make a new one")
        self._regions.add(region, memory)

    def unregister(self, region: str) -> None:
        """Take a region back; see `PeerMemory.unregister`."""
        self._regions.remove(region)

    def describe(self) -> bytes:
        """Return what peers need; see `PeerMemory.describe`."""
        rows = {name: (memory.size,) for name, memory in self._regions.items()}
        return Description(self.name, f"peer {self._key[:8]}", {"key": self._key}, rows).dump()

    def read(self, peer: bytes, reads: Sequence[Read], timeout_s: float) -> None:
        """Copy from the peer's memory; see `PeerMemory.read`. Never waits."""
        places = dict(zip(reads, self._regions.places(reads), strict=True))
        described = regions.load(peer, self.name, ("key",), 0)
        located = described.locate(reads)
        other = self._network.get(described.fields["key"])
        if other is None:
            raise PeerLostError(f"{described.place} has closed")
        memory = dict(other.items())
        for read, _ in located:
            if read.region not in memory:
                raise MovedOnError(f"{described.place} has taken region {read.region!r} back")
            places[read][:] = memory[read.region][read.offset : read.offset + read.nbytes]

    def close(self) -> None:
        """Take all regions back; harmless when called again."""
        self._network.pop(self._key, None)
        for region in self._regions.names():
            self._regions.remove(region)
