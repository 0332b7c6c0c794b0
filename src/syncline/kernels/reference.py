"""The kernels in plain numpy: what every native kernel must equal, bit for bit."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from syncline.errors import CodecError
from syncline.types import Bits, Fingerprint, unsigned

ROW = 1024
_MASK = (1 << 64) - 1
_ROW_STEP = 0xD1342543DE82EF95


def splitmix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the splitmix64 finaliser of every element, modulo 2^64."""
    z = x + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


_COLUMN = splitmix(np.arange(ROW, dtype=np.uint64))
COLUMN_A = (_COLUMN & np.uint64(0xFFFFFFFF)) | np.uint64(1)
COLUMN_B = (_COLUMN >> np.uint64(32)) | np.uint64(1)


def diff(old: Bits, new: Bits) -> tuple[NDArray[np.uint32], Bits, Bits]:
    """Return offsets, old bits and new bits of the units that differ."""
    offsets = np.flatnonzero(old != new).astype(np.uint32)
    return offsets, old[offsets], new[offsets]


def fingerprint(
    digits_at: NDArray[np.uint64], digits: NDArray[np.uint64], seeds: tuple[int, int]
) -> Fingerprint:
    """Return the sum of the terms of digits (64-bit, also differences modulo 2^64) at indices."""
    rows = digits_at >> np.uint64(10)
    columns = (digits_at & np.uint64(ROW - 1)).astype(np.intp)
    lanes = []
    for seed, keys in zip(seeds, (COLUMN_A, COLUMN_B), strict=True):
        row_keys = splitmix(np.uint64(seed) + rows * np.uint64(_ROW_STEP)) | np.uint64(1)
        lanes.append(int((row_keys * keys[columns] * digits).sum(dtype=np.uint64)))
    return Fingerprint(*lanes)


def digits(bits: Bits, at: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return the digits of units, and the digit indices that belong to the unit indices `at`."""
    wide = bits.astype(np.uint64)
    if bits.itemsize < 8:
        return wide, at
    halves = np.stack([wide & np.uint64(0xFFFFFFFF), wide >> np.uint64(32)], axis=1).reshape(-1)
    doubled = at * np.uint64(2)
    return halves, np.stack([doubled, doubled + np.uint64(1)], axis=1).reshape(-1)


def encode_gaps(
    offsets: NDArray[np.uint32], low_bytes: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the low byte planes of the gaps, and their rest as escaped bytes."""
    wide = offsets.astype(np.int64)
    gaps = np.diff(wide, prepend=-1) - 1
    low = np.stack(
        [(gaps >> (8 * i)).astype(np.uint8) for i in range(low_bytes)]
        or [np.empty(0, np.uint8)]
    ).reshape(low_bytes, -1 if low_bytes else 0)
    rest = gaps >> (8 * low_bytes)
    escapes = rest // 255
    high = np.full(int(escapes.sum()) + rest.size, 255, np.uint8)
    high[np.cumsum(escapes + 1) - 1] = rest % 255
    return low, high


def decode_gaps(
    low: NDArray[np.uint8], high: NDArray[np.uint8], count: int, limit: int
) -> NDArray[np.uint32]:
    """Return the offsets; raise CodecError unless there are `count` below `limit`."""
    is_last = high != 255
    ends = np.flatnonzero(is_last)
    if ends.size != count or (high.size and not is_last[-1]):
        raise CodecError(f"gaps: expected {count} changes, found {ends.size}")
    escapes = np.diff(ends, prepend=-1) - 1
    gaps = escapes * 255 + high[ends]
    low_bytes = low.shape[0]
    gaps <<= 8 * low_bytes
    for i in range(low_bytes):
        gaps |= low[i].astype(np.int64) << (8 * i)
    offsets = np.cumsum(gaps + 1) - 1
    if count and (int(offsets[-1]) >= limit or (gaps < 0).any()):
        raise CodecError(f"gaps: position {int(offsets[-1])} is outside the window of {limit}")
    return offsets.astype(np.uint32)


def steps(old: Bits, new: Bits) -> Bits:
    """Return new - old modulo the unit's width, zigzag coded."""
    width = 8 * old.itemsize
    dtype = unsigned(old.itemsize)
    delta = (new - old).astype(dtype)
    one = dtype.type(1)
    sign = (dtype.type(0) - (delta >> dtype.type(width - 1))).astype(dtype)
    return ((delta << one) ^ sign).astype(dtype)


def unsteps(old: Bits, zigzag: Bits) -> Bits:
    """Undo `steps`."""
    dtype = unsigned(old.itemsize)
    one = dtype.type(1)
    delta = (zigzag >> one) ^ (dtype.type(0) - (zigzag & one)).astype(dtype)
    return (old + delta).astype(dtype)
