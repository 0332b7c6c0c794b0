"""The door to how changes are told: gaps between places, and values by steps from the base or in symbols.

As everywhere behind `syncline.kernels`, where these are public: checked here, native where it is built.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from syncline.errors import CodecError, LayoutError
from syncline.kernels import values_reference as reference
from syncline.kernels.backend import fastest
from syncline.kernels.checks import (
    check_bits,
    check_changes,
    check_low_bytes,
    check_offsets,
    check_pair,
    check_width,
    check_window,
)
from syncline.kernels.values_reference import Told
from syncline.types import Bits


def steps(old: Bits, new: Bits) -> Bits:
    """Return `new - old`, modulo the width, as a signed number in zigzag form: 0, -1, 1 -> 0, 1, 2.

    Raises:
        LayoutError: widths or lengths differ.

    Example:
        >>> steps(np.array([7, 7, 7], np.uint8), np.array([7, 6, 8], np.uint8)).tolist()
        [0, 1, 2]
    """
    check_pair(old, new)
    return reference.steps(old, new)


def unsteps(old: Bits, zigzag: Bits) -> Bits:
    """Undo `steps`: return the new bits.

    Raises:
        LayoutError: widths or lengths differ.
    """
    check_pair(old, zigzag)
    return reference.unsteps(old, zigzag)


def write_symbols(old: Bits, new: Bits, *, is_step: bool) -> tuple[int, NDArray[np.uint8], Bits]:
    """Tell changed units from their base in symbols of a few bits (docs/reference/format.md section 6.5).

    Args:
        old, new: (k,) bits of the same width that differ everywhere.
        is_step: tell the distance in steps, see `steps`; else the bits that differ.

    Returns:
        bits of a symbol (1, 4 or 8); symbols, packed; excess (m,), of those that a symbol cannot tell.

    Raises:
        LayoutError: widths or lengths differ.

    Example:
        >>> bits, symbols, excess = write_symbols(
        ...     np.array([7, 7, 7], np.uint16), np.array([8, 6, 99], np.uint16), is_step=True
        ... )
        >>> bits, symbols.tolist(), excess.tolist()
        (4, [1, 15], [168])
    """
    check_pair(old, new)
    told: tuple[int, NDArray[np.uint8], Bits] = fastest("values").write_symbols(
        old, new, is_step=is_step
    )
    return told


def read_symbols(
    old: Bits, symbols: NDArray[np.uint8], bits: int, excess: Bits, *, is_step: bool
) -> Bits:
    """Return the new bits that `write_symbols` told; any input is either refused or gives new bits.

    Raises:
        LayoutError: an argument is not of the right type or length.
        CodecError: these are not what `write_symbols` makes of so many changes.

    Example:
        >>> old, symbols = np.array([7, 7, 7], np.uint16), np.array([1, 15], np.uint8)
        >>> read_symbols(old, symbols, 4, np.array([168], np.uint16), is_step=True).tolist()
        [8, 6, 99]
    """
    _check_symbols(symbols, bits, old.size)
    check_width(old, excess)
    new: Bits = fastest("values").read_symbols(old, symbols, bits, excess, is_step=is_step)
    return new


def _check_symbols(symbols: NDArray[np.uint8], bits: int, count: int) -> None:
    check_bits(symbols)
    if bits not in (1, 2, 4, 8) or symbols.dtype != np.uint8:
        raise LayoutError(
            f"symbols must be uint8 of 1, 2, 4 or 8 bits, not {symbols.dtype} of {bits}"
        )
    if symbols.size != -(-count * bits // 8):
        raise LayoutError(f"{symbols.size} bytes do not hold {count} symbols of {bits} bits")


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
    gaps: tuple[NDArray[np.uint8], NDArray[np.uint8]] = fastest("values").encode_gaps(
        offsets, low_bytes
    )
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
    _check_gaps(low, high, count, limit)
    offsets: NDArray[np.uint32] = fastest("values").decode_gaps(
        np.ascontiguousarray(low), np.ascontiguousarray(high), count, limit
    )
    return offsets


def _check_gaps(low: NDArray[np.uint8], high: NDArray[np.uint8], count: int, limit: int) -> None:
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


def write_changes(
    offsets: NDArray[np.uint32], low_bytes: int, old: Bits, new: Bits, *, is_step: bool
) -> Told:
    """Tell changes by `encode_gaps` and `write_symbols`, in one call.

    Args:
        offsets: (k,) uint32, strictly ascending: `check_ascending` holds.
        old, new: (k,) bits of the same width that differ everywhere.

    Raises:
        LayoutError: an argument is not of the right type or length.

    Example:
        >>> old = np.array([7, 7], np.uint16)
        >>> told = write_changes(np.array([1, 5], np.uint32), 0, old, old + 1, is_step=True)
        >>> told.high.tolist(), told.symbol_bits, told.symbols.tolist(), told.excess.size
        ([1, 3], 1, [3], 2)
    """
    check_changes(offsets, new)
    check_pair(old, new)
    check_low_bytes(low_bytes)
    told: Told = fastest("values").write_changes(offsets, low_bytes, old, new, is_step=is_step)
    return told


def read_changes(
    told: Told, count: int, base: Bits, *, is_step: bool
) -> tuple[NDArray[np.uint32], Bits, Bits]:
    """Return the offsets, the base's bits there, and the new bits that `write_changes` told.

    Any input is either refused or gives legal offsets and bits that all differ from the base's.

    Args:
        count: number of changes announced.
        base: (n,) bits of the window; every offset must be below n.

    Raises:
        LayoutError: an argument is not of the right type or length.
        CodecError: these are not what `write_changes` makes of so many changes of such a window.
            Checked before O(count) is allocated: `count` is not above n.
    """
    check_width(base, told.excess)
    _check_gaps(told.low, told.high, count, base.size)
    _check_symbols(told.symbols, told.symbol_bits, count)
    found: tuple[NDArray[np.uint32], Bits, Bits] = fastest("values").read_changes(
        told, count, base, is_step=is_step
    )
    return found
