from __future__ import annotations

from collections.abc import Iterator
from math import log2
from typing import Any

import numpy as np
import pytest

from contracts.codecs import ConstantBase, apply, encode
from syncline import codecs, kernels
from syncline.codecs import streams
from syncline.codecs.packed import Packed, choose_low_bytes
from syncline.codecs.payload import varint
from syncline.errors import CodecError
from syncline.format import zstd
from syncline.types import Bits, Changes, TensorMeta, Window

PACKED = codecs.get("packed")
META = TensorMeta("w", "BF16", (100,))
BASE = np.arange(100, dtype=np.uint16)


def stepped(count: int, share: float, tail: float = 0.0, seed: int = 0) -> tuple[Bits, Bits]:
    """Return BF16 weights, and the same with a share of them one ulp off, some of these more."""
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal(count, np.float32) * np.float32(0.02)
    old = (weights.view(np.uint32) >> 16).astype(np.uint16)
    steps = rng.choice([1, -1], count) * np.where(
        rng.random(count) < tail, rng.integers(2, 20, count), 1
    )
    return old, np.where(rng.random(count) < share, old + steps, old).astype(np.uint16)


def bound_bytes(count: int, changed: int) -> float:
    """Return what random places and one bit a change cost at least."""
    share = changed / count
    return count * -(share * log2(share) + (1 - share) * log2(1 - share)) / 8 + changed / 8


@pytest.mark.parametrize("share", [0.003, 0.01, 0.03, 0.1])
def test_random_one_ulp_steps_cost_hardly_more_than_the_bound(share: float) -> None:
    old, new = stepped(1 << 23, share)
    meta = TensorMeta("w", "BF16", old.shape)
    payload = encode(PACKED, meta, old, new, 1 << 22)
    changed = int(np.count_nonzero(old != new))
    assert len(payload) < 1.02 * bound_bytes(old.size, changed)
    assert PACKED.predict_bytes(meta, changed) == pytest.approx(len(payload), rel=0.1)
    if share == 0.01:
        assert meta.nbytes / len(payload) > 170
    assert (apply(old, PACKED.decode(meta, payload, old)) == new).all()


@pytest.mark.parametrize("share", [0.003, 0.01, 0.03, 0.1])
def test_prediction_holds_for_steps_with_a_tail(share: float) -> None:
    old, new = stepped(1 << 22, share, tail=0.1)
    meta = TensorMeta("w", "BF16", old.shape)
    payload = encode(PACKED, meta, old, new, 1 << 22)
    changed = int(np.count_nonzero(old != new))
    assert PACKED.predict_bytes(meta, changed) == pytest.approx(len(payload), rel=0.1)


def test_a_tensor_with_a_few_changes_costs_a_few_bytes() -> None:
    meta = TensorMeta("model.norm.weight", "BF16", (640,))
    old, _ = stepped(640, 0)
    new = old.copy()
    new[[3, 100, 500]] += np.array([1, 0xFFFF, 1], np.uint16)
    assert len(encode(PACKED, meta, old, new, 640)) == 21
    assert len(encode(PACKED, meta, old, old, 640)) == 7
    assert PACKED.predict_bytes(meta, 3) < 40


@pytest.mark.parametrize(
    ("mean_gap", "low_bytes"), [(2, 0), (379, 0), (400, 1), (99_000, 1), (101_000, 2)]
)
def test_low_bytes_follow_the_mean_gap(mean_gap: int, low_bytes: int) -> None:
    units = 1 << 24
    count = units // mean_gap
    assert choose_low_bytes(units, count) == low_bytes
    offsets = (np.arange(count, dtype=np.uint64) * mean_gap).astype(np.uint32)
    offsets[-1] = units - 1
    bits = np.ones(count, np.uint8)
    new = np.broadcast_to(np.uint8(0), units)
    meta = TensorMeta("w", "U8", (units,))
    payload = b"".join(PACKED.encode(meta, [Window(0, new, offsets, bits, bits + np.uint8(1))]))
    (changes,) = PACKED.decode(meta, payload, np.ones(units, np.uint8))
    assert isinstance(changes, Changes)
    assert (changes.offsets == offsets).all()


@pytest.mark.parametrize("transform", ["step", "xor"])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("spread_bits", [1, 2, 4, 5, 9, 17, 33, 64])
def test_values_of_any_size_come_back(transform: str, width: int, spread_bits: int) -> None:
    dtype = {1: "U8", 2: "U16", 4: "U32", 8: "U64"}[width]
    rng = np.random.default_rng(spread_bits)
    old = np.frombuffer(rng.bytes(300 * width), f"<u{width}")
    most = (1 << min(spread_bits, 8 * width)) - 1
    flips = rng.integers(1, most, 300, np.uint64, endpoint=True).astype(old.dtype)
    meta = TensorMeta("w", dtype, (300,))
    for new in (old + flips, old - flips, old ^ flips):
        codec = Packed(transform)  # type: ignore[arg-type]
        payload = encode(codec, meta, old, new, 300)
        assert (apply(old, PACKED.decode(meta, payload, old)) == new).all()


def test_the_smallest_symbols_are_chosen() -> None:
    old = np.zeros(100, np.uint16)
    for step, symbol_bits in ((1, 1), (2, 4), (7, 4), (8, 8), (300, 8)):
        payload = encode(PACKED, META, old, old + np.uint16(step), 100)
        assert payload[:4].hex() == "01026464"
        assert payload[4:7].hex() == f"6400{symbol_bits:02x}"


def test_a_tensor_above_4_gib_has_its_changes_at_the_right_places() -> None:
    window_units = 1 << 24
    meta = TensorMeta("w", "BF16", ((1 << 33) + 5,))
    new = np.broadcast_to(np.uint16(0), window_units)
    one, two = np.array([1], np.uint16), np.array([2], np.uint16)

    def windows() -> Iterator[Window]:
        for start in range(0, meta.unit_count, window_units):
            units = min(window_units, meta.unit_count - start)
            offsets = np.array([4 if start >> 33 else units - 1], np.uint32)
            keep = slice(0, 1 if start >> 33 or not start else 0)
            yield Window(start, new[:units], offsets[keep], one[keep], two[keep])

    payload = b"".join(PACKED.encode(meta, windows()))
    assert len(payload) < 1000
    base: Any = ConstantBase(np.uint16(1), meta.unit_count)
    first, last = PACKED.decode(meta, payload, base)
    assert isinstance(first, Changes)
    assert isinstance(last, Changes)
    assert (first.start, first.offsets.tolist()) == (0, [window_units - 1])
    assert (last.start, last.offsets.tolist(), last.bits.tolist()) == (1 << 33, [4], [2])


def payload_of(
    *,
    count: int = 2,
    low_bytes: int = 0,
    symbol_bits: int = 4,
    escaped: int = 0,
    contents: list[bytes],
    tail: bytes = b"",
) -> bytes:
    """Return a payload of one window of 100 units made by hand, by default of two changes."""
    head = (
        bytes([1, 2, 100, 100]) + varint(count) + bytes([low_bytes, symbol_bits]) + varint(escaped)
    )
    return head + streams.pack([np.frombuffer(content, np.uint8) for content in contents]) + tail


def test_hand_made_payloads_are_legal() -> None:
    (changes,) = PACKED.decode(META, payload_of(contents=[b"\x05\x06", b"\x01"]), BASE)
    assert isinstance(changes, Changes)
    assert changes.offsets.tolist() == [5, 12]
    assert changes.bits.tolist() == [6, 11]


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (
            payload_of(count=101, contents=[b"", b""]),
            "byte 4: change count must be a number from 0 to 100",
        ),
        (
            payload_of(low_bytes=3, contents=[b"\x05\x06", b"\x01"]),
            "byte 5: low bytes must be one of",
        ),
        (
            payload_of(symbol_bits=3, contents=[b"\x05\x06", b"\x01"]),
            "byte 6: symbol bits must be one of",
        ),
        (
            payload_of(escaped=3, contents=[b"\x05\x06", b"\x01"]),
            "byte 7: escaped count must be a number",
        ),
        (payload_of(contents=[b"\x05\x5e", b"\x01"]), "which is not below the window's 100 units"),
        (payload_of(contents=[b"\x05\xff", b"\x01"]), "the gap bytes end inside a gap"),
        (
            payload_of(contents=[b"\x05", b"\x01"]),
            "byte 10: gap stream must be 2 to 2 bytes long, found 1",
        ),
        (
            payload_of(contents=[b"\x05\x06\x07", b"\x01"]),
            "gap stream must be 2 to 2 bytes long, found 3",
        ),
        (payload_of(contents=[b"\xff" * 99, b"\x01"]), "gap bytes end inside a gap"),
        (
            payload_of(low_bytes=1, contents=[b"\x05", b"\0\1", b"\1"]),
            "gap byte 0 stream must be 2 to 2",
        ),
        (
            payload_of(low_bytes=2, contents=[b"\1\2", b"\0\1", b"\0\0", b"\1"]),
            "not below the window's 100",
        ),
        (
            payload_of(contents=[b"\x05\x06", b"\x01\x00"]),
            "symbol stream must be 1 to 1 bytes long, found 2",
        ),
        (
            payload_of(count=1, contents=[b"\x05", b"\x10"]),
            "symbol streams: 0 of 1 symbols must be 15, and",
        ),
        (payload_of(contents=[b"\x05\x06", b"\xf1"]), "symbol streams: 0 of 2 symbols must be 15"),
        (
            payload_of(escaped=1, contents=[b"\x05\x06", b"\x21", b"\0", b"\0"]),
            "symbol streams: 1 of 2 symbols must be 15, and bits after the last 0, found 0",
        ),
        (
            payload_of(escaped=1, contents=[b"\x05\x06", b"\xf1", b"\xf0", b"\xff"]),
            "an excess must be at most 65519, found 65520",
        ),
        (
            payload_of(escaped=1, contents=[b"\x05\x06", b"\xf1", b"\0", b""]),
            "excess byte 1 stream",
        ),
        (
            payload_of(contents=[b"\x05\x06", b"\x01"], tail=b"\0"),
            "the payload must end here, found",
        ),
    ],
)
def test_payloads_that_lie_are_refused(payload: bytes, message: str) -> None:
    with pytest.raises(CodecError, match=rf"^tensor 'w', encoding packed: .*{message}"):
        list(PACKED.decode(META, payload, BASE))


def test_the_largest_value_is_legal_and_one_more_is_not() -> None:
    meta = TensorMeta("w", "U8", (1,))
    legal = bytes([0, 1, 1, 1, 1, 0, 8, 0, 4, 4, 0, 254])
    (changes,) = PACKED.decode(meta, legal, np.zeros(1, np.uint8))
    assert changes.bits.tolist() == [255]
    beyond = bytes([0, 1, 1, 1, 1, 0, 8, 1, 4, 4, 4, 0, 255, 0])
    with pytest.raises(CodecError, match=r"an excess must be at most -1, found 0"):
        list(PACKED.decode(meta, beyond, np.zeros(1, np.uint8)))


def test_a_bomb_is_refused_before_it_goes_off() -> None:
    bomb = zstd.compress(bytes(1 << 26))
    head = bytes([1, 2, 100, 100, 2, 0, 4, 0])
    table = varint(len(bomb) << 2 | streams.ZSTD) + varint(1 << 2)
    with pytest.raises(CodecError, match=r"gap stream: at most 2 bytes may be in the zstd frame"):
        list(PACKED.decode(META, head + table + bomb + b"\1", BASE))


def test_a_repeated_gap_costs_one_byte() -> None:
    old = np.zeros(100, np.uint16)
    new = old.copy()
    new[9::10] = 1
    offsets, _, _ = kernels.diff(old, new)
    payload = encode(PACKED, META, old, new, 100)
    assert len(offsets) == 10
    assert payload.hex(" ") == "01 02 64 64 0a 00 01 0a 06 08 06 06 09 ff 03 00 00"
