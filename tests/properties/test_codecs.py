"""Properties of codecs: nothing is lost, and no payload, however damaged, does harm."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.codecs import apply, encode
from syncline import codecs
from syncline.abc import Codec
from syncline.codecs.packed import Packed
from syncline.errors import CodecError, FormatError
from syncline.types import DTYPE_BITS, Bits, TensorMeta, unsigned

CODECS: Sequence[Codec] = [*map(codecs.get, codecs.NAMES), Packed("xor")]
ALL_CODECS = pytest.mark.parametrize("codec", CODECS, ids=[*codecs.NAMES, "packed-xor"])
WHOLE_BYTES = [dtype for dtype, bits in DTYPE_BITS.items() if bits % 8 == 0]


@st.composite
def tensors(draw: st.DrawFn) -> tuple[TensorMeta, Bits, Bits, int]:
    """Draw a tensor, its bits before and after, and a window."""
    count = draw(st.integers(0, 300))
    meta = TensorMeta("w", draw(st.sampled_from(WHOLE_BYTES)), (count,))
    width = meta.unit_bytes
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    old = np.frombuffer(rng.bytes(count * width), unsigned(width))
    new = old.copy()
    values = st.integers(0, (1 << (8 * width)) - 1)
    for index in draw(st.sets(st.integers(0, count - 1), max_size=20)) if count else ():
        new[index] = draw(values | st.sampled_from([0, 1, int(old[index]) ^ 1]))
    if draw(st.booleans()):
        new = np.where(rng.random(count) < draw(st.floats(0, 1)), new + new.dtype.type(1), new)
    return meta, old, new, draw(st.integers(1, 400))


@ALL_CODECS
@given(case=tensors())
def test_decode_undoes_encode(codec: Codec, case: tuple[TensorMeta, Bits, Bits, int]) -> None:
    meta, old, new, window_units = case
    payload = encode(codec, meta, old, new, window_units)
    assert (apply(old, codec.decode(meta, payload, old)) == new).all()


def error_of(
    codec: Codec, meta: TensorMeta, payload: bytes, base: Bits
) -> CodecError | FormatError | None:
    """Return the refusal of a payload; if there is none, its changes lie inside the tensor."""
    try:
        apply(base, codec.decode(meta, payload, base))
    except (CodecError, FormatError) as error:
        return error
    return None


def mutated(payload: bytes, data: st.DataObject) -> bytes:
    """Return the payload after one to three random edits."""
    out = bytearray(payload)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(out)))
        edit = data.draw(st.sampled_from(["flip", "set", "insert", "delete", "repeat", "cut"]))
        if edit == "flip" and place < len(out):
            out[place] ^= 1 << data.draw(st.integers(0, 7))
        elif edit == "set" and place < len(out):
            out[place] = data.draw(st.sampled_from([0, 1, 2, 0x7F, 0x80, 0xFE, 0xFF]))
        elif edit == "insert":
            out[place:place] = data.draw(st.binary(min_size=1, max_size=8))
        elif edit == "delete":
            del out[place : place + data.draw(st.integers(1, 8))]
        elif edit == "repeat":
            out[place:place] = out[place : place + data.draw(st.integers(1, 64))]
        elif edit == "cut":
            del out[place:]
    return bytes(out)


@ALL_CODECS
@given(case=tensors(), data=st.data())
@settings(max_examples=3 * settings().max_examples)
def test_a_damaged_payload_is_an_error_or_stays_inside_the_tensor(
    codec: Codec, case: tuple[TensorMeta, Bits, Bits, int], data: st.DataObject
) -> None:
    meta, old, new, window_units = case
    damaged = mutated(encode(codec, meta, old, new, window_units), data)
    error = error_of(codec, meta, damaged, old)
    assert error is None or error.tensor == "w"
    assert error is None or "byte " in str(error) or "must be" in str(error)


@ALL_CODECS
@given(payload=st.binary(max_size=200))
def test_random_bytes_are_an_error_or_stay_inside_the_tensor(codec: Codec, payload: bytes) -> None:
    meta = TensorMeta("w", "BF16", (40,))
    old = np.arange(40, dtype=np.uint16)
    error = error_of(codec, meta, payload, old)
    assert error is None or error.tensor == "w"


@ALL_CODECS
@given(data=st.data())
def test_a_damaged_payload_takes_no_more_memory_than_the_tensor(
    codec: Codec, data: st.DataObject
) -> None:
    meta = TensorMeta("w", "U64", (64,))
    old = np.arange(64, dtype=np.uint64)
    damaged = mutated(encode(codec, meta, old, old + np.uint64(1), 16), data)
    tracemalloc.start()
    try:
        error_of(codec, meta, damaged, old)
    finally:
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak_bytes < 1 << 18
