"""Every kernel in plain numpy: the definition that the native ones are tested against.

Arguments are already checked by the door (`syncline.kernels`): arrays are flat, contiguous, unsigned and
of matching length. Nothing here is tuned beyond what numpy does by itself; views may be unaligned.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from syncline.errors import CodecError
from syncline.types import Bits, Fingerprint, unsigned

ROW_DIGITS = 1024
_ROW_STRIDE = np.uint64(0xD1342543DE82EF95)
_ROWS_AT_ONCE = 256
_LOW_32 = np.uint64(0xFFFFFFFF)
_ONE = np.uint64(1)

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]

Axis = tuple[int, int, int]
"""Stride, count, and stride on the other side."""


def diff(old: Bits, new: Bits, *, refresh: bool) -> tuple[U32, Bits, Bits]:
    """Return the offsets where two arrays differ and both sides' bits there; maybe update `old`."""
    offsets = np.flatnonzero(old != new).astype(np.uint32)
    old_bits, new_bits = old[offsets], new[offsets]
    if refresh:
        old[offsets] = new_bits
    return offsets, old_bits, new_bits


def diff_and_fingerprint(
    old: Bits, new: Bits, start: int, seeds: tuple[int, int], *, refresh: bool
) -> tuple[tuple[U32, Bits, Bits], Fingerprint]:
    """Return what `diff` finds, and what that adds to the tensor's fingerprint."""
    found = diff(old, new, refresh=refresh)
    return found, fingerprint_change(start, *found, seeds)


def scatter(target: Bits, offsets: U32, bits: Bits) -> None:
    """Write `bits[i]` at `target[offsets[i]]`; nothing is written if an offset is out of range."""
    check_range(offsets, target.size)
    target[offsets] = bits


def gather(source: Bits, offsets: U32) -> Bits:
    """Return `source[offsets]`."""
    check_range(offsets, source.size)
    return source[offsets]


def check_range(offsets: U32, limit: int) -> None:
    """Raise CodecError naming the first offset that is not below `limit`."""
    if offsets.size and int(offsets.max()) >= limit:
        index = int(np.argmax(offsets >= limit))
        raise out_of_range(index, int(offsets[index]), limit)


def out_of_range(index: int, offset: int, limit: int) -> CodecError:
    """Return the error for one offset that is not below `limit`."""
    return CodecError(
        f"offset {index} of the changes is {offset}, which is not below the window's {limit} units; "
        "the changes are not for this window"
    )


def check_ascending(offsets: U32, limit: int) -> None:
    """Raise CodecError naming the first offset that does not rise, or is not below `limit`."""
    check_range(offsets, limit)
    falls = offsets[1:] <= offsets[:-1]
    if falls.any():
        index = int(np.argmax(falls)) + 1
        raise CodecError(
            f"offset {index} of the changes is {offsets[index]}, which is not above the one before it "
            f"({offsets[index - 1]}); offsets must rise strictly"
        )


def first_difference(source: Bits, bits: Bits, offsets: U32) -> int | None:
    """Return the index of the first of these units that is not what stands at its offset."""
    differs = gather(source, offsets) != bits
    return int(np.argmax(differs)) if differs.any() else None


def xor(a: Bits, b: Bits) -> Bits:
    """Return `a ^ b`; through bytes, so that unaligned views stay on numpy's fast path."""
    mixed: Bits = (a.view(np.uint8) ^ b.view(np.uint8)).view(a.dtype)
    return mixed


def read_words(first: Bits, second: Bits) -> int:
    """Return the sum of both arrays' whole 64-bit words, modulo 2^64."""
    total = 0
    for bits in (first, second):
        words = bits.view(np.uint8)[: bits.nbytes // 8 * 8].view("<u8")
        total += int(words.sum(dtype=np.uint64))
    return total % (1 << 64)


def split_planes(bits: Bits, *, rotated: bool) -> U8:
    """Return the bytes of every unit as rows: row p holds byte p, the lowest first."""
    units = _rotate(bits, 1) if rotated else bits
    return np.ascontiguousarray(units.view(np.uint8).reshape(bits.size, bits.itemsize).T)


def join_planes(planes: Sequence[U8], *, rotated: bool) -> Bits:
    """Undo `split_planes`."""
    # Plane by plane: numpy transposes narrow rows seven times slower.
    units = np.empty((planes[0].size, len(planes)), np.uint8)
    for place, plane in enumerate(planes):
        units[:, place] = plane
    joined: Bits = units.reshape(-1).view(unsigned(len(planes)))
    return _rotate(joined, -1) if rotated else joined


def _rotate(bits: Bits, by: int) -> Bits:
    """Return every unit rotated left by `by` bits; negative: right."""
    width = 8 * bits.dtype.itemsize
    left = by % width
    return (bits << left) | (bits >> (width - left))


def map_positions(
    positions: I64, bits: Bits, axes: Sequence[Axis], first: int, other: int
) -> tuple[I64, Bits]:
    """Return where the positions that a block holds are on the other side, and their bits."""
    rest = positions - first
    inside = rest >= 0
    mapped = np.full_like(rest, other)
    covered = None
    for stride, count, other_stride in axes:
        index = rest // stride
        if covered is None or stride * count < covered:
            inside &= index < count
        rest -= index * stride
        mapped += index * other_stride
        covered = stride
    inside &= rest == 0
    return mapped[inside], bits[inside]


def splitmix(x: U64) -> U64:
    """Return the splitmix64 hash of every x (docs/reference/format.md section 5)."""
    z = x + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return z ^ z >> np.uint64(31)


def column_keys() -> tuple[U64, U64]:
    """Return XA and XB: 1024 odd 32-bit numbers each, as uint64."""
    mixed = splitmix(np.arange(ROW_DIGITS, dtype=np.uint64))
    return mixed & _LOW_32 | _ONE, mixed >> np.uint64(32) | _ONE


def row_keys(rows: U64, seeds: tuple[int, int]) -> tuple[U64, U64]:
    """Return YA and YB of these rows for a tensor with these seeds."""
    strides = rows * _ROW_STRIDE
    a, b = (splitmix(strides + np.uint64(seed)) | _ONE for seed in seeds)
    return a, b


def seeds(name: str) -> tuple[int, int]:
    """Return the two row-key seeds of the tensor with this name."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little")


def fingerprint(bits: Bits, start: int, seeds: tuple[int, int]) -> Fingerprint:
    """Return the fingerprint of consecutive units, the first of which is unit `start`."""
    digits, first = _digits(bits), start * max(1, bits.itemsize // 4)
    # Squared below: a sum that is linear in the bits would not notice a wrong base under a right step.
    keys = column_keys()
    totals = np.zeros(2, np.uint64)
    done = 0
    while done < digits.size:
        row, column = divmod(first + done, ROW_DIGITS)
        taken = digits[done : done + _ROWS_AT_ONCE * ROW_DIGITS - column]
        row_count = -(-(column + taken.size) // ROW_DIGITS)
        block = np.zeros(row_count * ROW_DIGITS, np.uint64)
        block[column : column + taken.size] = _squares(taken)
        ys = row_keys(np.arange(row_count, dtype=np.uint64) + np.uint64(row), seeds)
        for lane, (x, y) in enumerate(zip(keys, ys, strict=True)):
            # A slice, because numpy warns of scalars that wrap around, as these are meant to.
            totals[lane : lane + 1] += ((block.reshape(row_count, ROW_DIGITS) * x).sum(1) * y).sum()
        done += taken.size
    return Fingerprint(int(totals[0]), int(totals[1]))


def fingerprint_change(
    start: int, offsets: U32, old_bits: Bits, new_bits: Bits, seeds: tuple[int, int]
) -> Fingerprint:
    """Return what to add to a fingerprint when these units go from the old bits to the new."""
    places = offsets.astype(np.uint64) + np.uint64(start)
    if old_bits.itemsize == 8:
        low = places * np.uint64(2)
        places = np.stack([low, low + _ONE], 1).reshape(-1)
    rise = _squares(new_bits) - _squares(old_bits)
    columns = places & np.uint64(ROW_DIGITS - 1)
    a, b = (
        int((y * x[columns] * rise).sum(dtype=np.uint64))
        for x, y in zip(column_keys(), row_keys(places >> np.uint64(10), seeds), strict=True)
    )
    return Fingerprint(a, b)


def _squares(bits: Bits) -> NDArray[np.uint64]:
    """Return the square of every digit, modulo 2^64."""
    wide = _digits(bits).astype(np.uint64)
    return wide * wide


def _digits(bits: Bits) -> NDArray[Any]:
    """Return the digits of consecutive units: halves of 8-byte units, low first, else the units."""
    return bits.view("<u4") if bits.itemsize == 8 else bits
