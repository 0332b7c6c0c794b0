"""Which units of a window were written since a version, and what stood there at that version.

Places are kept as a list while few units are dirty, and as one bit a unit once that is smaller. The old
bits of every dirty unit are kept beside them, so that the base is known wherever it may differ.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from syncline.types import Bits, unsigned

Offsets = NDArray[np.uint32]

_LEAST_RECENT_BYTES = 1 << 16


class DirtyWindow:
    """The dirty units of one window of `units` units of `unit_bytes` bytes.

    Memory: at most one bit a unit, and `unit_bytes` for every dirty unit; about twice that while writes
    have come in that were not merged yet.

    Example:
        >>> window = DirtyWindow(100, 2)
        >>> window.add(np.array([3, 7], np.uint32), np.array([30, 70], np.uint16))
        >>> window.add(np.array([2, 7], np.uint32), np.array([20, 71], np.uint16))
        >>> [part.tolist() for part in window.merged()]
        [[2, 3, 7], [20, 30, 70]]
    """

    def __init__(self, units: int, unit_bytes: int) -> None:
        self._units = units
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

        Cost: O(1); now and then O(dirty units), so that the sum stays in proportion to what was added.
        """
        if not offsets.size:
            return
        self._recent.append((offsets, old_bits))
        self._recent_bytes += offsets.nbytes + old_bits.nbytes
        settled_bytes = self._places.nbytes + self._old_bits.nbytes
        if self._recent_bytes > max(_LEAST_RECENT_BYTES, self._units // 8, settled_bytes):
            self._merge()

    def merged(self) -> tuple[Offsets, Bits]:
        """Return the dirty units, strictly ascending, and what stood there at first.

        Aliasing: the arrays belong to the window; only read them.
        """
        if self._recent:
            self._merge()
        return self._offsets(), self._old_bits

    def _merge(self) -> None:
        # The oldest comes first, and of equal offsets the first is taken.
        pieces = [(self._offsets(), self._old_bits), *self._recent]
        pieces = [piece for piece in pieces if piece[0].size]
        offsets, old_bits = pieces[0]
        if len(pieces) > 1:
            every = np.concatenate([offsets for offsets, _ in pieces])
            offsets, first = np.unique(every, return_index=True)
            old_bits = np.concatenate([bits for _, bits in pieces])[first]
        self._places, self._old_bits = _smaller(offsets, self._units), old_bits
        self._recent, self._recent_bytes = [], 0

    def _offsets(self) -> Offsets:
        if self._places.dtype == np.uint32:
            return self._places.view(np.uint32)
        is_dirty = np.unpackbits(self._places.view(np.uint8), bitorder="little", count=self._units)
        return np.flatnonzero(is_dirty).astype(np.uint32)


def _smaller(offsets: Offsets, units: int) -> NDArray[np.uint8] | Offsets:
    """Return the offsets, or one bit for every unit if that takes less memory."""
    if offsets.nbytes <= -(-units // 8):
        return offsets
    is_dirty = np.zeros(units, np.bool_)
    is_dirty[offsets] = True
    return np.packbits(is_dirty, bitorder="little")
