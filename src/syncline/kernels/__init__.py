"""The one door to fast code: arguments are checked here, then the fastest kernel there is runs.

Bits are flat, C-contiguous unsigned arrays of 1, 2, 4 or 8 bytes a unit and may be unaligned views; they
are compared and copied as integers. The native kernels are used where they are built, else the numpy
reference, with the same results bit for bit. Nothing here starts threads or keeps state.

`diff`, `scatter`, `gather`, `fingerprint` and `fingerprint_change` also take bits and offsets in GPU memory,
as torch tensors, and give results there; `syncline.kernels.gpu` says what is different.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from syncline.errors import LayoutError
from syncline.kernels import reference
from syncline.kernels.backend import fastest, on_gpu
from syncline.kernels.changes import (
    check_ascending,
    fingerprint_change,
    first_difference,
    gather,
    map_positions,
    scatter,
)
from syncline.kernels.checks import (
    check_bits,
    check_pair,
    check_start,
    check_window,
    check_writable,
)
from syncline.kernels.values import (
    decode_gaps,
    encode_gaps,
    read_changes,
    read_symbols,
    steps,
    unsteps,
    write_changes,
    write_symbols,
)
from syncline.kernels.values_reference import Told
from syncline.types import Bits, Fingerprint

__all__ = [
    "Told",
    "check_ascending",
    "decode_gaps",
    "diff",
    "diff_and_fingerprint",
    "encode_gaps",
    "fingerprint",
    "fingerprint_change",
    "first_difference",
    "gather",
    "join_planes",
    "map_positions",
    "read_changes",
    "read_symbols",
    "read_words",
    "scatter",
    "seeds",
    "split_planes",
    "steps",
    "unsteps",
    "write_changes",
    "write_symbols",
    "xor",
]


seeds = reference.seeds


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
        return on_gpu().diff(old, new, refresh=refresh)
    check_pair(old, new)
    check_window(old.size)
    if refresh:
        check_writable(old)
    changes: tuple[NDArray[np.uint32], Bits, Bits] = fastest("").diff(old, new, refresh=refresh)
    return changes


def diff_and_fingerprint(
    old: Bits, new: Bits, start: int, seeds: tuple[int, int], *, refresh: bool = False
) -> tuple[tuple[NDArray[np.uint32], Bits, Bits], Fingerprint]:
    """Return what `diff` finds, and what these changes add to the tensor's fingerprint.

    Args:
        start: unit index in the tensor of the first unit of `old` and `new`.
        seeds: what `seeds` returns for the tensor's name.

    Raises:
        LayoutError: as `diff`, or `start` is negative or beyond 64 bits.

    Example:
        >>> old, new = np.array([5, 6, 7], "u2"), np.array([5, 9, 7], "u2")
        >>> found, rise = diff_and_fingerprint(old, new, 0, seeds("w"))
        >>> rise == fingerprint_change(0, *found, seeds("w"))
        True
    """
    check_pair(old, new)
    check_window(old.size)
    check_start(start)
    if refresh:
        check_writable(old)
    found: tuple[tuple[NDArray[np.uint32], Bits, Bits], Fingerprint]
    found = fastest("").diff_and_fingerprint(old, new, start, seeds, refresh=refresh)
    return found


def xor(a: Bits, b: Bits) -> Bits:
    """Return the bitwise XOR of two arrays of the same width and length, as a new array.

    Raises:
        LayoutError: widths or lengths differ.
    """
    check_pair(a, b)
    mixed: Bits = fastest("").xor(a, b)
    return mixed


def read_words(first: Bits, second: Bits) -> int:
    """Return the sum, modulo 2**64, of both arrays' bytes as 64-bit words; a shorter one's length counts.

    It does nothing but read, and so measures the roof for the others. Bytes beyond the last whole word
    are left out.
    """
    check_pair(first, second)
    total: int = fastest("").read_words(first, second)
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
        return on_gpu().fingerprint(bits, start, seeds)
    check_bits(bits)
    check_start(start)
    total: Fingerprint = fastest("").fingerprint(bits, start, seeds)
    return total


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
    planes: NDArray[np.uint8] = fastest("").split_planes(bits, rotated=rotated)
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
    bits: Bits = fastest("").join_planes(planes, rotated=rotated)
    return bits
