from __future__ import annotations

import numpy as np
import pytest

from syncline.codecs import streams
from syncline.codecs.payload import Cursor, varint
from syncline.errors import CodecError
from syncline.format import zstd
from syncline.kernels import literals

RNG = np.random.default_rng(0)
NOISE = RNG.integers(0, 256, 100, np.uint8)
SKEWED = (RNG.random(1000) < 0.1).astype(np.uint8)
SAME = np.full(50, 7, np.uint8)
NOTHING = np.empty(0, np.uint8)


def read(data: bytes, *names: str) -> list[streams.Stream]:
    cursor = Cursor(data)
    found = streams.unpack(cursor, names)
    cursor.end()
    return found


def test_streams_read_back_in_the_smallest_coding() -> None:
    contents = [NOISE, SKEWED, SAME, NOTHING, NOISE[:1]]
    found = read(streams.pack(contents), *"abcde")
    assert [stream.coding for stream in found] == [
        streams.RAW,
        streams.ZSTD,
        streams.CONSTANT,
        streams.RAW,
        streams.RAW,
    ]
    for stream, content in zip(found, contents, strict=True):
        assert (stream.content(content.size) == content).all()
        assert stream.content(content.size).size == content.size
    assert len(found[1].stored) < 250


def test_the_table_stands_before_the_data() -> None:
    assert streams.pack([NOISE[:3], SAME]).hex(" ") == f"0c 06 {NOISE[:3].tobytes().hex(' ')} 07"


def test_a_length_that_is_not_known_is_bounded() -> None:
    raw, zipped, same = read(streams.pack([NOISE, SKEWED, SAME]), *"abc")
    assert raw.content_between(90, 100).size == 100
    assert zipped.content_between(0, 1000).size == 1000
    assert (same.content_between(33, 99) == SAME[:33]).all()
    with pytest.raises(
        CodecError, match=r"^byte 5: a stream must be 101 to 200 bytes long, found 100"
    ):
        raw.content_between(101, 200)
    with pytest.raises(
        CodecError, match=r"^byte 105: b stream: at most 999 bytes may be in the zstd frame"
    ):
        zipped.content_between(0, 999)
    with pytest.raises(
        CodecError, match=r"^byte 105: b stream must be 1001 to 2000 bytes long, found 1000"
    ):
        zipped.content_between(1001, 2000)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x07x", "^byte 0: a stream must be coded 0 .*, found coding 3 with 1 bytes"),
        (b"\x0axy", "^byte 0: a stream must be coded 0 .*, found coding 2 with 2 bytes"),
        (b"\x02", "^byte 0: a stream must be coded 0 .*, found coding 2 with 0 bytes"),
        (b"", "^byte 0: table entry of the a stream needs 1 bytes"),
        (varint(4 << 60), "^byte 9: a stream needs 1152921504606846976 bytes, found 0"),
    ],
)
def test_tables_are_checked(data: bytes, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        read(data, "a")


def test_two_frames_are_no_stream() -> None:
    data = zstd.compress(b"a" * 20) * 2
    stream = read(varint(len(data) << 2 | streams.ZSTD) + data, "a")[0]
    with pytest.raises(CodecError, match=r"^byte 2: a stream: the zstd frame ends at offset"):
        stream.content(20)


@pytest.mark.parametrize("highest", [40, 200])
def test_long_streams_of_symbols_are_written_at_once(highest: int) -> None:
    symbols = np.minimum(RNG.geometric(0.3, 300_000), 40).astype(np.uint8)
    symbols[-1] = highest
    frame = streams.compress_symbols(symbols)
    assert zstd.decompress_exactly(frame, "frame", symbols.size) == symbols.tobytes()
    by_literals = literals.compress(symbols)
    assert (by_literals is None) == (highest == 200)
    assert frame == (streams.compress_noise(symbols) if by_literals is None else by_literals)
    assert len(frame) <= 1.01 * len(streams.compress_noise(symbols))


def test_patterns_that_repeat_are_still_found() -> None:
    repeated = np.tile(np.arange(100, dtype=np.uint8), 3000)
    frame = streams.compress_symbols(repeated)
    assert frame == streams.compress_noise(repeated)
    assert len(frame) < repeated.size // 100
