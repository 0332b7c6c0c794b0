"""The `snapshot` detector: compare with the base bits, window by window, and refresh them in that pass."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from syncline import kernels
from syncline.sync.phases import Phases
from syncline.types import WINDOW_UNITS, ZERO, Bits, TensorMeta, Window


class Difference:
    """Iterate the windows of one tensor; afterwards `changed` and `fingerprint` say what was found.

    One pass: after it, `snapshot` holds the bits of `new`. Windows show the snapshot's bits, so that what
    is encoded is what the fingerprint is of, even if somebody writes to `new` meanwhile.
    Memory: O(changes of one window).

    Args:
        snapshot: (meta.unit_count,) bits at the base version; overwritten by `new`.
        new: (meta.unit_count,) bits to publish; only read.
    """

    def __init__(self, meta: TensorMeta, snapshot: Bits, new: Bits, phases: Phases) -> None:
        self._meta = meta
        self._snapshot = snapshot
        self._new = new
        self._phases = phases
        self.changed = 0
        self.fingerprint = ZERO

    def __iter__(self) -> Iterator[Window]:
        seeds = kernels.seeds(self._meta.name)
        for start in range(0, self._meta.unit_count, WINDOW_UNITS):
            new = self._new[start : start + WINDOW_UNITS]
            snapshot = self._snapshot[start : start + WINDOW_UNITS]
            with self._phases("diff"):
                offsets, old_bits, new_bits = kernels.diff(snapshot, new, refresh=True)
                self.changed += offsets.size
                self.fingerprint += kernels.fingerprint_change(
                    start, offsets, old_bits, new_bits, seeds
                )
            yield Window(start, snapshot, offsets, old_bits, new_bits)


def dense_windows(bits: Bits) -> Iterator[Window]:
    """Yield windows that carry all bits and no changes, for codecs that need no base."""
    nothing = np.empty(0, np.uint32)
    for start in range(0, bits.size, WINDOW_UNITS):
        window = bits[start : start + WINDOW_UNITS]
        yield Window(start, window, nothing, window[:0], window[:0])
