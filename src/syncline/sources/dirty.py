"""Which units of a window were written since a version, and what stood there at that version.

Writes come in as lists of places and old bits; once these would take much memory, they are merged, and
places are kept as one dirty bit a unit where that is smaller. The old bits of every dirty unit are kept, so
that the base is known wherever it may differ.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from syncline.types import Bits, unsigned

Offsets = NDArray[np.uint32]

# Sorting is the faster way to merge while less than one unit in so many is dirty.
_FEW = 8


class DirtyWindow:
    """The dirty units of one window of `units` units of `unit_bytes` bytes.

    Memory: at most one bit a unit, and `unit_bytes` for every dirty unit. Writes that were not merged yet
    stand beside that as lists of 4 + `unit_bytes` bytes for every unit that changed: at most a quarter of
    the window's size or as much again, and one write more.

    Example:
        >>> window = DirtyWindow(100, 2)
        >>> window.add(np.array([3, 7], np.uint32), np.array([30, 70], np.uint16))
        >>> window.add(np.array([2, 7], np.uint32), np.array([20, 71], np.uint16))
        >>> [part.tolist() for part in window.merged()]
        [[2, 3, 7], [20, 30, 70]]
    """

    def __init__(self, units: int, unit_bytes: int) -> None:
        self._units = units
        self._list_bytes = units * unit_bytes // 4
        self._places: NDArray[np.uint8] | Offsets = np.empty(0, np.uint32)
        self._old_bits: Bits = np.empty(0, unsigned(unit_bytes))
        self._recent: list[tuple[Offsets, Bits]] = []
        self._recent_bytes = 0

    @property
    def memory_bytes(self) -> int:
        """Bytes of the arrays that are held."""
        return self._places.nbytes + self._old_bits.nbytes + self._recent_bytes

    def add(self, offsets: Offsets, old_bits: Bits) -> None:
        """Mark units that have just changed; what stood there counts if they were clean before.

        Args:
            offsets: (k,) uint32, strictly ascending, below the window's length. Kept, not copied.
            old_bits: (k,) what stood there before this write. Kept, not copied.

        Cost: O(1); now and then one pass over the window, so that the lists stay short.
        """
        if not offsets.size:
            return
        self._recent.append((offsets, old_bits))
        self._recent_bytes += offsets.nbytes + old_bits.nbytes
        settled_bytes = self._places.nbytes + self._old_bits.nbytes
        if self._recent_bytes > max(self._list_bytes, settled_bytes):
            offsets, self._old_bits = self.merged()
            self._places = _smaller(offsets, self._units)
            self._recent, self._recent_bytes = [], 0

    def merged(self) -> tuple[Offsets, Bits]:
        """Return the dirty units, strictly ascending, and what stood there at first.

        Aliasing: the arrays may belong to the window; only read them.
        """
        settled = self._offsets(), self._old_bits
        pieces = [piece for piece in (settled, *self._recent) if piece[0].size]
        if len(pieces) <= 1:
            return pieces[0] if pieces else settled
        if sum(offsets.size for offsets, _ in pieces) > self._units // _FEW:
            return _first_of_many(pieces, self._units)
        return _first_of_few(pieces)

    def _offsets(self) -> Offsets:
        if self._places.dtype == np.uint32:
            return self._places.view(np.uint32)
        is_dirty = np.unpackbits(self._places.view(np.uint8), bitorder="little", count=self._units)
        return np.flatnonzero(is_dirty.view(np.bool_)).astype(np.uint32)


def _first_of_few(pieces: list[tuple[Offsets, Bits]]) -> tuple[Offsets, Bits]:
    """Merge lists of which the oldest come first; of equal offsets the first is taken."""
    every = np.concatenate([offsets for offsets, _ in pieces])
    offsets, first = np.unique(every, return_index=True)
    return offsets, np.concatenate([old_bits for _, old_bits in pieces])[first]


def _first_of_many(pieces: list[tuple[Offsets, Bits]], units: int) -> tuple[Offsets, Bits]:
    """Do the same in a time that depends on the window more than on the lists."""
    is_dirty = np.zeros(units, np.bool_)
    window = np.empty(units, pieces[0][1].dtype)
    for places, old_bits in reversed(pieces):
        is_dirty[places] = True
        window[places] = old_bits
    offsets = np.flatnonzero(is_dirty).astype(np.uint32)
    return offsets, window[offsets]


def _smaller(offsets: Offsets, units: int) -> NDArray[np.uint8] | Offsets:
    """Return the offsets, or one bit for every unit if that takes less memory."""
    if offsets.nbytes <= -(-units // 8):
        return offsets
    is_dirty = np.zeros(units, np.bool_)
    is_dirty[offsets] = True
    return np.packbits(is_dirty, bitorder="little")
