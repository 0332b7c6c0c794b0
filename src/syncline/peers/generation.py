"""Memory that says when it moves on: a header beside it, and reads that look at the header afterwards.

A generation only rises, and is odd while what it speaks of is being changed. So one look after a read is enough:
if the generation is still the one that was offered, nothing was changed from the offer to the look. Writes
are seen in their order on x86, and over every transport here each look is a message of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from syncline.abc import ByteArray, PeerMemory
from syncline.errors import ConfigError, MovedOnError, TransportTimeoutError
from syncline.peers.streams import Deadline
from syncline.types import Read

HEADER_BYTES = 128
MAX_SLOTS = 8

_MAGIC = 0x31_4E_45_47_43_4E_59_53
_GENERATION, _DRAINED, _TAGS = 1, 2, 4
_POLL_S = (0.0002, 0.02)


@dataclass(frozen=True, slots=True)
class State:
    """What a header said at one moment.

    Attributes:
        generation: of the memory; odd: it is being changed.
        drained: buckets that the peer has got whole, so that it needs them of nobody any more.
        tags: for each of its slots, one more than the bucket that can be relayed from there; 0: none.
    """

    generation: int
    drained: int
    tags: tuple[int, ...]


class Header:
    """The header of this side's memory.

    Args:
        memory: (HEADER_BYTES,) zeros, or the header that the memory had before.

    Example:
        >>> header = Header(np.zeros(HEADER_BYTES, np.uint8))
        >>> header.begin(); header.generation
        1
        >>> header.settle(); header.generation
        2
    """

    def __init__(self, memory: ByteArray) -> None:
        if memory.nbytes != HEADER_BYTES:
            raise ConfigError(f"a header has {HEADER_BYTES} bytes, found {memory.nbytes}")
        self.memory = memory
        self._words = memory.view("<u8")
        self._words[0] = _MAGIC

    @property
    def generation(self) -> int:
        """The generation now."""
        return int(self._words[_GENERATION])

    def begin(self) -> None:
        """Say that the memory is about to change; harmless if that was said."""
        self._words[_GENERATION] |= np.uint64(1)

    def settle(self) -> None:
        """Say that the memory stands, as another generation than any before."""
        self._words[_GENERATION] = (self.generation | 1) + 1

    def tag(self, slot: int, bucket: int | None) -> None:
        """Say which bucket can be relayed from a slot."""
        self._words[_TAGS + slot] = 0 if bucket is None else bucket + 1

    def drain(self, count: int) -> None:
        """Say how many buckets this side has got whole."""
        self._words[_DRAINED] = count


class Checked:
    """Reads from peers whose memory has a header.

    May be used from several threads. Args:
        memory: this side's; a place for headers is registered in it, under `region`.
        allocate: makes memory that it can register.

    Attributes:
        read_bytes: asked for so far, headers and what had to be read again included.
    """

    def __init__(
        self, memory: PeerMemory, allocate: Callable[[int], ByteArray], region: str
    ) -> None:
        self.memory = memory
        self._region = region
        self._place = allocate(HEADER_BYTES)
        self._looking = threading.Lock()
        self._counting = threading.Lock()
        self.read_bytes = 0
        memory.register(region, self._place)

    def take(self, peer: bytes, reads: Sequence[Read], timeout_s: float) -> None:
        """Read without a look at the header; see `PeerMemory.read`."""
        with self._counting:
            self.read_bytes += sum(read.nbytes for read in reads)
        self.memory.read(peer, reads, timeout_s)

    def state(self, peer: bytes, header: str, timeout_s: float) -> State:
        """Return what a peer's header says.

        Raises:
            MovedOnError: there is no header. TransportError: as `PeerMemory.read`.
        """
        with self._looking:
            self.take(peer, [Read(header, 0, self._region, 0, HEADER_BYTES)], timeout_s)
            words = [int(word) for word in self._place.view("<u8")]
        if words[0] != _MAGIC:
            raise MovedOnError(f"no header is in region {header!r} of the peer any more")
        tags = tuple(words[_TAGS : _TAGS + MAX_SLOTS])
        return State(words[_GENERATION], words[_DRAINED], tags)

    def read(
        self, peer: bytes, header: str, generation: int, reads: Sequence[Read], timeout_s: float
    ) -> None:
        """Fill places from memory that was of this generation all the while.

        Raises:
            MovedOnError: it was not; the places hold anything. TransportError: as `PeerMemory.read`.
        """
        deadline = Deadline(timeout_s)
        self.take(peer, reads, timeout_s)
        try:
            left_s = deadline.left_s()
        except TimeoutError as error:
            raise TransportTimeoutError(f"the peer did not answer in {timeout_s} s") from error
        found = self.state(peer, header, left_s).generation
        if found != generation:
            raise MovedOnError(
                f"the peer's memory was of generation {generation} when it was offered, and is of {found} "
                "by now: it holds another version; ask for its offer again"
            )

    def wait(
        self,
        peer: bytes,
        header: str,
        accept: Callable[[State], bool],
        timeout_s: float,
    ) -> State:
        """Return the first state that is accepted; looks again and again, ever more seldom.

        Raises:
            TransportTimeoutError: none was in time. TransportError: as `state`.
        """
        deadline = Deadline(timeout_s)
        pause, longest = _POLL_S
        while True:
            try:
                left_s = deadline.left_s()
            except TimeoutError as error:
                raise TransportTimeoutError(f"the peer came no further in {timeout_s} s") from error
            state = self.state(peer, header, left_s)
            if accept(state):
                return state
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def close(self) -> None:
        """Take the place for headers back."""
        self.memory.unregister(self._region)
