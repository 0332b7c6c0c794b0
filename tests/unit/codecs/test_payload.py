from __future__ import annotations

import pytest

from syncline.codecs import payload
from syncline.errors import CodecError, FormatError
from syncline.types import TensorMeta

META = TensorMeta("w", "BF16", (10,))


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
    with pytest.raises(CodecError, match=r"^byte 0: the payload must end here, found 3 bytes more"):
        cursor.end()


def test_a_cursor_may_begin_in_the_middle_of_a_payload() -> None:
    cursor = payload.Cursor(memoryview(b"abcde")[3:], 3)
    assert cursor.left_bytes == 2
    assert bytes(cursor.take(1, "x")) == b"d"
    with pytest.raises(CodecError, match=r"^byte 4: table needs 2 bytes, found 1"):
        cursor.take(2, "table")
    with pytest.raises(CodecError, match=r"^byte 4: k must be .* found '65'"):
        cursor.varint("k", 0, 1)


@pytest.mark.parametrize("kind", [CodecError, FormatError])
def test_errors_get_the_name_of_the_tensor(kind: type[CodecError | FormatError]) -> None:
    with pytest.raises(kind, match=r"^tensor 'w', encoding packed: byte 3: bad$") as caught:  # noqa: SIM117
        with payload.blaming(META, "packed"):
            raise kind("byte 3: bad")
    assert caught.value.tensor == "w"
