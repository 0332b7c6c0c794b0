"""The one door to fast code: arguments are checked here, then the fastest kernel there is runs.

Bits are flat, C-contiguous unsigned arrays of 1, 2, 4 or 8 bytes a unit and may be unaligned views; they
are compared and copied as integers. The native kernels are used where they are built, else the numpy
reference, with the same results bit for bit. Nothing here starts threads or keeps state.

`diff`, `scatter`, `gather`, `fingerprint` and `fingerprint_change` also take bits and offsets in GPU memory,
as torch tensors, and give results there; `syncline.kernels.gpu` says what is different.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from syncline.errors import CodecError, ConfigError, LayoutError
from syncline.kernels import reference
from syncline.kernels.backend import is_native
from syncline.kernels.checks import (
    check_axes,
    check_bits,
    check_changes,
    check_low_bytes,
    check_offsets,
    check_pair,
    check_positions,
    check_start,
    check_width,
    check_window,
    check_writable,
)
from syncline.kernels.values import read_symbols, steps, unsteps, write_symbols
from syncline.types import Bits, Fingerprint

__all__ = [
    "check_ascending",
    "decode_gaps",
    "diff",
    "encode_gaps",
    "fingerprint",
    "fingerprint_change",
    "gather",
    "join_planes",
    "map_positions",
    "read_symbols",
    "read_words",
    "scatter",
    "seeds",
    "split_planes",
    "steps",
    "unsteps",
    "write_symbols",
    "xor",
]


seeds = reference.seeds


@cache
def _backend() -> ModuleType:
    return import_module("syncline.kernels.native") if is_native() else reference


def _gpu() -> ModuleType:
    if find_spec("triton") is None:
        raise ConfigError(
            "weights in GPU memory need triton, which is not installed: install syncline[gpu]"
        )
    return import_module("syncline.kernels.gpu")


def diff(old: Bits, new: Bits, *, refresh: bool = False) -> tuple[NDArray[np.uint32], Bits, Bits]:
    """Find where two arrays differ, in one pass; with `refresh`, also make `old` equal `new`.

    Args:
        old, new: (n,) bits of the same width; n at most 2**32. `old` is written if `refresh`.

    Returns:
        offsets (k,) uint32, strictly ascending; old bits (k,) as before the call; new bits (k,).

    Raises:
        LayoutError: widths or lengths differ, or `old` is read-only and is to be refreshed.

    Cost: one pass over both; allocates O(k). Aliasing: results are copies.

    Example:
        >>> old, new = np.array([5, 6, 7], "u2"), np.array([5, 9, 7], "u2")
        >>> [part.tolist() for part in diff(old, new)]
        [[1], [6], [9]]
    """
    if not isinstance(old, np.ndarray):
        return _gpu().diff(old, new, refresh=refresh)
    check_pair(old, new)
    check_window(old.size)
    if refresh:
        check_writable(old)
    changes: tuple[NDArray[np.uint32], Bits, Bits] = _backend().diff(old, new, refresh=refresh)
    return changes


def scatter(target: Bits, offsets: NDArray[np.uint32], bits: Bits) -> None:
    """Write `bits[i]` at `target[offsets[i]]`, in order; all of them or, on an error, none.

    Raises:
        LayoutError: widths or lengths do not fit, or `target` is read-only.
        CodecError: an offset is not below the length of `target`; names the first.
    """
    if not isinstance(target, np.ndarray):
        _gpu().scatter(target, offsets, bits)
        return
    check_changes(offsets, bits)
    check_width(target, bits)
    check_writable(target)
    _backend().scatter(target, offsets, bits)


def gather(source: Bits, offsets: NDArray[np.uint32]) -> Bits:
    """Return a copy of the units of `source` at `offsets`, in that order.

    Raises:
        LayoutError: an argument is not of the right type.
        CodecError: an offset is not below the length of `source`; names the first.
    """
    if not isinstance(source, np.ndarray):
        return _gpu().gather(source, offsets)
    check_bits(source)
    check_offsets(offsets)
    bits: Bits = _backend().gather(source, offsets)
    return bits


def check_ascending(offsets: NDArray[np.uint32], limit: int) -> None:
    """Return if the offsets rise strictly and all lie below `limit`.

    Raises:
        CodecError: they do not; names the first offset that is out of range, or else out of order.

    Example:
        >>> check_ascending(np.array([1, 5, 9], np.uint32), 10)
    """
    check_offsets(offsets)
    reference.check_ascending(offsets, limit)


def xor(a: Bits, b: Bits) -> Bits:
    """Return the bitwise XOR of two arrays of the same width and length, as a new array.

    Raises:
        LayoutError: widths or lengths differ.
    """
    check_pair(a, b)
    mixed: Bits = _backend().xor(a, b)
    return mixed


def read_words(first: Bits, second: Bits) -> int:
    """Return the sum, modulo 2**64, of both arrays' bytes as 64-bit words; a shorter one's length counts.

    It does nothing but read, and so measures the roof for the others. Bytes beyond the last whole word
    are left out.
    """
    check_pair(first, second)
    total: int = _backend().read_words(first, second)
    return total


def fingerprint(bits: Bits, start: int, seeds: tuple[int, int]) -> Fingerprint:
    """Return the fingerprint of consecutive units of a tensor; pieces add up to the whole.

    Args:
        bits: (n,) bits; n may be 0.
        start: unit index of `bits[0]` in its tensor.
        seeds: what `seeds` returns for the tensor's name.

    Source: docs/reference/format.md section 5. Cost: one pass, no allocation.

    Raises:
        LayoutError: `bits` is not of the right type, or `start` is negative or beyond 64 bits.

    Example:
        >>> bits, keys = np.arange(5000, dtype=np.uint16), seeds("model.norm.weight")
        >>> parts = fingerprint(bits[:1700], 0, keys) + fingerprint(bits[1700:], 1700, keys)
        >>> parts == fingerprint(bits, 0, keys)
        True
    """
    if not isinstance(bits, np.ndarray):
        return _gpu().fingerprint(bits, start, seeds)
    check_bits(bits)
    check_start(start)
    total: Fingerprint = _backend().fingerprint(bits, start, seeds)
    return total


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
        >>> old, keys = np.arange(9, dtype=np.uint8), seeds("t")
        >>> new = old.copy()
        >>> new[4] = 200
        >>> change = fingerprint_change(0, *diff(old, new), keys)
        >>> fingerprint(old, 0, keys) + change == fingerprint(new, 0, keys)
        True
    """
    if not isinstance(old_bits, np.ndarray):
        return _gpu().fingerprint_change(start, offsets, old_bits, new_bits, seeds)
    check_pair(old_bits, new_bits)
    check_changes(offsets, new_bits)
    check_start(start)
    change: Fingerprint = _backend().fingerprint_change(start, offsets, old_bits, new_bits, seeds)
    return change


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
    found: tuple[NDArray[np.int64], Bits] = _backend().map_positions(
        positions, bits, axes, first, other
    )
    return found


def encode_gaps(
    offsets: NDArray[np.uint32], low_bytes: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Turn strictly ascending offsets into gap bytes (docs/reference/format.md section 6.5).

    Args:
        offsets: (k,) uint32, strictly ascending: `check_ascending` holds.
        low_bytes: 0, 1 or 2: how many low bytes of every gap go to planes of their own.

    Returns:
        low (low_bytes, k) uint8 planes; high (m,) uint8: the rest of each gap, escaped by 255s.

    Raises:
        LayoutError: the offsets are not uint32, or `low_bytes` is not 0, 1 or 2.

    Example:
        >>> low, high = encode_gaps(np.array([3, 4, 1000], np.uint32), 1)
        >>> low.tolist(), high.tolist()
        ([[3, 0, 227]], [0, 0, 3])
    """
    check_offsets(offsets)
    check_low_bytes(low_bytes)
    gaps: tuple[NDArray[np.uint8], NDArray[np.uint8]] = _backend().encode_gaps(offsets, low_bytes)
    return gaps


def decode_gaps(
    low: NDArray[np.uint8], high: NDArray[np.uint8], count: int, limit: int
) -> NDArray[np.uint32]:
    """Turn gap bytes back into offsets; any input is either refused or gives legal offsets.

    Args:
        low: (low_bytes, count) uint8.
        high: (m,) uint8.
        count: number of offsets announced.
        limit: every offset must be below it; at most 2**32.

    Returns:
        offsets (count,) uint32, strictly ascending, below `limit`.

    Raises:
        CodecError: the bytes are not what `encode_gaps` makes of `count` offsets below `limit`.
            Checked before O(count) is allocated: `count` is not above `limit`.

    Example:
        >>> decode_gaps(np.array([[3, 0, 227]], np.uint8), np.array([0, 0, 3], np.uint8), 3, 1001).tolist()
        [3, 4, 1000]
    """
    check_window(limit)
    check_low_bytes(low.shape[0] if low.ndim == 2 else -1)
    if not 0 <= count <= limit:
        raise CodecError(f"{count} changes are announced for a window of {limit} units")
    if low.dtype != np.uint8 or low.shape[1] != count:
        raise CodecError(f"the low gap bytes hold {low.shape[1]} gaps where {count} are announced")
    longest = count + (limit >> 8 * low.shape[0]) // reference.ESCAPE
    if high.dtype != np.uint8 or high.ndim != 1 or not count <= high.size <= longest:
        raise CodecError(
            f"{high.size} high gap bytes cannot hold {count} gaps in a window of {limit} units: "
            f"expected {count} to {longest}"
        )
    offsets: NDArray[np.uint32] = _backend().decode_gaps(
        np.ascontiguousarray(low), np.ascontiguousarray(high), count, limit
    )
    return offsets


def split_planes(bits: Bits, *, rotated: bool = False) -> NDArray[np.uint8]:
    """Return (unit_bytes, k) uint8: row p holds byte p of every unit, the lowest byte first.

    Args:
        bits: (k,) bits.
        rotated: take the bytes of every unit rotated left by one bit.

    Cost: one pass, at about memory speed; allocates as much as `bits` has.

    Example:
        >>> split_planes(np.array([0x1234, 0x5678], np.uint16)).tolist() == [[0x34, 0x78], [0x12, 0x56]]
        True
    """
    check_bits(bits)
    planes: NDArray[np.uint8] = _backend().split_planes(bits, rotated=rotated)
    return planes


def join_planes(planes: Sequence[NDArray[np.uint8]], *, rotated: bool = False) -> Bits:
    """Undo `split_planes`: return (k,) bits, as many bytes wide as there are planes (1, 2, 4 or 8).

    Args:
        planes: flat uint8 arrays of one length.
        rotated: as in `split_planes`.

    Raises:
        LayoutError: there are not 1, 2, 4 or 8 planes, or they differ in length or are not uint8.
    """
    if len(planes) not in (1, 2, 4, 8):
        raise LayoutError(f"a unit has 1, 2, 4 or 8 byte planes, not {len(planes)}")
    for plane in planes:
        check_pair(plane, planes[0])
        if plane.dtype != np.uint8:
            raise LayoutError(f"byte planes must be uint8, not {plane.dtype}")
    bits: Bits = _backend().join_planes(planes, rotated=rotated)
    return bits
