"""The compiled kernels that tell changes, with the signatures of `values_reference`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from syncline.kernels import _native, reference
from syncline.kernels import values_reference as values
from syncline.kernels.native import aligned
from syncline.kernels.values_reference import Told
from syncline.types import Bits

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]


def encode_gaps(offsets: U32, low_bytes: int) -> tuple[U8, U8]:
    """See `values_reference.encode_gaps`."""
    low, high = _gap_room(offsets, low_bytes)
    used = _native.encode_gaps(aligned(offsets), low_bytes, low, high)
    if used < 0:
        reference.check_ascending(offsets, 1 << 32)
    high.resize(used, refcheck=False)
    return low, high


def decode_gaps(low: U8, high: U8, count: int, limit: int) -> U32:
    """See `values_reference.decode_gaps`."""
    offsets = np.empty(count, np.uint32)
    if not _native.decode_gaps(low, low.shape[0], high, limit, offsets):
        return values.decode_gaps(low, high, count, limit)
    return offsets


def write_symbols(old: Bits, new: Bits, *, is_step: bool) -> tuple[int, U8, Bits]:
    """See `values_reference.write_symbols`."""
    symbols, excess = np.empty(old.size, np.uint8), np.empty(old.size + 1, old.dtype)
    bits, escaped = _native.write_symbols(old, new, old.itemsize, is_step, symbols, excess)
    symbols.resize(-(-old.size * bits // 8), refcheck=False)
    excess.resize(escaped, refcheck=False)
    return bits, symbols, excess


def read_symbols(old: Bits, symbols: U8, bits: int, excess: Bits, *, is_step: bool) -> Bits:
    """See `values_reference.read_symbols`."""
    new = np.empty(old.size, old.dtype)
    if not _native.read_symbols(old, old.itemsize, is_step, symbols, bits, excess, new):
        return values.read_symbols(old, symbols, bits, excess, is_step=is_step)
    return new


def write_changes(offsets: U32, low_bytes: int, old: Bits, new: Bits, *, is_step: bool) -> Told:
    """See `values_reference.write_changes`."""
    low, high = _gap_room(offsets, low_bytes)
    symbols, excess = np.empty(old.size, np.uint8), np.empty(old.size + 1, old.dtype)
    used, bits, escaped = _native.write_changes(
        aligned(offsets), low_bytes, low, high, old, new, old.itemsize, is_step, symbols, excess
    )
    if used < 0:
        reference.check_ascending(offsets, 1 << 32)
    high.resize(used, refcheck=False)
    symbols.resize(-(-old.size * bits // 8), refcheck=False)
    excess.resize(escaped, refcheck=False)
    return Told(low, high, bits, symbols, excess)


def read_changes(told: Told, count: int, base: Bits, *, is_step: bool) -> tuple[U32, Bits, Bits]:
    """See `values_reference.read_changes`."""
    offsets = np.empty(count, np.uint32)
    old, new = np.empty(count, base.dtype), np.empty(count, base.dtype)
    low_bytes = told.low.shape[0]
    if not _native.read_changes(
        told.low,
        low_bytes,
        told.high,
        base,
        base.itemsize,
        is_step,
        told.symbols,
        told.symbol_bits,
        told.excess,
        offsets,
        old,
        new,
    ):
        return values.read_changes(told, count, base, is_step=is_step)
    return offsets, old, new


def _gap_room(offsets: U32, low_bytes: int) -> tuple[U8, U8]:
    """Return room for the bytes of these gaps, the high ones as many as they can become."""
    last = int(offsets[-1]) if offsets.size else 0
    most = offsets.size + (last >> 8 * low_bytes) // values.ESCAPE
    return np.empty((low_bytes, offsets.size), np.uint8), np.empty(most, np.uint8)
