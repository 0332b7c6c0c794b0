from __future__ import annotations

import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
import zstandard

from syncline.errors import CodecError
from syncline.format import zstd

NOISE = np.random.default_rng(0).bytes(300_000)
TEXT = b"syncline " * 40_000
CONTENTS = {"empty": b"", "one": b"x", "zeros": bytes(1 << 20), "noise": NOISE, "text": TEXT}


def frame(content: bytes, **arguments: object) -> bytes:
    return zstandard.ZstdCompressor(**arguments).compress(content)  # type: ignore[arg-type]


def raw_frame(content_bytes: int, *blocks: tuple[int, int, bytes], is_last: bool = True) -> bytes:
    """Return a frame made by hand: 8 bytes of content size, then blocks of (kind, size, bytes)."""
    out = b"\x28\xb5\x2f\xfd" + bytes([0b1100_0000, 0x50]) + content_bytes.to_bytes(8, "little")
    for index, (kind, size, data) in enumerate(blocks):
        last = is_last and index == len(blocks) - 1
        out += (size << 3 | kind << 1 | last).to_bytes(3, "little") + data
    return out


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_every_way_reads_back(content: bytes) -> None:
    middle = len(content) // 2
    streamed = b"".join(zstd.compress_stream([content[:middle], content[middle:]], len(content)))
    for data in (zstd.compress(content), zstd.compress_noise(content), streamed):
        assert zstd.inspect(data, "x").content_bytes == len(content)
        assert zstd.decompress(data, "x", limit_bytes=len(content)) == content
        assert zstd.decompress_exactly(memoryview(data), "x", len(content)) == content
        reader = zstd.Reader(data, "x", len(content))
        assert reader.read(middle) + reader.read(len(content) - middle) == content


def test_frames_of_other_writers_are_read() -> None:
    for level in (-5, 1, 3, 19):
        data = frame(TEXT, level=level, write_checksum=True)
        assert zstd.decompress_exactly(data, "x", len(TEXT)) == TEXT
        assert zstd.Reader(data, "x", len(TEXT)).read(len(TEXT)) == TEXT


def test_noise_of_few_symbols_gets_smaller_without_matches() -> None:
    symbols = np.random.default_rng(1).choice(
        8, 100_000, p=[0.4, 0.3, 0.1, 0.1, 0.04, 0.03, 0.02, 0.01]
    )
    data = symbols.astype(np.uint8).tobytes()
    assert len(zstd.compress_noise(data)) < 0.92 * len(zstd.compress(data))


def test_stream_sizes_are_kept() -> None:
    for chunks in ([b"12"], [b"12", b"34"], []):
        with pytest.raises(CodecError, match=r"must be 3 bytes long"):
            list(zstd.compress_stream(chunks, 3))


def test_a_size_is_checked_before_memory_is_taken() -> None:
    bomb = zstd.compress(bytes(1 << 28))
    tracemalloc.start()
    try:
        with pytest.raises(CodecError, match=r"at most 100 bytes may be in .* it says 268435456"):
            zstd.decompress(bomb, "x", limit_bytes=100)
        for refuse in (zstd.decompress_exactly, zstd.Reader):
            with pytest.raises(CodecError, match=r"100 bytes must be in .* it says 268435456"):
                refuse(bomb, "x", 100)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_content_size_that_the_blocks_cannot_reach_is_refused() -> None:
    liar = raw_frame(1 << 40, (1, 1 << 17, b"\0"))
    with pytest.raises(
        CodecError, match=r"1 zstd blocks hold at most 131072 bytes, but the frame says"
    ):
        zstd.decompress_exactly(liar, "x", 1 << 40)


@pytest.mark.parametrize("claimed", [0, 4, 6, 100])
@pytest.mark.parametrize("blocks", [[(0, 5, b"12345")], [(0, 5, b"12345"), (0, 2, b"12")]])
def test_a_content_size_that_is_not_true_is_refused(
    claimed: int, blocks: list[tuple[int, int, bytes]]
) -> None:
    liar = raw_frame(claimed, *blocks)
    with pytest.raises(CodecError, match=r"^x: "):
        zstd.decompress_exactly(liar, "x", claimed)
    with pytest.raises(CodecError, match=r"^x: "):
        zstd.Reader(liar, "x", claimed).read(claimed)


def test_a_hand_made_frame_is_legal() -> None:
    data = raw_frame(8, (0, 5, b"12345"), (1, 3, b"x"))
    assert zstd.decompress_exactly(data, "x", 8) == b"12345xxx"


@pytest.mark.parametrize("content", [b"", b"abc", NOISE, TEXT])
def test_a_frame_cut_short_is_refused(content: bytes) -> None:
    data = zstd.compress(content)
    for size in {0, 1, 3, 4, 5, 6, 7, 8, len(data) // 2, len(data) - 1} & set(range(len(data))):
        with pytest.raises(CodecError, match=r"^x: .*(frame|block)"):
            zstd.inspect(data[:size], "x")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (zstd.compress(b"a") + b"\0", "frame ends at offset 10, found 11 bytes"),
        (zstd.compress(b"a") * 2, "frame ends at offset 10, found 20 bytes"),
        (
            b"\x50\x2a\x4d\x18\4\0\0\0abcd" + zstd.compress(b"a"),
            "frame must begin here, found '502a4d18'",
        ),
        (b"not zstd at all", "frame must begin here"),
        (b"\x28\xb5\x2f\xfd" + b"\x08" * 20, "zstd frame header"),
        (frame(b"a", write_content_size=False), "must say its content size"),
        (raw_frame(5, (3, 5, b"12345")), "no whole zstd block at offset 14"),
        (raw_frame(5, (0, 5, b"12345"), is_last=False), "no whole zstd block at offset 22"),
    ],
)
def test_what_is_not_one_plain_frame_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(CodecError, match=rf"^x: .*{message}"):
        zstd.inspect(data, "x")


def test_a_dictionary_is_refused() -> None:
    samples = [b"weights %d of layer %d" % (i, i * i) for i in range(2000)]
    dictionary = zstandard.train_dictionary(1 << 10, samples)
    with pytest.raises(CodecError, match=r"need no dictionary"):
        zstd.inspect(frame(b"weights", dict_data=dictionary), "x")


def test_a_large_window_is_refused_in_pieces() -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=24)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj(size=1 << 25)
    data = stream.compress(bytes(1 << 25)) + stream.flush()
    with pytest.raises(CodecError, match=r"window must be at most 8388608 bytes, found 16777216"):
        zstd.Reader(data, "x", 1 << 25)


def test_damage_is_an_error_or_other_bytes() -> None:
    data = bytearray(zstd.compress(TEXT[:2000]))
    for index in range(len(data)):
        for bit in range(8):
            data[index] ^= 1 << bit
            for read in (zstd.decompress_exactly, _read_all):
                with suppress(CodecError):
                    assert len(read(data, "x", 2000)) == 2000
            data[index] ^= 1 << bit


def _read_all(data: bytearray, where: str, size_bytes: int) -> bytes:
    return zstd.Reader(data, where, size_bytes).read(size_bytes)


def test_reading_past_the_end_is_refused() -> None:
    reader = zstd.Reader(zstd.compress(b"abc"), "x", 3)
    with pytest.raises(CodecError, match=r"not as long as it says"):
        reader.read(4)
