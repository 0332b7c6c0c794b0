"""`packed`: gaps between changes and steps from the base, close to the bound for random places.

Gaps go to zstd's entropy coder as bytes with escapes. Most steps are one ulp, so they become
symbols of a few bits, several to a byte; the rare larger ones go to byte planes of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from syncline import kernels
from syncline.codecs import streams
from syncline.codecs.payload import Cursor, placing, varint
from syncline.codecs.prediction import STEP_BITS, place_bytes
from syncline.codecs.windows import Unpack, WindowCodec
from syncline.errors import CodecError
from syncline.types import WINDOW_UNITS, Bits, Changes, TensorMeta, Window, unsigned

XOR, STEP = 0, 1
"""The transforms: how a new value is told from the base's."""

_ONE_LOW_BYTE_GAP = 380
_TWO_LOW_BYTES_GAP = 100_000
_ESCAPE_BYTE = 255
_LEGAL_SYMBOL_BITS = (1, 2, 4, 8)


class Packed(WindowCodec):
    """Entropy-coded gaps and values; see `syncline.abc.Codec`.

    Args:
        transform: `step` tells a value by its distance from the base's, counted in ulps; `xor` by
            the bits that differ. Decoding takes either.
    """

    name: ClassVar[str] = "packed"
    needs_base: ClassVar[bool] = True
    is_idempotent: ClassVar[bool] = False
    is_full: ClassVar[bool] = False
    flags: ClassVar[tuple[int, ...]] = (XOR, STEP)

    def __init__(self, transform: Literal["step", "xor"] = "step") -> None:
        self._transform = STEP if transform == "step" else XOR

    def flag(self, meta: TensorMeta) -> int:
        """Return the transform."""
        return self._transform

    def pack(self, meta: TensorMeta, window: Window) -> bytes:
        """Return count, gaps and values of one window."""
        count = window.offsets.size
        if not count:
            return varint(0)
        low_bytes = choose_low_bytes(window.new.size, count)
        low, high = kernels.encode_gaps(window.offsets, low_bytes)
        told = kernels.steps if self._transform == STEP else kernels.xor
        symbol_bits, symbols, excess = _to_symbols(told(window.old_bits, window.new_bits))
        contents = [*low, high, symbols]
        if excess.size:
            contents += list(kernels.split_planes(excess))
        head = varint(count) + bytes((low_bytes, symbol_bits)) + varint(excess.size)
        return head + streams.pack(contents)

    def locate(self, meta: TensorMeta, flag: int, cursor: Cursor, start: int, units: int) -> Unpack:
        """Find the streams of the window at the cursor."""
        count = cursor.varint("change count", 0, units)
        if not count:
            return _nothing
        low_bytes = cursor.byte("low bytes", (0, 1, 2))
        symbol_bits = cursor.byte("symbol bits", _LEGAL_SYMBOL_BITS)
        escaped = cursor.varint("escaped count", 0, count)
        names = [*(f"gap byte {index}" for index in range(low_bytes)), "gap", "symbol"]
        if escaped:
            names += [f"excess byte {index}" for index in range(meta.unit_bytes)]
        found = streams.unpack(cursor, names)
        apply = kernels.unsteps if flag == STEP else kernels.xor

        def unpack(base: Bits) -> Changes:
            offsets = _offsets(found[: low_bytes + 1], count, units)
            values = _values(found[low_bytes + 1 :], count, symbol_bits, escaped, meta.unit_bytes)
            return Changes(start, offsets, apply(kernels.gather(base, offsets), values))

        return unpack

    def predict_bytes(self, meta: TensorMeta, changed: int) -> int:
        """Return about the size for optimizer steps that lie anywhere alike."""
        window_count = -(-meta.unit_count // WINDOW_UNITS)
        value_bytes = changed * STEP_BITS[meta.unit_bytes] / 8
        return int(12 + 8 * window_count + 1.01 * place_bytes(meta, changed) + value_bytes)


def choose_low_bytes(units: int, count: int) -> int:
    """Return how many low bytes of the gaps to keep apart, so that the rest codes well.

    Example:
        >>> choose_low_bytes(1 << 22, 42_000), choose_low_bytes(1 << 22, 1_000)
        (0, 1)
    """
    mean_gap = units / count
    return int(mean_gap > _ONE_LOW_BYTE_GAP) + int(mean_gap > _TWO_LOW_BYTES_GAP)


def _to_symbols(values: Bits) -> tuple[int, NDArray[np.uint8], Bits]:
    """Return symbol bits, packed symbols, and by how much escaped values exceed the escape."""
    values = values - values.dtype.type(1)
    symbol_bits = _choose_symbol_bits(values)
    escape = values.dtype.type((1 << symbol_bits) - 1)
    symbols = np.minimum(values, escape).astype(np.uint8)
    if symbol_bits == 1:  # then no value exceeds the escape, and many are it
        excess = np.zeros(np.count_nonzero(symbols), values.dtype)
    else:
        excess = values[np.flatnonzero(values >= escape)] - escape
    return symbol_bits, _pack_symbols(symbols, symbol_bits), excess


def _pack_symbols(symbols: NDArray[np.uint8], symbol_bits: int) -> NDArray[np.uint8]:
    """Return the symbols side by side in bytes, the first one lowest."""
    if symbol_bits == 1:
        return np.packbits(symbols, bitorder="little")
    per_byte = 8 // symbol_bits
    packed = np.zeros(-(-symbols.size // per_byte), np.uint8)
    for slot in range(per_byte):
        column = symbols[slot::per_byte]
        packed[: column.size] |= column << np.uint8(symbol_bits * slot)
    return packed


def _unpack_symbols(packed: NDArray[np.uint8], symbol_bits: int) -> NDArray[np.uint8]:
    """Return every symbol that the bytes have room for."""
    if symbol_bits == 1:
        return np.unpackbits(packed, bitorder="little")
    per_byte = 8 // symbol_bits
    symbols = np.empty(packed.size * per_byte, np.uint8)
    for slot in range(per_byte):
        symbols[slot::per_byte] = packed >> np.uint8(symbol_bits * slot) & np.uint8(
            (1 << symbol_bits) - 1
        )
    return symbols


def _choose_symbol_bits(values: Bits) -> int:
    if not (values > 1).any():
        return 1
    return 4 if 2 * np.count_nonzero(values < 15) >= values.size else 8


def _nothing(base: Bits) -> None:
    """Decode a window without changes."""


def _values(
    found: Sequence[streams.Stream], count: int, symbol_bits: int, escaped: int, unit_bytes: int
) -> Bits:
    """Return how each change is told from the base, out of the symbols and the excess of the escaped."""
    symbols = found[0].content(-(-count * symbol_bits // 8))
    planes = [stream.content(escaped) for stream in found[1:]]
    excess = kernels.join_planes(np.stack(planes)) if planes else np.empty(0, unsigned(unit_bytes))
    with placing(found[0].what):
        return _from_symbols(symbols, count, symbol_bits, excess)


def _offsets(found: Sequence[streams.Stream], count: int, units: int) -> NDArray[np.uint32]:
    low_bytes = len(found) - 1
    low = np.empty((low_bytes, count), np.uint8)
    for plane, stream in zip(low, found[:-1], strict=True):
        plane[:] = stream.content(count)
    # Gaps add up to less than the window, so escapes are few whatever the payload says.
    most_escapes = units // (_ESCAPE_BYTE << (8 * low_bytes))
    high = found[-1].content_between(count, count + most_escapes)
    with placing(found[-1].what):
        return kernels.decode_gaps(low, high, count, units)


def _from_symbols(packed: NDArray[np.uint8], count: int, symbol_bits: int, excess: Bits) -> Bits:
    """Return the values that `_to_symbols` took apart.

    Raises:
        CodecError: bits beyond the last symbol, escapes that are not as many as there are excesses,
            or a value that does not fit into the unit.
    """
    escape = (1 << symbol_bits) - 1
    symbols = _unpack_symbols(packed, symbol_bits)
    escaped = np.flatnonzero(symbols[:count] == escape)
    if symbols[count:].any() or escaped.size != excess.size:
        raise CodecError(
            f"{excess.size} of {count} symbols must be {escape}, and bits after the "
            f"last 0, found {escaped.size}"
        )
    # The largest value of a unit is all ones; one less is what symbol and excess may add up to.
    most = (1 << (8 * excess.dtype.itemsize)) - 2 - escape
    if excess.size and int(excess.max()) > most:
        raise CodecError(f"an excess must be at most {most}, found {excess.max()}")
    values: Bits = symbols[:count].astype(excess.dtype)
    if excess.any():
        values[escaped] += excess
    values += excess.dtype.type(1)
    return values
