"""Every codec on one synthetic tensor: size against the bound, time against the machine's own reads."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from syncline import codecs, kernels
from syncline.errors import CodecError
from syncline.types import WINDOW_UNITS, Bits, Span, TensorMeta, Window

_UNITS = 32 << 20
_RUNS = 5


@dataclass(frozen=True, slots=True)
class CodecFigures:
    """One codec on the benchmark's tensor.

    Attributes:
        payload_bytes: what it makes; `bound_bytes`: the least for places without structure and steps of
            one ulp either way.
        encode_s, decode_s: median seconds, the comparison with the base and the write into the engine
            included.
        full_bytes: of the tensor.
    """

    name: str
    payload_bytes: int
    bound_bytes: float
    full_bytes: int
    encode_s: float
    decode_s: float

    @property
    def encode_bytes_per_s(self) -> float:
        """Weights encoded a second."""
        return self.full_bytes / self.encode_s

    @property
    def decode_bytes_per_s(self) -> float:
        """Weights brought up to date a second."""
        return self.full_bytes / self.decode_s


def bench_codecs(density: float = 0.01, seed: int = 0) -> list[CodecFigures]:
    """Measure every codec on a BF16 tensor of 32 Mi elements, `density` of them moved by one ulp.

    Raises:
        CodecError: a codec's result was not the new bits (which would be a defect).
    """
    rng = np.random.default_rng(seed)
    meta = TensorMeta("bench.weight", "BF16", (_UNITS,))
    wide = rng.standard_normal(_UNITS, np.float32) * np.float32(0.02)
    old = (wide.view(np.uint32) >> 16).astype(np.uint16)
    new = old.copy()
    places = rng.choice(_UNITS, int(_UNITS * density), replace=False)
    new[places] += rng.integers(0, 2, places.size, np.uint16) * 2 - 1
    bound_bytes = (_UNITS * _entropy_bits(density) + places.size) / 8
    return [_measure(name, meta, old, new, bound_bytes) for name in codecs.NAMES]


def _measure(name: str, meta: TensorMeta, old: Bits, new: Bits, bound_bytes: float) -> CodecFigures:
    codec = codecs.get(name)
    snapshot = old.copy()
    payload = b""

    def encode() -> None:
        nonlocal payload
        payload = b"".join(bytes(piece) for piece in codec.encode(meta, _windows(snapshot, new)))

    engine = old.copy()

    def decode() -> None:
        for piece in codec.decode(meta, payload, engine):
            if isinstance(piece, Span):
                engine[piece.start : piece.start + piece.bits.size] = piece.bits
            else:
                kernels.scatter(engine[piece.start :], piece.offsets, piece.bits)

    encode_s = _median_s(encode, lambda: np.copyto(snapshot, old))
    decode_s = _median_s(decode, lambda: np.copyto(engine, old))
    if not np.array_equal(engine, new):
        raise CodecError(f"{name}: the benchmark's tensor did not come back bit for bit")
    return CodecFigures(name, len(payload), bound_bytes, meta.nbytes, encode_s, decode_s)


def _windows(snapshot: Bits, new: Bits) -> Iterator[Window]:
    for start in range(0, new.size, WINDOW_UNITS):
        window = new[start : start + WINDOW_UNITS]
        changes = kernels.diff(snapshot[start : start + WINDOW_UNITS], window, refresh=True)
        yield Window(start, window, *changes)


def _median_s(call: Callable[[], None], reset: Callable[[], None]) -> float:
    times = []
    for _ in range(_RUNS):
        reset()
        start_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - start_s)
    return statistics.median(times)


def _entropy_bits(p: float) -> float:
    """Return the entropy of one element that changes with probability `p`, in bits."""
    return 0.0 if p in (0.0, 1.0) else -p * math.log2(p) - (1 - p) * math.log2(1 - p)
