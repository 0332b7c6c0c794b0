from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import pytest

from contracts.codecs import windows_of
from syncline.codecs.payload import Cursor
from syncline.codecs.windows import MAX_WINDOW_UNITS, Unpack, WindowCodec
from syncline.errors import CodecError
from syncline.types import Span, TensorMeta, Window

META = TensorMeta("w", "BF16", (10,))
OLD, NEW = np.zeros(10, np.uint16), np.arange(10, dtype=np.uint16)


class Counting(WindowCodec):
    """Tells of every window only how long it is."""

    name: ClassVar[str] = "counting"
    needs_base: ClassVar[bool] = False
    is_idempotent: ClassVar[bool] = True
    is_full: ClassVar[bool] = False
    flags: ClassVar[tuple[int, ...]] = (0, 1)

    def flag(self, meta: TensorMeta) -> int:
        return 1

    def pack(self, meta: TensorMeta, window: Window) -> bytes:
        return bytes([window.new.size])

    def locate(self, meta: TensorMeta, flag: int, cursor: Cursor, start: int, units: int) -> Unpack:
        found = cursor.byte("units", range(256))
        return lambda base: Span(start, base[:found])

    def predict_bytes(self, meta: TensorMeta, changed: int) -> int:
        return 0


def encoded(windows: Iterator[Window] | list[Window], meta: TensorMeta = META) -> bytes:
    return b"".join(bytes(piece) for piece in Counting().encode(meta, windows))


def test_windows_follow_the_header() -> None:
    assert encoded(windows_of(META, OLD, NEW, 4)).hex(" ") == "01 02 04 0a 04 04 02"
    assert encoded(windows_of(META, OLD, NEW, 16)).hex(" ") == "01 02 0a 0a 0a"
    empty = TensorMeta("w", "F64", (0,))
    nothing = np.empty(0, np.uint64)
    window = Window(0, nothing, np.empty(0, np.uint32), nothing, nothing)
    assert encoded([], empty).hex(" ") == encoded([window], empty).hex(" ") == "01 08 01 00"


def test_windows_must_tile_the_tensor() -> None:
    windows = list(windows_of(META, OLD, NEW, 4))
    for wrong in (windows[1:], windows[:1] + windows[2:], windows[:2] + windows[:1], windows[::-1]):
        with pytest.raises(CodecError, match=r"tile the tensor: expected"):
            encoded(wrong)
    for wrong in (windows[:2], []):
        with pytest.raises(CodecError, match=r"windows must tile 10 units, found"):
            encoded(wrong)
    with pytest.raises(CodecError, match=r"tile the tensor: expected 0 units at 10"):
        encoded([*windows, windows[0]])


def test_windows_are_not_too_large() -> None:
    units = MAX_WINDOW_UNITS + 1
    meta = TensorMeta("w", "U8", (units,))
    bits = np.zeros(units, np.uint8)
    window = Window(0, bits, np.empty(0, np.uint32), bits[:0], bits[:0])
    with pytest.raises(CodecError, match=r"at most 16777216 units"):
        encoded([window], meta)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"\x02\x02\x04\x0a", "byte 0: flag must be one of"),
        (b"\x01\x04\x04\x0a", "byte 1: unit bytes must be one of .2,., found 4"),
        (b"\x01\x02\x00\x0a", "byte 2: window units must be a number from 1 to 16777216"),
        (
            b"\x01\x02\x81\x80\x80\x08\x0a",
            "byte 2: window units must be a number from 1 to 16777216",
        ),
        (b"\x01\x02\x04\x0b", "byte 3: unit count must be a number from 10 to 10"),
        (b"\x01\x02\x04", "byte 3: unit count needs 1 bytes, found 0"),
    ],
)
def test_headers_of_another_tensor_are_refused(header: bytes, message: str) -> None:
    with pytest.raises(CodecError, match=message) as caught:
        list(Counting().pieces(META, header))
    assert caught.value.tensor == "w"


def test_windows_are_found_without_being_decoded_and_decoded_in_any_order() -> None:
    payload = b"\x01\x02\x04\x0a\x04\x03\x02"
    pieces = list(Counting().pieces(META, payload))
    assert [(start, units) for start, units, _ in pieces] == [(0, 4), (4, 4), (8, 2)]
    found = [unpack(NEW[start : start + units]) for start, units, unpack in reversed(pieces)]
    assert [span.bits.tolist() for span in found] == [[8, 9], [4, 5, 6], [0, 1, 2, 3]]
    with pytest.raises(CodecError, match=r"^tensor 'w', encoding counting: byte 7: the payload"):
        list(Counting().pieces(META, payload + b"\0"))
