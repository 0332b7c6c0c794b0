"""The `snapshot` detector: compare with the base bits, window by window, and refresh them in that pass."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from syncline import device, kernels
from syncline.device import DeviceCopies
from syncline.errors import VerifyError
from syncline.sync.phases import Phases
from syncline.types import WINDOW_UNITS, ZERO, Bits, DeviceBits, Fingerprint, TensorMeta, Window


class Difference:
    """Iterate windows of one tensor; afterwards `changed` and `fingerprint` say what was found in them.

    One pass: after it, `snapshot` holds the bits of `new`. Windows show the snapshot's bits, so that what
    is encoded is what the fingerprint is of, even if somebody writes to `new` meanwhile.
    Memory: O(changes of one window).

    Args:
        snapshot: (meta.unit_count,) bits at the base version; overwritten by `new`.
        new: (meta.unit_count,) bits to publish; only read.
        units: which of the tensor's units to go through, beginning at a window's first; all by default.
        copies: where `new` lies on a device, it is compared there with the copy that these hold, and
            changes alone come to the host. None: all of it comes.

    May be iterated in another thread than the one that made it, whose stream it follows on a device.
    """

    def __init__(
        self,
        meta: TensorMeta,
        snapshot: Bits,
        new: Bits | DeviceBits,
        phases: Phases,
        units: range | None = None,
        copies: DeviceCopies | None = None,
    ) -> None:
        self._meta = meta
        self._snapshot = snapshot
        self._new = new
        self._phases = phases
        self._units = range(meta.unit_count) if units is None else units
        self.changed = 0
        self.fingerprint = ZERO
        device.follow(new)
        self._copy: DeviceBits | None = None
        if copies is not None and not isinstance(new, np.ndarray):
            self._copy = copies.of(meta, snapshot, new)

    def __iter__(self) -> Iterator[Window]:
        found = self._found(kernels.seeds(self._meta.name))
        while True:
            with self._phases("diff"):
                window, rise = next(found, (None, ZERO))
                if window is None:
                    return
                self.changed += window.offsets.size
                self.fingerprint += rise
            yield window

    def _found(self, seeds: tuple[int, int]) -> Iterator[tuple[Window, Fingerprint]]:
        if self._copy is None:
            for start, new in device.host_windows(self._new, self._units):
                snapshot = self._snapshot[start : start + new.size]
                changes, rise = kernels.diff_and_fingerprint(
                    snapshot, new, start, seeds, refresh=True
                )
                yield Window(start, snapshot, *changes), rise
            return
        windows = device.changes_on_device(self._copy, self._new, self._units)
        for start, (offsets, old_bits, new_bits) in windows:
            snapshot = self._snapshot[start : min(start + WINDOW_UNITS, self._units.stop)]
            self._refresh(start, snapshot, offsets, old_bits, new_bits)
            rise = kernels.fingerprint_change(start, offsets, old_bits, new_bits, seeds)
            yield Window(start, snapshot, offsets, old_bits, new_bits), rise

    def _refresh(
        self,
        start: int,
        snapshot: Bits,
        offsets: NDArray[np.uint32],
        old_bits: Bits,
        new_bits: Bits,
    ) -> None:
        """Bring a window of the snapshot to what the device's copy holds, if both were the same before."""
        if not np.array_equal(kernels.gather(snapshot, offsets), old_bits):
            raise VerifyError(
                f"tensor {self._meta.name!r}: the copy on the GPU and the snapshot on the host differ "
                f"among the {offsets.size} changes from unit {start} on; something else wrote to one of "
                "them, or memory is faulty; publish again, both are rebuilt from the store",
                tensor=self._meta.name,
            )
        kernels.scatter(snapshot, offsets, new_bits)


def dense_windows(bits: Bits, units: range | None = None) -> Iterator[Window]:
    """Yield windows that carry all bits and no changes, for codecs that need no base."""
    nothing = np.empty(0, np.uint32)
    wanted = range(bits.size) if units is None else units
    for start in range(wanted.start, wanted.stop, WINDOW_UNITS):
        window = bits[start : min(start + WINDOW_UNITS, wanted.stop)]
        yield Window(start, window, nothing, window[:0], window[:0])
