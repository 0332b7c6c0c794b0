"""What the door checks of its arguments; each raises LayoutError that says what it found."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from syncline.errors import LayoutError
from syncline.types import Bits, unsigned

_UNSIGNED = frozenset(map(unsigned, (1, 2, 4, 8)))
MAX_UNITS = 1 << 32
_MAX_START = (1 << 62) - 1


def check_bits(bits: Bits) -> None:
    """The array must be flat, contiguous, unsigned bits."""
    if bits.dtype not in _UNSIGNED:
        raise LayoutError(f"bits must be uint8, uint16, uint32 or uint64, not {bits.dtype}")
    if bits.ndim != 1 or not bits.flags.c_contiguous:
        raise LayoutError(
            f"bits must be flat and contiguous, not of shape {bits.shape} and strides {bits.strides}"
        )


def check_offsets(offsets: NDArray[np.uint32]) -> None:
    """The array must be flat, contiguous uint32."""
    check_bits(offsets)
    if offsets.dtype != np.uint32:
        raise LayoutError(f"offsets must be uint32, not {offsets.dtype}")


def check_width(a: Bits, b: Bits) -> None:
    """Both must be bits of one width."""
    check_bits(a)
    check_bits(b)
    if a.dtype != b.dtype:
        raise LayoutError(f"both arrays must have one width, not {a.dtype} and {b.dtype}")


def check_pair(a: Bits, b: Bits) -> None:
    """Both must be bits of one width and length."""
    check_width(a, b)
    if a.size != b.size:
        raise LayoutError(f"both arrays must have one length, not {a.size} and {b.size}")


def check_changes(offsets: NDArray[np.uint32], bits: Bits) -> None:
    """There must be one offset for each unit."""
    check_offsets(offsets)
    check_bits(bits)
    if offsets.size != bits.size:
        raise LayoutError(f"there are {offsets.size} offsets for {bits.size} units")


def check_writable(bits: Bits) -> None:
    """The array must be writable."""
    if not bits.flags.writeable:
        raise LayoutError("the array to write is read-only; pass a writable one")


def check_window(count: int) -> None:
    """A window must not be longer than offsets reach."""
    if count > MAX_UNITS:
        raise LayoutError(f"a window holds at most {MAX_UNITS} units, not {count}; split it")


def check_start(start: int) -> None:
    """A window must start where its units can still be counted in 64 bits."""
    if not 0 <= start <= _MAX_START:
        raise LayoutError(f"a window starts at a unit index of 0 to 2**62 - 1, not {start}")


def check_low_bytes(low_bytes: int) -> None:
    """Gaps have 0, 1 or 2 low bytes in planes of their own."""
    if low_bytes not in (0, 1, 2):
        raise LayoutError(f"gaps have 0, 1 or 2 low bytes in planes of their own, not {low_bytes}")


def check_positions(positions: NDArray[np.int64], bits: Bits) -> None:
    """There must be one position, flat, contiguous int64, for each unit."""
    if positions.dtype != np.int64 or positions.ndim != 1 or not positions.flags.c_contiguous:
        raise LayoutError(
            f"positions must be flat, contiguous int64, not {positions.dtype} of shape "
            f"{positions.shape}"
        )
    if positions.size != bits.size:
        raise LayoutError(f"there are {positions.size} positions for {bits.size} units")


def check_axes(axes: Sequence[tuple[int, int, int]], first: int, other: int) -> None:
    """Axes must fall, none within those after it, and places must not be negative."""
    span = 1
    for stride, count, other_stride in reversed(axes):
        if stride < span or count < 1 or other_stride < 0:
            raise LayoutError(
                "the axes of a block are strides that fall, each at least what the axes after it span, "
                f"and counts of at least 1, not {tuple(axes)}"
            )
        span = max(stride, span + (count - 1) * stride)
    if first < 0 or other < 0:
        raise LayoutError(f"a block begins at 0 or later on both sides, not at {first} and {other}")
