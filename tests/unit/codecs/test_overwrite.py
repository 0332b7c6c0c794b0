from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import zstandard

from contracts.codecs import ConstantBase, apply, changed, encode, random_bits
from syncline import codecs
from syncline.codecs import overwrite
from syncline.errors import CodecError
from syncline.types import Changes, TensorMeta, Window

OVERWRITE = codecs.get("overwrite")
META = TensorMeta("w", "F32", (4,))
BASE = np.array([0x11111111, 0x22222222, 0x33333333, 0x44444444], np.uint32)


def payload_of(count: int, positions: list[int], values: bytes) -> bytes:
    content = np.array([count, *positions], "<u4").tobytes() + values
    return zstandard.ZstdCompressor(level=1).compress(content)


def test_the_payload_is_one_frame_of_bytes_that_differ() -> None:
    new = BASE.copy()
    new[0] ^= np.uint32(0x00FF0000)
    new[3] = 0x44FF44EE
    content = zstandard.decompress(encode(OVERWRITE, META, BASE, new, 2))
    assert content[:4] == (3).to_bytes(4, "little")
    assert np.frombuffer(content[4:16], "<u4").tolist() == [2, 12, 14]
    assert content[16:] == b"\xee\xee\xff"


def test_bytes_of_one_unit_come_out_together() -> None:
    payload = payload_of(3, [4, 7, 8], b"\xaa\xbb\xcc")
    (changes,) = OVERWRITE.decode(META, payload, BASE)
    assert isinstance(changes, Changes)
    assert (changes.start, changes.offsets.tolist()) == (1, [0, 1])
    assert changes.bits.tolist() == [0xBB2222AA, 0x333333CC]


@pytest.mark.parametrize("piece_changes", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("dtype", ["U8", "I16", "F32", "F64"])
def test_a_unit_may_go_on_in_the_next_piece(
    dtype: str, piece_changes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overwrite, "_PIECE_CHANGES", piece_changes)
    monkeypatch.setattr(overwrite, "PIECE_BYTES", 5)
    meta = TensorMeta("w", dtype, (37,))
    old = random_bits(meta, 0)
    new = changed(old, "some") ^ changed(old, "last") ^ old
    payload = encode(OVERWRITE, meta, old, new, 10)
    assert (apply(old, OVERWRITE.decode(meta, payload, old)) == new).all()


def test_order_is_checked_between_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overwrite, "_PIECE_CHANGES", 2)
    for positions in ([0, 5, 5, 6], [0, 5, 4, 6], [4, 5, 0, 1], [0, 9, 8, 12]):
        with pytest.raises(CodecError, match=r"rise strictly"):
            list(OVERWRITE.decode(META, payload_of(4, positions, bytes(4)), BASE))


def test_changes_outgrow_memory_onto_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    meta = TensorMeta("w", "BF16", (5000,))
    old = random_bits(meta, 1)
    new = changed(old, "everything")
    expected = encode(OVERWRITE, meta, old, new)
    monkeypatch.setattr(overwrite, "_SPOOL_BYTES", 100)
    assert encode(OVERWRITE, meta, old, new) == expected


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (payload_of(2, [3, 3], b"ab"), "which is not above the one before it"),
        (payload_of(2, [3, 2], b"ab"), "which is not above the one before it"),
        (payload_of(2, [3, 16], b"ab"), "which is not below the window's 16 units"),
        (payload_of(1, [0xFFFFFFFF], b"a"), "which is not below the window's 16 units"),
        (payload_of(1, [3, 4], b"ab"), "byte 0 of the frame's content: count must be 2, found 1"),
        (payload_of(3, [3, 4], b"ab"), "byte 0 of the frame's content: count must be 2, found 3"),
        (payload_of(2, [3, 4], b"a"), "must be 4 bytes and 5 for each of .*, found 13"),
        (
            payload_of(17, [*range(17)], bytes(17)),
            "5 for each of at most 16 changed bytes, found 89",
        ),
        (zstandard.compress(b""), "must be 4 bytes and 5 for each of .*, found 0"),
        (payload_of(0, [], b"")[:-1], "ends at|no whole zstd block"),
        (payload_of(0, [], b"") * 2, "the zstd frame ends at"),
        (b"", "a zstd frame must begin here"),
    ],
)
def test_payloads_that_lie_are_refused(payload: bytes, message: str) -> None:
    with pytest.raises(CodecError, match=rf"^tensor 'w', encoding overwrite: .*{message}"):
        list(OVERWRITE.decode(META, payload, BASE))


def test_a_tensor_of_4_gib_is_refused_both_ways() -> None:
    meta = TensorMeta("w", "BF16", (1 << 31,))
    message = "must be below 4294967296 bytes, found 4294967296; use another encoding"
    with pytest.raises(CodecError, match=message):
        list(OVERWRITE.encode(meta, []))
    with pytest.raises(CodecError, match=message):
        list(OVERWRITE.decode(meta, payload_of(0, [], b""), BASE))


def test_the_last_byte_below_4_gib_is_reached() -> None:
    meta = TensorMeta("w", "BF16", ((1 << 31) - 1,))
    none = np.empty(0, np.uint16)
    offsets = np.array([1, 5], np.uint32)
    bits = np.array([7, 8], np.uint16)
    last = Window(meta.unit_count - 6, none, offsets, np.zeros(2, np.uint16), bits)
    payload = b"".join(OVERWRITE.encode(meta, [last]))
    base: Any = ConstantBase(np.uint16(0), meta.unit_count)
    (changes,) = OVERWRITE.decode(meta, payload, base)
    assert isinstance(changes, Changes)
    assert (changes.offsets.astype(int) + changes.start).tolist() == [
        meta.unit_count - 5,
        meta.unit_count - 1,
    ]
    assert changes.bits.tolist() == [7, 8]
