from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from contracts.codecs import windows_of
from syncline.codecs import payload
from syncline.errors import CodecError, FormatError
from syncline.types import TensorMeta, Window

META = TensorMeta("w", "BF16", (10,))
OLD, NEW = np.zeros(10, np.uint16), np.arange(10, dtype=np.uint16)


@pytest.mark.parametrize("value", [0, 1, 127, 128, 640, (1 << 24), (1 << 63) - 1, (1 << 64) - 1])
def test_varints_read_back(value: int) -> None:
    cursor = payload.Cursor(payload.varint(value) + b"rest")
    assert cursor.varint("x", 0, (1 << 64) - 1) == value
    assert bytes(cursor.take(4, "rest")) == b"rest"
    cursor.end()


@pytest.mark.parametrize(
    "data", [b"\x80\x00", b"\xff\x80\x00", b"\x80" * 40, b"\xff" * 9 + b"\x7f", b"\x0b", b"\x01"]
)
def test_a_varint_is_short_and_in_range(data: bytes) -> None:
    cursor = payload.Cursor(b"\0" + data + b"\0" * 9)
    cursor.byte("first", (0,))
    with pytest.raises(
        CodecError, match=r"^byte 1: k must be a number from 2 to 10 in its shortest"
    ):
        cursor.varint("k", 2, 10)


def test_a_cursor_never_leaves_the_payload() -> None:
    cursor = payload.Cursor(b"abc")
    assert bytes(cursor.take(2, "x")) == b"ab"
    with pytest.raises(
        CodecError, match=r"^byte 2: table needs 2 bytes, found 1: damaged or cut short"
    ):
        cursor.take(2, "table")
    with pytest.raises(CodecError, match=r"^byte 2: flag must be one of .0, 1., found 99"):
        cursor.byte("flag", (0, 1))
    with pytest.raises(CodecError, match=r"^byte 3: flag needs 1 bytes, found 0"):
        cursor.byte("flag", (0, 1))
    cursor = payload.Cursor(b"abc")
    with pytest.raises(CodecError, match=r"^byte 0: the payload must end here, found 3 bytes"):
        cursor.end()


@pytest.mark.parametrize("kind", [CodecError, FormatError])
def test_errors_get_the_name_of_the_tensor(kind: type[CodecError | FormatError]) -> None:
    with pytest.raises(kind, match=r"^tensor 'w', encoding packed: byte 3: bad$") as caught:  # noqa: SIM117
        with payload.blaming(META, "packed"):
            raise kind("byte 3: bad")
    assert caught.value.tensor == "w"


def encoded(windows: Iterator[Window] | list[Window], meta: TensorMeta = META) -> bytes:
    return b"".join(
        payload.encode_windows(1, meta, windows, lambda window: bytes([window.new.size]))
    )


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
    units = payload.MAX_WINDOW_UNITS + 1
    meta = TensorMeta("w", "U8", (units,))
    bits = np.zeros(units, np.uint8)
    window = Window(0, bits, np.empty(0, np.uint32), bits[:0], bits[:0])
    with pytest.raises(CodecError, match=r"at most 16777216 units"):
        encoded([window], meta)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"\x02\x02\x04\x0a", "^byte 0: flag must be one of"),
        (b"\x01\x04\x04\x0a", "^byte 1: unit bytes must be one of .2,., found 4"),
        (b"\x01\x02\x00\x0a", "^byte 2: window units must be a number from 1 to 16777216"),
        (
            b"\x01\x02\x81\x80\x80\x08\x0a",
            "^byte 2: window units must be a number from 1 to 16777216",
        ),
        (b"\x01\x02\x04\x0b", "^byte 3: unit count must be a number from 10 to 10"),
        (b"\x01\x02\x04", "^byte 3: unit count needs 1 bytes, found 0"),
    ],
)
def test_headers_of_another_tensor_are_refused(header: bytes, message: str) -> None:
    assert payload.read_header(payload.Cursor(b"\x01\x02\x04\x0a"), META, (0, 1)) == (1, 4)
    with pytest.raises(CodecError, match=message):
        payload.read_header(payload.Cursor(header), META, (0, 1))
