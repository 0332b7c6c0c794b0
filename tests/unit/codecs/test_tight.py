from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from contracts.codecs import ConstantBase, apply, encode
from syncline import codecs
from syncline.codecs import exponents
from syncline.codecs.payload import varint
from syncline.codecs.tight import rice_bits
from syncline.errors import CodecError
from syncline.kernels import tight as lists
from syncline.kernels.tight import ClassEntry, Classes
from syncline.types import Bits, Changes, TensorMeta, Window
from weight_pairs import optimizer_step

TIGHT, PACKED = codecs.get("tight"), codecs.get("packed")
META = TensorMeta("w", "BF16", (8,))
BASE = np.array([0x3F00, 0x3F80, 0x3F00, 0x3F00, 0x3F80, 0x3F80, 0x3F00, 0x3F80], np.uint16)


@pytest.mark.parametrize(
    ("learning_rate", "density", "most_bytes"),
    [(2.2e-7, 0.003, 0.96), (8e-7, 0.01, 0.88), (5.2e-6, 0.05, 0.72)],
)
def test_weights_out_of_training_cost_less_than_uniform_places_can(
    learning_rate: float, density: float, most_bytes: float
) -> None:
    old, new = optimizer_step(1 << 22, learning_rate)
    meta = TensorMeta("w", "BF16", old.shape)
    changed = int(np.count_nonzero(old != new))
    assert changed / old.size == pytest.approx(density, rel=0.05)
    payload = encode(TIGHT, meta, old, new, 1 << 22)
    assert len(payload) / changed < most_bytes
    assert len(payload) < 0.75 * len(encode(PACKED, meta, old, new, 1 << 22))
    assert (apply(old, TIGHT.decode(meta, payload, old)) == new).all()


@pytest.mark.parametrize("share", [0.001, 0.003, 0.01, 0.03, 0.1])
def test_uniform_places_cost_hardly_more_than_packed(share: float) -> None:
    rng = np.random.default_rng(1)
    old, _ = optimizer_step(1 << 22, 0)
    steps = rng.choice([1, -1], old.size)
    new = np.where(rng.random(old.size) < share, old + steps, old).astype(np.uint16)
    meta = TensorMeta("w", "BF16", old.shape)
    assert exponents.choose(meta, window(old, new)).count == 1
    tight, packed = (len(encode(codec, meta, old, new, 1 << 22)) for codec in (TIGHT, PACKED))
    assert tight < 1.01 * packed


def window(old: Bits, new: Bits) -> Window:
    offsets = np.flatnonzero(old != new).astype(np.uint32)
    return Window(0, new, offsets, old[offsets], new[offsets])


@pytest.mark.parametrize("dtype", exponents.FIELDS)
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.7, 0.99, 1.0])
def test_any_share_of_any_changes_comes_back(dtype: str, share: float) -> None:
    rng = np.random.default_rng(2)
    meta = TensorMeta("w", dtype, (5000,))
    old = np.frombuffer(rng.bytes(meta.nbytes), f"<u{meta.unit_bytes}")
    # Units with a low exponent change most, so that several classes are worth their entries.
    shift, mask = exponents.field(meta)
    exponent = (old >> old.dtype.type(shift) & old.dtype.type(mask)).astype(np.float64)
    is_changed = rng.random(old.size) < share ** (2 * exponent / mask)
    is_changed |= share == 1
    flips = rng.integers(1, (1 << 8 * meta.unit_bytes) - 1, old.size, np.uint64).astype(old.dtype)
    steps = rng.choice(np.array([1, 1, 2, 3, 40], old.dtype), old.size)
    for changed in (old ^ flips, old + steps, old - steps, old + old.dtype.type(1)):
        new = np.where(is_changed, changed, old) if share else old
        payload = encode(TIGHT, meta, old, new, 5000)
        assert (apply(old, TIGHT.decode(meta, payload, old)) == new).all()


def test_dense_changes_mark_what_stays() -> None:
    rng = np.random.default_rng(3)
    meta = TensorMeta("w", "F32", (1 << 16,))
    old = np.frombuffer(rng.bytes(meta.nbytes), np.uint32)
    new = np.where(rng.random(old.size) < 0.995, old + np.uint32(1), old)
    payload = encode(TIGHT, meta, old, new, 1 << 16)
    assert 8 * len(payload) / old.size < 1.06


def test_a_tensor_with_a_few_changes_costs_a_few_bytes() -> None:
    meta = TensorMeta("model.norm.weight", "BF16", (640,))
    old, _ = optimizer_step(640, 0)
    new = old.copy()
    new[[3, 100, 500]] += np.array([1, 0xFFFF, 1], np.uint16)
    assert len(encode(TIGHT, meta, old, new, 640)) == 17
    assert len(encode(TIGHT, meta, old, old, 640)) == 7
    assert TIGHT.predict_bytes(meta, 3) < 40


@pytest.mark.parametrize("dtype", ["F8_E4M3", "BF16", "F32", "F64"])
def test_the_farthest_steps_come_back(dtype: str) -> None:
    meta = TensorMeta("w", dtype, (5,))
    half = 1 << (8 * meta.unit_bytes - 1)
    old = np.array([0, half, half, 1, half - 1], f"<u{meta.unit_bytes}")
    new = np.array([half, 0, 1, half, half], old.dtype)
    payload = encode(TIGHT, meta, old, new, 5)
    assert (apply(old, TIGHT.decode(meta, payload, old)) == new).all()


def test_a_tensor_above_4_gib_has_its_changes_at_the_right_places() -> None:
    window_units = 1 << 24
    meta = TensorMeta("w", "BF16", ((1 << 32) + 5,))
    new = np.zeros(window_units, np.uint16)
    one, two = np.array([1], np.uint16), np.array([2], np.uint16)

    def windows() -> Iterator[Window]:
        for start in range(0, meta.unit_count, window_units):
            units = min(window_units, meta.unit_count - start)
            offsets = np.array([4 if start >> 32 else units - 1], np.uint32)
            keep = slice(0, 1 if start >> 32 or not start else 0)
            yield Window(start, new[:units], offsets[keep], one[keep], two[keep])

    payload = b"".join(TIGHT.encode(meta, windows()))
    assert len(payload) < 400
    base: Any = ConstantBase(np.uint16(1), meta.unit_count)
    first, last = TIGHT.decode(meta, payload, base)
    assert isinstance(first, Changes)
    assert isinstance(last, Changes)
    assert (first.start, first.offsets.tolist()) == (0, [window_units - 1])
    assert (last.start, last.offsets.tolist(), last.bits.tolist()) == (1 << 32, [4], [2])


def test_gaps_are_cut_near_the_best_place() -> None:
    rng = np.random.default_rng(4)
    for share in (0.3, 0.1, 0.03, 0.01, 0.0003):
        marks = np.flatnonzero(rng.random(1 << 20) < share)
        gaps = np.diff(marks, prepend=-1) - 1
        costs = [marks.size * (1 + bits) + int((gaps >> bits).sum()) for bits in range(25)]
        assert costs[rice_bits(1 << 20, marks.size)] <= 1.005 * min(costs)
    assert rice_bits(1 << 62, 1) == 24


def payload_of(
    entries: list[bytes], unary: bytes, fields: bytes, *, lowest: int = 126, size: int | None = None
) -> bytes:
    """Return a payload of one window of 8 units made by hand."""
    head = bytes([len(entries)]) + varint(lowest) + b"".join(entries)
    body = head + varint(len(unary)) + unary + fields
    return bytes([0, 2, 8, 8]) + varint(len(body) if size is None else size) + body


FIRST, SECOND = bytes.fromhex("03 80 01 00"), bytes.fromhex("01 01 01 80 00")
LEGAL = payload_of([FIRST, SECOND], b"\x54", b"\x06")


def test_a_payload_made_by_hand_is_legal() -> None:
    (changes,) = TIGHT.decode(META, LEGAL, BASE)
    assert isinstance(changes, Changes)
    assert changes.offsets.tolist() == [0, 2, 5, 6]
    assert changes.bits.tolist() == [0x3F01, 0x3EFF, 0x3F83, 0x3EFF]


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"\1" + LEGAL[1:], "byte 0: flag must be one of (0,), found 1"),
        (LEGAL[:5] + b"\0" + LEGAL[6:], "byte 5: class count must be one of"),
        (LEGAL[:5] + b"\x11" + LEGAL[6:], "byte 5: class count must be one of"),
        (payload_of([SECOND], b"\x54", b"\6", lowest=256), "byte 6: lowest exponent must be a num"),
        (
            payload_of([varint(9)], b"", b""),
            "byte 7: changes of a class must be a number from 0 to 8",
        ),
        (payload_of([b"\1\x19"], b"", b""), "byte 8: gap bits must be one of"),
        (payload_of([b"\1\x99"], b"", b""), "byte 8: gap bits must be one of"),
        (
            payload_of([b"\3\x80\6"], b"", b""),
            "byte 9: unchanged units of a class must be a number",
        ),
        (payload_of([b"\1\0\2"], b"", b""), "byte 9: larger steps of a class must be a number"),
        (payload_of([b"\1\0\1\x19"], b"", b""), "byte 10: run bits must be one of"),
        (payload_of([b"\1\0\1\0\x0f"], b"", b""), "byte 11: excess bits must be one of"),
        (payload_of([b"\0", b"\0"], b"", b""), "byte 5: a window of 5 bytes must have changes"),
        (
            payload_of([FIRST, SECOND], b"\x54", b"\6", size=13),
            "field bits: 6 bits must fill 0 byt",
        ),
        (
            payload_of([FIRST, SECOND], b"\x54", b"\6", size=11),
            "byte 16: unary bytes needs 1 bytes, found 0",
        ),
        (
            payload_of([FIRST, SECOND], b"\x54", b"\6", size=15),
            "byte 5: window needs 15 bytes, found 14: damaged",
        ),
        (
            payload_of([b"\5\0\0"] * 2, b"\0", b"\0"),
            "byte 5: at most 8 marks or changes may be ann",
        ),
        (
            payload_of([FIRST, SECOND], b"\x14", b"\6"),
            "unary bits: 1 bytes must hold exactly 3 ones",
        ),
        (
            payload_of([FIRST, SECOND], b"\xd4", b"\6"),
            "unary bits: 1 bytes must hold exactly 3 ones",
        ),
        (payload_of([FIRST, SECOND], b"\x54\0", b"\6"), "unary bits: 2 bytes must hold exactly 3"),
        (payload_of([FIRST, SECOND], b"", b"\6"), "unary bits: 0 bytes must hold exactly 3 ones"),
        (payload_of([FIRST, SECOND], b"\x54", b""), "field bits: 6 bits must fill 0 bytes"),
        (payload_of([FIRST, SECOND], b"\x54", b"\6\0"), "field bits: 6 bits must fill 2 bytes"),
        (payload_of([FIRST, SECOND], b"\x54", b"\x46"), "field bits: 6 bits must fill 1 bytes"),
        (payload_of([b"\1\3\0"], b"\2", b"\0"), "class 0: a mark must be below 8, found one that"),
        (
            payload_of([b"\1\x18\0"], bytes(9) + b"\1", b"\xff\xff\xff\0"),
            "class 0: a mark must be b",
        ),
        (
            payload_of([b"\2\0\0", b"\0"], b"\x90", b"\0"),
            "class 0: a mark must be below the members",
        ),
        (
            payload_of([FIRST, b"\0"], b"\x10", b"\6"),
            "damaged, or another base",
        ),
        (
            payload_of([b"\1\x80\1\0", b"\0"], b"\1", b"\0"),
            "class 0: 1 units of the base must be unm",
        ),
        (payload_of([b"\2\0\1\1\0"], b"\x1b", b"\2"), "class 0: a mark must be below 2, found"),
        (
            payload_of([b"\1\0\1\0\2"], b"\3\0\1", b"\0\0\0"),
            "class 0: a step must fit into 2 bytes",
        ),
        (payload_of([b"\1\0\1\0\x0e"], b"\x0b", b"\xff\x3f"), "class 0: a step must fit into 2 by"),
    ],
)
def test_payloads_that_lie_are_refused(payload: bytes, message: str) -> None:
    with pytest.raises(CodecError) as caught:
        list(TIGHT.decode(META, payload, BASE))
    assert str(caught.value).startswith("tensor 'w', encoding tight: byte ")
    assert message in str(caught.value)


def test_half_the_range_is_legal_downwards_only() -> None:
    base = np.zeros(8, np.uint16)
    entry = b"\1\0\1\0\x0e"
    # The excess 2**15 - 2 and 2**14 are 2**15 and 2**14 - 2 more: bit 15, then 15 low bits.
    down = payload_of([entry], b"\x0b", b"\xfe\xbf", lowest=0)
    (changes,) = TIGHT.decode(META, down, base)
    assert changes.bits.tolist() == [0x8000]
    with pytest.raises(CodecError, match="class 0: a step must fit into 2 bytes"):
        list(TIGHT.decode(META, payload_of([entry], b"\x0b", b"\xfe\x3f", lowest=0), base))


def test_zeros_without_end_are_refused_in_little_memory() -> None:
    payload = payload_of([b"\1\0\0"], bytes(1 << 22), b"\0")
    with pytest.raises(CodecError, match="unary bits: 4194304 bytes must hold exactly 1 ones"):
        list(TIGHT.decode(META, payload, BASE))


def test_the_wrong_base_may_be_seen_but_is_never_harmful() -> None:
    with pytest.raises(CodecError, match="another base"):
        list(TIGHT.decode(META, LEGAL, np.full(8, 0x3F80, np.uint16)))


def test_lists_come_back_for_any_low_bits() -> None:
    rng = np.random.default_rng(5)
    for gap_bits, run_bits, excess_bits in ((0, 0, 0), (3, 1, 2), (24, 24, 62), (7, 0, 31)):
        marks = np.flatnonzero(rng.random(2000) < 0.2).astype(np.uint32)
        zigzag = rng.integers(1, 1 << 63, marks.size, np.uint64) >> rng.integers(
            0, 63, marks.size, np.uint64
        )
        zigzag |= zigzag == 0
        large = int(np.count_nonzero(zigzag > 2))
        entry = ClassEntry(marks.size, marks.size, gap_bits, False, large, large, run_bits, False)
        entries = [ClassEntry(), entry._replace(excess_bits=excess_bits)]
        unary, fields = lists.write_lists(entries, marks, zigzag)
        found_marks, found_zigzag = lists.read_lists(entries, unary, fields, 2000, 8)
        assert (found_marks == marks).all()
        assert (found_zigzag == zigzag).all()


@pytest.mark.parametrize(("lowest", "count"), [(0, 1), (0, 16), (120, 8), (127, 2), (255, 16)])
def test_ranked_changes_are_found_again(lowest: int, count: int) -> None:
    old, new = optimizer_step(10_000, 1e-4)
    at = window(old, new)
    classes = Classes(7, 0xFF, lowest, count)
    ranked = lists.rank_changes(new, at.offsets, at.old_bits, classes)
    assert ranked.members.sum() == old.size
    entries = [ClassEntry(changes=n, marks=n) for n in ranked.changes.tolist()]
    offsets, order, bits = lists.find_changes(old, classes, entries, ranked.ranks)
    assert (offsets == at.offsets).all()
    assert (bits == at.old_bits).all()
    assert (ranked.order[order] == np.arange(offsets.size)).all()
