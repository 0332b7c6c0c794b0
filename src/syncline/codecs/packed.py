"""`packed`: gaps between changes and steps from the base, close to the bound for random places.

Gaps go to zstd's entropy coder as bytes with escapes. Most steps are one ulp, so they become
symbols of a few bits, several to a byte; the rare larger ones go to byte planes of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from syncline import kernels
from syncline.abc import Buffer, Codec
from syncline.codecs import streams
from syncline.codecs.payload import (
    Cursor,
    blaming,
    encode_windows,
    placing,
    read_header,
    varint,
)
from syncline.codecs.prediction import STEP_BITS, place_bytes
from syncline.errors import CodecError
from syncline.types import WINDOW_UNITS, Bits, Changes, TensorMeta, Window, unsigned

XOR, STEP = 0, 1
"""The transforms: how a new value is told from the base's."""

_ONE_LOW_BYTE_GAP = 380
_TWO_LOW_BYTES_GAP = 100_000
_ESCAPE_BYTE = 255
_LEGAL_SYMBOL_BITS = (1, 2, 4, 8)


class Packed(Codec):
    """Entropy-coded gaps and values; see `syncline.abc.Codec`.

    Args:
        transform: `step` tells a value by its distance from the base's, counted in ulps; `xor` by
            the bits that differ. Decoding takes either.
    """

    name: ClassVar[str] = "packed"
    needs_base: ClassVar[bool] = True
    is_idempotent: ClassVar[bool] = False
    is_full: ClassVar[bool] = False

    def __init__(self, transform: Literal["step", "xor"] = "step") -> None:
        self._transform = STEP if transform == "step" else XOR

    def encode(self, meta: TensorMeta, windows: Iterable[Window]) -> Iterator[Buffer]:
        """Yield the header, then one piece a window."""
        with blaming(meta, self.name):
            yield from encode_windows(self._transform, meta, windows, self._pack)

    def _pack(self, window: Window) -> bytes:
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

    def decode(self, meta: TensorMeta, payload: Buffer, base: Bits) -> Iterator[Changes]:
        """Yield the changes of every window that has any."""
        with blaming(meta, self.name):
            cursor = Cursor(payload)
            transform, window_units = read_header(cursor, meta, (XOR, STEP))
            for start in range(0, meta.unit_count, window_units):
                units = min(window_units, meta.unit_count - start)
                offsets, values = _unpack(cursor, units, meta.unit_bytes)
                if offsets.size:
                    old = kernels.gather(base[start : start + units], offsets)
                    apply = kernels.unsteps if transform == STEP else kernels.xor
                    yield Changes(start, offsets, apply(old, values))
            cursor.end()

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
    excess = values[values >= escape] - escape
    per_byte = 8 // symbol_bits
    padded = np.zeros(-(-symbols.size // per_byte) * per_byte, np.uint8)
    padded[: symbols.size] = symbols
    shifted = padded.reshape(-1, per_byte) << _shifts(symbol_bits)
    return symbol_bits, np.bitwise_or.reduce(shifted, axis=1), excess


def _choose_symbol_bits(values: Bits) -> int:
    if not (values > 1).any():
        return 1
    return 4 if 2 * np.count_nonzero(values < 15) >= values.size else 8


def _shifts(symbol_bits: int) -> NDArray[np.uint8]:
    return np.arange(0, 8, symbol_bits, dtype=np.uint8)


def _unpack(cursor: Cursor, units: int, unit_bytes: int) -> tuple[NDArray[np.uint32], Bits]:
    """Return offsets and values of the window at the cursor."""
    count = cursor.varint("change count", 0, units)
    if not count:
        return np.empty(0, np.uint32), np.empty(0, unsigned(unit_bytes))
    low_bytes = cursor.byte("low bytes", (0, 1, 2))
    symbol_bits = cursor.byte("symbol bits", _LEGAL_SYMBOL_BITS)
    escaped = cursor.varint("escaped count", 0, count)
    names = [*(f"gap byte {index}" for index in range(low_bytes)), "gap", "symbol"]
    if escaped:
        names += [f"excess byte {index}" for index in range(unit_bytes)]
    found = streams.unpack(cursor, names)
    offsets = _offsets(found[: low_bytes + 1], count, units)
    symbols = found[low_bytes + 1].content(-(-count * symbol_bits // 8))
    planes = [stream.content(escaped) for stream in found[low_bytes + 2 :]]
    excess = kernels.join_planes(planes) if planes else np.empty(0, unsigned(unit_bytes))
    with placing(found[low_bytes + 1].what):
        return offsets, _from_symbols(symbols, count, symbol_bits, excess)


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
    symbols = (packed[:, None] >> _shifts(symbol_bits) & np.uint8(escape)).reshape(-1)
    is_escaped = symbols[:count] == escape
    if symbols[count:].any() or np.count_nonzero(is_escaped) != excess.size:
        raise CodecError(
            f"{excess.size} of {count} symbols must be {escape}, and bits after the "
            f"last 0, found {np.count_nonzero(is_escaped)}"
        )
    # The largest value of a unit is all ones; one less is what symbol and excess may add up to.
    most = (1 << (8 * excess.dtype.itemsize)) - 2 - escape
    if excess.size and int(excess.max()) > most:
        raise CodecError(f"an excess must be at most {most}, found {excess.max()}")
    values: Bits = symbols[:count].astype(excess.dtype)
    values[is_escaped] += excess
    values += excess.dtype.type(1)
    return values
