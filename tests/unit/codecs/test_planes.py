from __future__ import annotations

import numpy as np
import pytest

import second_reader
from contracts.codecs import apply, encode
from syncline import codecs, kernels
from syncline.errors import CodecError
from syncline.kernels import literals
from syncline.types import Bits, TensorMeta

PLANES = codecs.get("planes")


def weights(dtype: str, count: int) -> Bits:
    """Return the bits of normally distributed weights."""
    values = np.random.default_rng(0).standard_normal(count, np.float32) * np.float32(0.02)
    bits = values.view(np.uint32)
    return (bits >> 16).astype(np.uint16) if dtype == "BF16" else bits


@pytest.mark.parametrize(("dtype", "times_smaller"), [("BF16", 1.5), ("F32", 1.19)])
def test_the_exponent_costs_little(dtype: str, times_smaller: float) -> None:
    new = weights(dtype, 1 << 20)
    meta = TensorMeta("w", dtype, new.shape)
    payload = encode(PLANES, meta, np.zeros_like(new), new, 1 << 20)
    assert meta.nbytes / len(payload) > times_smaller
    assert PLANES.predict_bytes(meta, 0) == pytest.approx(len(payload), rel=0.01)
    assert (apply(np.zeros_like(new), PLANES.decode(meta, payload, new[:0])) == new).all()


def test_noise_costs_hardly_more_than_raw() -> None:
    rng = np.random.default_rng(1)
    for dtype, bits in (("U8", np.uint8), ("F64", np.uint64)):
        new = np.frombuffer(rng.bytes(1 << 16), bits)
        meta = TensorMeta("w", dtype, new.shape)
        payload = encode(PLANES, meta, np.zeros_like(new), new, 1 << 12)
        assert len(payload) <= meta.nbytes + 16 * 8 * 3 + 9


@pytest.mark.parametrize("flag", [0, 1])
def test_a_reader_follows_the_flag(flag: int) -> None:
    meta = TensorMeta("w", "I32", (1,))
    payload = bytes([flag, 4, 1, 1, 4, 4, 4, 4, 0x03, 0, 0, 0x80])
    (span,) = PLANES.decode(meta, payload, np.empty(0, np.uint32))
    assert int(span.bits[0]) == (0x80000003, 0xC0000001)[flag]


def test_planes_must_be_as_long_as_the_window() -> None:
    meta = TensorMeta("w", "BF16", (3,))
    payload = bytes([0, 2, 3, 3, 12, 8, 1, 2, 3, 4, 5])
    with pytest.raises(
        CodecError, match=r"byte 9: plane 1 stream must be 3 to 3 bytes long, found 2"
    ):
        list(PLANES.decode(meta, payload, np.empty(0, np.uint16)))


def test_another_reader_reads_what_the_fast_writer_wrote() -> None:
    new = weights("BF16", 300_000)
    meta = TensorMeta("w", "BF16", new.shape)
    payload = encode(PLANES, meta, np.zeros_like(new), new, 1 << 22)
    exponents = kernels.split_planes(new, rotated=True)[1]
    frame = literals.compress(exponents)
    assert frame is not None
    assert frame in payload
    assert second_reader.decode_planes(payload, 2, new.size) == new.tobytes()
