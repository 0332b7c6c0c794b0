"""The contract of `syncline.abc.Codec`; `test_codecs.py` runs it over every implementation."""

from __future__ import annotations

import itertools
import tracemalloc
from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np
import pytest

from syncline import kernels
from syncline.abc import Codec
from syncline.errors import CodecError, FormatError
from syncline.types import DTYPE_BITS, Bits, Changes, Span, TensorMeta, Window, unsigned

SHAPES = {"0-d": (), "empty": (0,), "empty-2-d": (3, 0), "matrix": (24, 40)}
PATTERNS = ("nothing", "first", "last", "two neighbours", "some", "ulps", "everything")


def windows_of(meta: TensorMeta, old: Bits, new: Bits, window_units: int) -> Iterator[Window]:
    """Yield windows as a publisher makes them: the next one overwrites the buffers of the last."""
    buffer = np.empty(min(window_units, meta.unit_count), new.dtype)
    for start in range(0, meta.unit_count, window_units):
        stop = min(start + window_units, meta.unit_count)
        view = buffer[: stop - start]
        view[:] = new[start:stop]
        offsets, old_bits, new_bits = kernels.diff(old[start:stop], view)
        yield Window(start, view, offsets, old_bits, new_bits)
        for used in (view, offsets, old_bits, new_bits):
            used[...] = 0


def encode(codec: Codec, meta: TensorMeta, old: Bits, new: Bits, window_units: int = 256) -> bytes:
    """Return the whole payload, from chunks that are all kept until the end."""
    chunks = list(codec.encode(meta, windows_of(meta, old, new, window_units)))
    return b"".join(chunks)


def apply(base: Bits, decoded: Iterable[Changes | Span]) -> Bits:
    """Return what an engine holds after applying what a codec decoded; checks order and bounds."""
    held = base.copy()
    end = 0
    for item in decoded:
        assert item.bits.dtype == base.dtype
        if isinstance(item, Span):
            places = np.arange(item.bits.size, dtype=np.uint64)
        else:
            assert item.offsets.dtype == np.uint32
            places = item.offsets.astype(np.uint64)
        assert item.bits.shape == places.shape
        assert places.size
        places += np.uint64(item.start)
        assert int(places[0]) >= end
        assert (places[1:] > places[:-1]).all()
        end = int(places[-1]) + 1
        held[places.astype(np.int64)] = item.bits
    assert end <= base.size
    return held


def random_bits(meta: TensorMeta, seed: int) -> Bits:
    """Return random bits for every unit: infinities, NaN payloads and subnormals among them."""
    rng = np.random.default_rng(seed)
    return np.frombuffer(rng.bytes(meta.nbytes), unsigned(meta.unit_bytes)).copy()


def changed(old: Bits, pattern: str, seed: int = 0) -> Bits:
    """Return new bits that differ from the old ones after this pattern."""
    rng = np.random.default_rng(seed)
    new = old.copy()
    if not new.size:
        return new
    flips = rng.integers(1, 1 << min(63, 8 * old.itemsize), old.size, np.uint64).astype(old.dtype)
    if pattern == "first":
        new[0] ^= flips[0]
    elif pattern == "last":
        new[-1] ^= flips[-1]
    elif pattern == "two neighbours":
        new[old.size // 2 : old.size // 2 + 2] ^= flips[:2]
    elif pattern == "some":
        new ^= flips * (rng.random(old.size) < 0.05)
    elif pattern == "ulps":
        new += rng.choice([0, 0, 0, 1, -1], old.size).astype(old.dtype)
    elif pattern == "everything":
        new ^= flips
    return new


class ConstantBase:
    """A base of any length, one value everywhere, that takes memory only for what is asked for."""

    def __init__(self, value: np.unsignedinteger, count: int) -> None:
        self._value = value
        self._count = count

    def __getitem__(self, units: slice) -> Bits:
        start, stop, _ = units.indices(self._count)
        return np.full(stop - start, self._value)


def _peak_bytes(items: Iterator[object]) -> int:
    """Return the most memory that was in use while the items were made and dropped."""
    tracemalloc.start()
    try:
        deque(items, maxlen=0)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


class CodecContract:
    """What every codec keeps; a subclass sets `codec`."""

    codec: Codec

    @pytest.mark.parametrize("pattern", PATTERNS)
    @pytest.mark.parametrize("dtype", DTYPE_BITS)
    def test_decode_undoes_encode_for_every_dtype(self, dtype: str, pattern: str) -> None:
        meta = TensorMeta("w", dtype, (16, 72))
        old = random_bits(meta, 1)
        new = changed(old, pattern)
        payload = encode(self.codec, meta, old, new)
        before = old.copy()
        assert (apply(old, self.codec.decode(meta, payload, old)) == new).all()
        assert (old == before).all()

    @pytest.mark.parametrize("pattern", PATTERNS)
    @pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
    def test_decode_undoes_encode_for_every_shape(
        self, shape: tuple[int, ...], pattern: str
    ) -> None:
        meta = TensorMeta("w", "BF16", shape)
        old = random_bits(meta, 2)
        new = changed(old, pattern)
        payload = encode(self.codec, meta, old, new)
        assert (apply(old, self.codec.decode(meta, payload, old)) == new).all()

    @pytest.mark.parametrize("window_units", [1, 2, 7, 64, 959, 960, 961, 4096])
    def test_decode_undoes_encode_for_every_window(self, window_units: int) -> None:
        meta = TensorMeta("w", "F32", (24, 40))
        old = random_bits(meta, 3)
        new = changed(old, "some")
        payload = encode(self.codec, meta, old, new, window_units)
        assert (apply(old, self.codec.decode(meta, payload, old)) == new).all()

    @pytest.mark.parametrize(
        ("dtype", "special"),
        [
            ("F16", [0x0000, 0x8000, 0x7C00, 0x7C01, 0x7E00, 0xFE01, 0x0001]),
            ("BF16", [0x0000, 0x8000, 0x7F80, 0x7F81, 0x7FC0, 0xFFC1, 0x0001]),
            ("F32", [0, 1 << 31, 0x7F800000, 0x7F800001, 0x7FC00000, 0xFFC12345, 1]),
            ("F64", [0, 1 << 63, 0x7FF << 52, (0x7FF << 52) + 1, 0xFFF8 << 48, 1, (1 << 64) - 1]),
        ],
    )
    def test_zeros_infinities_and_nans_keep_their_bits(
        self, dtype: str, special: list[int]
    ) -> None:
        meta = TensorMeta("w", dtype, (len(special) ** 2,))
        bits = np.array(special, unsigned(meta.unit_bytes))
        old, new = np.repeat(bits, bits.size), np.tile(bits, bits.size)
        payload = encode(self.codec, meta, old, new)
        assert (apply(old, self.codec.decode(meta, payload, old)) == new).all()

    def test_a_window_is_read_before_the_next_is_asked_for(self) -> None:
        meta = TensorMeta("w", "BF16", (64,))
        old = random_bits(meta, 4)
        new = changed(old, "everything")
        stable = [
            Window(start, new[start:stop], *kernels.diff(old[start:stop], new[start:stop]))
            for start, stop in itertools.pairwise(range(0, 65, 16))
        ]
        assert encode(self.codec, meta, old, new, 16) == b"".join(self.codec.encode(meta, stable))

    def test_payloads_may_lie_at_any_address(self) -> None:
        meta = TensorMeta("w", "F64", (40,))
        old = random_bits(meta, 5)
        new = changed(old, "some")
        payload = encode(self.codec, meta, old, new, 16)
        for shift in range(8):
            buffer = bytearray(bytes(shift) + payload)
            view = memoryview(buffer)[shift:]
            assert (apply(old, self.codec.decode(meta, view, old)) == new).all()

    def test_full_codecs_give_every_unit(self) -> None:
        meta = TensorMeta("w", "BF16", (1000,))
        old = random_bits(meta, 6)
        new = changed(old, "some")
        decoded = list(self.codec.decode(meta, encode(self.codec, meta, old, new), old))
        assert all(isinstance(item, Span) for item in decoded) == self.codec.is_full
        if self.codec.is_full:
            assert sum(item.bits.size for item in decoded) == meta.unit_count
        else:
            assert sum(item.bits.size for item in decoded) == np.count_nonzero(old != new)

    def test_needs_base_is_the_truth(self) -> None:
        meta = TensorMeta("w", "F32", (1000,))
        old = random_bits(meta, 7)
        new = changed(old, "ulps")
        payload = encode(self.codec, meta, old, new)
        at_changes = old != new
        other = random_bits(meta, 8)
        result = apply(other, self.codec.decode(meta, payload, other))
        assert (result[at_changes] == new[at_changes]).all() != self.codec.needs_base

    def test_is_idempotent_is_the_truth(self) -> None:
        meta = TensorMeta("w", "F32", (1000,))
        old = random_bits(meta, 9)
        new = changed(old, "some")
        payload = encode(self.codec, meta, old, new)
        half = np.concatenate((new[:500], old[500:]))
        results = [apply(base, self.codec.decode(meta, payload, base)) for base in (half, new)]
        assert all((result == new).all() for result in results) == self.codec.is_idempotent

    def test_memory_is_bounded_by_windows(self) -> None:
        meta = TensorMeta("w", "BF16", (1 << 24,))
        rng = np.random.default_rng(10)
        old = np.frombuffer(rng.bytes(1 << 12), np.uint16).repeat(1 << 13)
        new = old.copy()
        new[rng.integers(0, new.size, 100_000)] += np.uint16(1)
        payload = encode(self.codec, meta, old, new, 1 << 20)
        windows = windows_of(meta, old, new, 1 << 20)
        assert _peak_bytes(self.codec.encode(meta, windows)) < meta.nbytes // 2
        assert _peak_bytes(self.codec.decode(meta, payload, old)) < meta.nbytes // 2

    @pytest.mark.parametrize("pattern", ["nothing", "some", "everything"])
    def test_a_payload_cut_short_or_too_long_is_refused(self, pattern: str) -> None:
        meta = TensorMeta("layer.weight", "BF16", (100,))
        old = random_bits(meta, 11)
        payload = encode(self.codec, meta, old, changed(old, pattern), 32)
        for damaged in (*(payload[:size] for size in range(len(payload))), payload + b"\0"):
            with pytest.raises((CodecError, FormatError), match=r"layer\.weight") as caught:
                list(self.codec.decode(meta, damaged, old))
            assert caught.value.tensor == "layer.weight"

    def test_the_payload_of_another_tensor_is_refused(self) -> None:
        meta = TensorMeta("w", "BF16", (100,))
        old = random_bits(meta, 12)
        payload = encode(self.codec, meta, old, changed(old, "everything"))
        other = TensorMeta("w", "BF16", (50,))
        with pytest.raises((CodecError, FormatError)):
            list(self.codec.decode(other, payload, old[:50]))

    def test_prediction_is_near(self) -> None:
        meta = TensorMeta("w", "BF16", (1 << 20,))
        rng = np.random.default_rng(13)
        weights = rng.standard_normal(meta.unit_count, np.float32) * np.float32(0.02)
        old = (weights.view(np.uint32) >> 16).astype(np.uint16)
        for share in (0.01, 0.03, 0.1):
            new = old + rng.choice([1, -1], old.size).astype(np.uint16) * (
                rng.random(old.size) < share
            )
            count = int(np.count_nonzero(old != new))
            found = len(encode(self.codec, meta, old, new, 1 << 20))
            assert self.codec.predict_bytes(meta, count) == pytest.approx(found, rel=0.2)

    def test_prediction_needs_no_data(self) -> None:
        for shape in SHAPES.values():
            meta = TensorMeta("w", "F64", shape)
            for count in (0, meta.unit_count):
                assert self.codec.predict_bytes(meta, count) >= 0
        huge = TensorMeta("w", "F32", (1 << 40,))
        assert self.codec.predict_bytes(huge, 1 << 38) > 1 << 30
