"""The door to lists of changes: places in a window, and the bits at them.

As everywhere behind `syncline.kernels`, where these are public: checked here, native where it is built.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from syncline.kernels.backend import fastest, on_gpu
from syncline.kernels.checks import (
    check_axes,
    check_bits,
    check_changes,
    check_offsets,
    check_pair,
    check_positions,
    check_start,
    check_width,
    check_window,
    check_writable,
)
from syncline.types import Bits, Fingerprint


def scatter(target: Bits, offsets: NDArray[np.uint32], bits: Bits) -> None:
    """Write `bits[i]` at `target[offsets[i]]`, in order; all of them or, on an error, none.

    Raises:
        LayoutError: widths or lengths do not fit, or `target` is read-only.
        CodecError: an offset is not below the length of `target`; names the first.
    """
    if not isinstance(target, np.ndarray):
        on_gpu().scatter(target, offsets, bits)
        return
    check_changes(offsets, bits)
    check_width(target, bits)
    check_writable(target)
    fastest("").scatter(target, offsets, bits)


def gather(source: Bits, offsets: NDArray[np.uint32]) -> Bits:
    """Return a copy of the units of `source` at `offsets`, in that order.

    Raises:
        LayoutError: an argument is not of the right type.
        CodecError: an offset is not below the length of `source`; names the first.
    """
    if not isinstance(source, np.ndarray):
        return on_gpu().gather(source, offsets)
    check_bits(source)
    check_offsets(offsets)
    bits: Bits = fastest("").gather(source, offsets)
    return bits


def first_difference(
    source: Bits, bits: Bits, offsets: NDArray[np.uint32] | None = None
) -> int | None:
    """Return the index of the first unit of `bits` that is not what stands at its place; None if none is.

    Args:
        offsets: (k,) where in `source` the k units of `bits` must stand, in any order; None: all of it.

    Raises:
        LayoutError: widths or lengths do not fit.
        CodecError: an offset is not below the length of `source`; names the first.

    Cost: allocates nothing, unless there are no offsets and something differs.

    Example:
        >>> source = np.array([5, 6, 7], np.uint16)
        >>> first_difference(source, np.array([5, 9], np.uint16), np.array([0, 2], np.uint32))
        1
    """
    if offsets is None:
        check_pair(source, bits)
        return None if np.array_equal(source, bits) else int(np.argmax(source != bits))
    check_changes(offsets, bits)
    check_width(source, bits)
    found: int | None = fastest("").first_difference(source, bits, offsets)
    return found


def check_ascending(offsets: NDArray[np.uint32], limit: int) -> None:
    """Return if the offsets rise strictly and all lie below `limit`.

    Raises:
        CodecError: they do not; names the first offset that is out of range, or else out of order.

    Example:
        >>> check_ascending(np.array([1, 5, 9], np.uint32), 10)
    """
    check_offsets(offsets)
    check_window(limit)
    fastest("").check_ascending(offsets, limit)


def map_positions(
    positions: NDArray[np.int64],
    bits: Bits,
    axes: Sequence[tuple[int, int, int]],
    first: int,
    other: int,
) -> tuple[NDArray[np.int64], Bits]:
    """Return where those of the positions that a block holds lie on its other side, and their bits.

    Args:
        positions: (k,) flat indices on this side; in any order, but fastest when they rise.
        bits: (k,) bits that belong to them.
        axes: of the block: stride, count, and stride on the other side; strides fall, and each is at
            least as much as all axes after it span. None: the block is one element.
        first, other: flat index of the block's first element on this side and on the other.

    Returns:
        mapped (m,) int64 and bits (m,), of the m positions that the block holds, in the order given.

    Raises:
        LayoutError: an argument is not of the right type, length or sign.

    Cost: O(k), with a division for each axis about once a stretch of the innermost one.

    Example:
        >>> bits = np.array([7, 8, 9], np.uint16)
        >>> mapped, moved = map_positions(np.array([4, 11, 13]), bits, [(6, 3, 2), (1, 2, 1)], 0, 100)
        >>> mapped.tolist(), moved.tolist()
        ([105], [9])
    """
    check_bits(bits)
    check_positions(positions, bits)
    check_axes(axes, first, other)
    found: tuple[NDArray[np.int64], Bits] = fastest("").map_positions(
        positions, bits, axes, first, other
    )
    return found


def fingerprint_change(
    start: int,
    offsets: NDArray[np.uint32],
    old_bits: Bits,
    new_bits: Bits,
    seeds: tuple[int, int],
) -> Fingerprint:
    """Return what to add to a tensor's fingerprint when units change from the old bits to the new.

    Args:
        start: unit index in the tensor that offset 0 stands for.
        offsets: (k,) uint32, in any order.
        old_bits, new_bits: (k,) bits before and after.
        seeds: what `seeds` returns for the tensor's name.

    Cost: O(k), no allocation.

    Raises:
        LayoutError: lengths or widths do not fit, or `start` is negative or beyond 64 bits.

    Example:
        >>> from syncline import kernels
        >>> old, keys = np.arange(9, dtype=np.uint8), kernels.seeds("t")
        >>> new = old.copy()
        >>> new[4] = 200
        >>> change = fingerprint_change(0, *kernels.diff(old, new), keys)
        >>> kernels.fingerprint(old, 0, keys) + change == kernels.fingerprint(new, 0, keys)
        True
    """
    if not isinstance(old_bits, np.ndarray):
        return on_gpu().fingerprint_change(start, offsets, old_bits, new_bits, seeds)
    check_pair(old_bits, new_bits)
    check_changes(offsets, new_bits)
    check_start(start)
    change: Fingerprint = fastest("").fingerprint_change(start, offsets, old_bits, new_bits, seeds)
    return change
