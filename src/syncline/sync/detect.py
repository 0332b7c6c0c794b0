"""The `snapshot` detector: compare with the base bits, window by window, and refresh them in that pass."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from syncline import kernels
from syncline.sync.phases import Phases
from syncline.types import WINDOW_UNITS, ZERO, Bits, TensorMeta, Window


class Difference:
    """Iterate windows of one tensor; afterwards `changed` and `fingerprint` say what was found in them.

    One pass: after it, `snapshot` holds the bits of `new`. Windows show the snapshot's bits, so that what
    is encoded is what the fingerprint is of, even if somebody writes to `new` meanwhile.
    Memory: O(changes of one window).

    Args:
        snapshot: (meta.unit_count,) bits at the base version; overwritten by `new`.
        new: (meta.unit_count,) bits to publish; only read.
        units: which of the tensor's units to go through, beginning at a window's first; all by default.
    """

    def __init__(
        self,
        meta: TensorMeta,
        snapshot: Bits,
        new: Bits,
        phases: Phases,
        units: range | None = None,
    ) -> None:
        self._meta = meta
        self._snapshot = snapshot
        self._new = new
        self._phases = phases
        self._units = range(meta.unit_count) if units is None else units
        self.changed = 0
        self.fingerprint = ZERO

    def __iter__(self) -> Iterator[Window]:
        seeds = kernels.seeds(self._meta.name)
        for start in range(self._units.start, self._units.stop, WINDOW_UNITS):
            stop = min(start + WINDOW_UNITS, self._units.stop)
            snapshot = self._snapshot[start:stop]
            with self._phases("diff"):
                offsets, old_bits, new_bits = kernels.diff(
                    snapshot, self._new[start:stop], refresh=True
                )
                self.changed += offsets.size
                self.fingerprint += kernels.fingerprint_change(
                    start, offsets, old_bits, new_bits, seeds
                )
            yield Window(start, snapshot, offsets, old_bits, new_bits)


def dense_windows(bits: Bits, units: range | None = None) -> Iterator[Window]:
    """Yield windows that carry all bits and no changes, for codecs that need no base."""
    nothing = np.empty(0, np.uint32)
    wanted = range(bits.size) if units is None else units
    for start in range(wanted.start, wanted.stop, WINDOW_UNITS):
        window = bits[start : min(start + WINDOW_UNITS, wanted.stop)]
        yield Window(start, window, nothing, window[:0], window[:0])
