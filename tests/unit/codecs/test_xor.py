from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import zstandard

from contracts.codecs import ConstantBase, encode, windows_of
from syncline import codecs
from syncline.codecs.payload import PIECE_BYTES
from syncline.errors import CodecError
from syncline.types import Changes, TensorMeta

XOR = codecs.get("xor")


def test_the_payload_is_one_frame_of_the_dense_xor() -> None:
    meta = TensorMeta("w", "I32", (3,))
    old, new = np.array([1, 2, 3], np.uint32), np.array([1, 7, 0x0300], np.uint32)
    payload = encode(XOR, meta, old, new, 2)
    assert zstandard.frame_content_size(payload) == 12
    assert zstandard.decompress(payload) == b"\0\0\0\0\5\0\0\0\3\3\0\0"


def test_any_compressor_may_have_made_it() -> None:
    meta = TensorMeta("w", "I16", (1000,))
    old = np.arange(1000, dtype=np.uint16)
    flips = np.where(old % 9, 0, 5).astype(np.uint16)
    payload = zstandard.ZstdCompressor(level=19, write_checksum=True).compress(flips.tobytes())
    (changes,) = XOR.decode(meta, payload, old)
    assert isinstance(changes, Changes)
    assert changes.offsets.tolist() == list(range(0, 1000, 9))
    assert (changes.bits == (old ^ 5)[::9]).all()


def test_encoding_streams() -> None:
    meta = TensorMeta("w", "U8", (1 << 24,))
    old = np.zeros(meta.unit_count, np.uint8)
    new = np.frombuffer(np.random.default_rng(0).bytes(meta.unit_count), np.uint8)
    windows = windows_of(meta, old, new, 1 << 20)
    taken = 0
    for index, chunk in enumerate(XOR.encode(meta, windows)):
        taken += len(chunk)
        if index == 3:
            break
    assert taken < 1 << 22


@pytest.mark.parametrize("extra", [-1, 1])
def test_a_wrong_size_is_refused(extra: int) -> None:
    meta = TensorMeta("w", "U8", (100,))
    payload = zstandard.ZstdCompressor().compress(bytes(100 + extra))
    with pytest.raises(
        CodecError, match=r"encoding xor: byte 0: 100 bytes must be in the zstd frame"
    ):
        list(XOR.decode(meta, payload, np.zeros(100, np.uint8)))


def test_positions_above_4_gib_are_right() -> None:
    # The frame is made by hand: zeros as repeated blocks, then one piece with a change.
    meta = TensorMeta("w", "F64", ((1 << 29) + 5,))
    header = b"\x28\xb5\x2f\xfd" + bytes([0b1100_0000, 0x38]) + meta.nbytes.to_bytes(8, "little")
    zeros = ((1 << 17) << 3 | 1 << 1).to_bytes(3, "little") + b"\0"
    tail = bytes(32) + b"\x11\0\0\0\0\0\0\x80"
    last = (len(tail) << 3 | 1).to_bytes(3, "little") + tail
    payload = header + zeros * (1 << 15) + last
    base: Any = ConstantBase(np.uint64(1), meta.unit_count)
    (changes,) = XOR.decode(meta, payload, base)
    assert changes.start + int(changes.offsets[0]) == (1 << 29) + 4
    assert changes.start % (PIECE_BYTES // 8) == 0
    assert changes.bits.tolist() == [0x8000000000000010]


def test_a_single_value_is_predicted() -> None:
    assert XOR.predict_bytes(TensorMeta("w", "BF16", ()), 1) < 32
