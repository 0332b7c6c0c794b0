"""How changes are told, in plain numpy: gaps between places, and values by their distance from the base's.

The definition that the native kernels are tested against; arguments are checked by the door.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from syncline.errors import CodecError
from syncline.kernels.reference import check_ascending, gather, out_of_range, xor
from syncline.types import Bits

ESCAPE = 255
_TOLD_BY_4_BITS = 15
_ONE = np.uint64(1)

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]


def steps(old: Bits, new: Bits) -> Bits:
    """Return `new - old` as a signed number folded into an unsigned one: 0, -1, 1, -2 -> 0, 1, 2, 3."""
    step = (new - old).view(f"<i{old.itemsize}")
    folded: Bits = ((step << 1) ^ (step >> (8 * old.itemsize - 1))).view(old.dtype)
    return folded


def unsteps(old: Bits, zigzag: Bits) -> Bits:
    """Undo `steps`."""
    one = zigzag.dtype.type(1)
    moved: Bits = old + ((zigzag >> one) ^ (~(zigzag & one) + one))
    return moved


def encode_gaps(offsets: U32, low_bytes: int) -> tuple[U8, U8]:
    """Return (low planes, escaped rest) of the gaps between ascending offsets."""
    check_ascending(offsets, 1 << 32)
    gaps = offsets.astype(np.uint64)
    gaps[1:] -= gaps[:-1] + _ONE
    low = np.empty((low_bytes, offsets.size), np.uint8)
    for plane in range(low_bytes):
        low[plane] = gaps >> np.uint64(8 * plane) & np.uint64(0xFF)
    escapes, rest = np.divmod(gaps >> np.uint64(8 * low_bytes), np.uint64(ESCAPE))
    ends = np.cumsum(escapes + _ONE)
    high = np.full(int(ends[-1]) if ends.size else 0, ESCAPE, np.uint8)
    high[ends - _ONE] = rest
    return low, high


def decode_gaps(low: U8, high: U8, count: int, limit: int) -> U32:
    """Undo `encode_gaps`; the caller has checked shapes and that `high` can be legal at all."""
    if high.size and high[-1] == ESCAPE:
        raise CodecError(f"the gap bytes end inside a gap: byte {high.size - 1} is an escape")
    ends = np.flatnonzero(high != ESCAPE)
    if ends.size != count:
        raise CodecError(f"the gap bytes hold {ends.size} gaps where {count} are announced")
    escapes = np.diff(ends, prepend=-1) - 1
    gaps = escapes.astype(np.uint64) * np.uint64(ESCAPE) + high[ends]
    for plane in reversed(range(low.shape[0])):
        gaps = gaps << np.uint64(8) | low[plane]
    offsets = np.cumsum(gaps + _ONE) - _ONE
    if count and int(offsets[-1]) >= limit:
        index = int(np.argmax(offsets >= limit))
        raise out_of_range(index, int(offsets[index]), limit)
    return offsets.astype(np.uint32)


def write_symbols(old: Bits, new: Bits, *, is_step: bool) -> tuple[int, U8, Bits]:
    """Return bits of a symbol, packed symbols, and by how much values exceed what a symbol tells."""
    values = (steps if is_step else xor)(old, new) - old.dtype.type(1)
    if not (values > 1).any():
        bits = 1
    else:
        bits = 4 if 2 * np.count_nonzero(values < _TOLD_BY_4_BITS) >= values.size else 8
    escape = values.dtype.type((1 << bits) - 1)
    symbols = np.minimum(values, escape).astype(np.uint8)
    per_byte = 8 // bits
    packed = np.zeros(-(-symbols.size // per_byte), np.uint8)
    for slot in range(per_byte):
        column = symbols[slot::per_byte]
        packed[: column.size] |= column << np.uint8(bits * slot)
    return bits, packed, values[values >= escape] - escape


def read_symbols(old: Bits, symbols: U8, bits: int, excess: Bits, *, is_step: bool) -> Bits:
    """Return the new bits that `write_symbols` told; any input is either refused or gives new bits."""
    escape, per_byte = (1 << bits) - 1, 8 // bits
    told = np.empty(symbols.size * per_byte, np.uint8)
    for slot in range(per_byte):
        told[slot::per_byte] = symbols >> np.uint8(bits * slot) & np.uint8(escape)
    escaped = np.flatnonzero(told[: old.size] == escape)
    if told[old.size :].any() or escaped.size != excess.size:
        raise CodecError(
            f"{excess.size} of {old.size} symbols must be {escape}, and bits after the "
            f"last 0, found {escaped.size}"
        )
    # The largest value of a unit is all ones; one less is what symbol and excess may add up to.
    most = (1 << (8 * old.itemsize)) - 2 - escape
    if excess.size and int(excess.max()) > most:
        raise CodecError(f"an excess must be at most {most}, found {excess.max()}")
    values: Bits = told[: old.size].astype(old.dtype)
    values[escaped] += excess
    values += old.dtype.type(1)
    return unsteps(old, values) if is_step else xor(old, values)


class Told(NamedTuple):
    """The changes of a window as `packed` tells them (docs/reference/format.md section 6.5).

    Attributes:
        low: (low_bytes, k) uint8; `high`: uint8: the gaps between the places, see `encode_gaps`.
        symbol_bits, symbols, excess: the values, see `write_symbols`.
    """

    low: U8
    high: U8
    symbol_bits: int
    symbols: U8
    excess: Bits


def write_changes(offsets: U32, low_bytes: int, old: Bits, new: Bits, *, is_step: bool) -> Told:
    """Tell changes in gaps and symbols."""
    low, high = encode_gaps(offsets, low_bytes)
    bits, symbols, excess = write_symbols(old, new, is_step=is_step)
    return Told(low, high, bits, symbols, excess)


def read_changes(told: Told, count: int, base: Bits, *, is_step: bool) -> tuple[U32, Bits, Bits]:
    """Return the offsets, the base's bits there, and the new bits of told changes."""
    offsets = decode_gaps(told.low, told.high, count, base.size)
    old = gather(base, offsets)
    new = read_symbols(old, told.symbols, told.symbol_bits, told.excess, is_step=is_step)
    return offsets, old, new
