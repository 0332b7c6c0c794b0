"""Positions and new values of one tensor, checked and cut into windows; and windows gathered into both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from syncline.errors import CodecError, LayoutError
from syncline.types import WINDOW_UNITS, Bits, Changes, TensorMeta, Window, unsigned

MAX_INT32 = (1 << 31) - 1
"""The last position that a signed 32-bit index reaches."""


def changes(meta: TensorMeta, positions: NDArray[np.int64], bits: Bits) -> Iterator[Changes]:
    """Yield what to overwrite, window by window.

    Args:
        positions: (k,) int64, unit indices in the tensor.
        bits: (k,) the new bits there.

    Raises:
        CodecError: positions and values are not equally many; or a position is not in the tensor, or not
            after the one before it (nothing was yielded yet).
    """
    if positions.size != bits.size:
        raise CodecError(
            f"there must be one value for each position: {positions.size}, {bits.size}"
        )
    _check_positions(positions, meta.unit_count)
    starts = np.arange(0, meta.unit_count, WINDOW_UNITS, dtype=np.int64)
    bounds = [*np.searchsorted(positions, starts), positions.size]
    for start, first, last in zip(starts.tolist(), bounds[:-1], bounds[1:], strict=True):
        if last > first:
            offsets = (positions[first:last] - start).astype(np.uint32)
            yield Changes(start, offsets, bits[first:last])


def from_gaps(gaps: NDArray[np.unsignedinteger]) -> NDArray[np.int64]:
    """Return positions from gaps: each is the number of units between a position and the one before it.

    Example:
        >>> from_gaps(np.array([0, 0, 5], np.uint16)).tolist()
        [0, 1, 7]
    """
    return np.cumsum(gaps.astype(np.int64) + 1) - 1


def check_base(meta: TensorMeta, dtype: str | None, shape: tuple[int, ...] | None) -> None:
    """Check that a tensor of the base is the one that a version was made on.

    Raises:
        LayoutError: dtype or shape differ; None stands for what a layout does not say.
    """
    if dtype not in (None, meta.dtype) or shape not in (None, meta.shape):
        raise LayoutError(
            f"tensor {meta.name!r}: the version says {dtype or meta.dtype} {list(shape or ())}, the base has "
            f"{meta.dtype} {list(meta.shape)}",
            tensor=meta.name,
        )


def gathered(meta: TensorMeta, windows: Iterable[Window]) -> tuple[NDArray[np.int64], Bits]:
    """Return all positions and new bits of a tensor's windows.

    Memory: O(changes).
    """
    positions = [np.empty(0, np.int64)]
    bits = [np.empty(0, unsigned(meta.unit_bytes))]
    for window in windows:
        positions.append(window.offsets.astype(np.int64) + window.start)
        bits.append(window.new_bits.copy())
    return np.concatenate(positions), np.concatenate(bits)


def _check_positions(positions: NDArray[np.int64], limit: int) -> None:
    if not positions.size:
        return
    if (bad := np.flatnonzero((positions < 0) | (positions >= limit))).size:
        raise CodecError(
            f"position {bad[0]} must be from 0 to {limit - 1}, found {positions[bad[0]]}"
        )
    if (bad := np.flatnonzero(positions[1:] <= positions[:-1])).size:
        at = bad[0]
        raise CodecError(
            f"position {at + 1} must be after {positions[at]}, found {positions[at + 1]}: out of order, or "
            "there twice"
        )
