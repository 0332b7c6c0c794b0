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
from syncline.kernels import Told
from syncline.types import WINDOW_UNITS, Bits, Changes, TensorMeta, Window

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
        is_step = self._transform == STEP
        told = kernels.write_changes(
            window.offsets, low_bytes, window.old_bits, window.new_bits, is_step=is_step
        )
        contents = [*told.low, told.high, told.symbols]
        if told.excess.size:
            contents += list(kernels.split_planes(told.excess))
        head = varint(count) + bytes((low_bytes, told.symbol_bits)) + varint(told.excess.size)
        return head + streams.pack(contents)

    def locate(self, meta: TensorMeta, flag: int, cursor: Cursor, start: int, units: int) -> Unpack:
        """Find the streams of the window at the cursor."""
        count = cursor.varint("change count", 0, units)
        if not count:
            return _nothing
        low_bytes = cursor.byte("low bytes", (0, 1, 2))
        symbol_bits = cursor.byte("symbol bits", _LEGAL_SYMBOL_BITS)
        escaped = cursor.varint("escaped count", 0, count)
        place = f"byte {cursor.offset}: gap and symbol streams"
        names = [*(f"gap byte {index}" for index in range(low_bytes)), "gap", "symbol"]
        if escaped:
            names += [f"excess byte {index}" for index in range(meta.unit_bytes)]
        found = streams.unpack(cursor, names)

        def unpack(base: Bits) -> Changes:
            low, high = _gaps(found[: low_bytes + 1], count, units)
            symbols, *planes = found[low_bytes + 1 :]
            excess = base[:0]
            if planes:
                excess = kernels.join_planes([plane.content(escaped) for plane in planes])
            content = symbols.content(-(-count * symbol_bits // 8))
            told = Told(low, high, symbol_bits, content, excess)
            with placing(place):
                offsets, old, new = kernels.read_changes(told, count, base, is_step=flag == STEP)
            return Changes(start, offsets, new, old)

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


def _nothing(base: Bits) -> None:
    """Decode a window without changes."""


def _gaps(
    found: Sequence[streams.Stream], count: int, units: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    low_bytes = len(found) - 1
    low = np.empty((low_bytes, count), np.uint8)
    for plane, stream in zip(low, found[:-1], strict=True):
        plane[:] = stream.content(count)
    # Gaps add up to less than the window, so escapes are few whatever the payload says.
    most_escapes = units // (_ESCAPE_BYTE << (8 * low_bytes))
    return low, found[-1].content_between(count, count + most_escapes)
