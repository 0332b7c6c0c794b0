"""What one core of a machine takes for the work on a version; measured in a fraction of a second, or recorded."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from syncline import codecs, kernels
from syncline.codecs.choice import DELTAS
from syncline.errors import ConfigError
from syncline.types import Bits, TensorMeta, Window

_UNITS = 1 << 22
_COPIES = 8
"""So much more than fits a cache is what passes over memory are timed on."""

_RUNS = 3
_SHARES = (0.01, 0.04)


@dataclass(frozen=True, slots=True)
class Coding:
    """What one encoding takes: seconds for each unit of a tensor, and for each that changed.

    Attributes:
        size_ratio: payload against what `Codec.predict_bytes` says, which takes changes to lie anywhere
            alike: weights out of RL are better for `tight` than that.
    """

    name: str
    encode_unit_s: float
    encode_change_s: float
    decode_unit_s: float
    decode_change_s: float
    size_ratio: float = 1.0


@dataclass(frozen=True, slots=True)
class Machine:
    """What work on weights takes on one core.

    Attributes:
        copy_bytes_per_s: memory to memory.
        find_bytes_per_s: weights compared with a copy, and their changes collected.
        prove_bytes_per_s: weights compared and fingerprinted by an engine that gets all of them.
        digest_bytes_per_s: SHA-256.
        change_s: an engine's write of one changed unit, kept for undoing and read back.
        pause_s: for which an engine stands still beside its writes: to stop, flush and go on.
        codings: the delta encodings to choose from.
        origin: `recorded`, `given`, or when and where it was measured.
    """

    copy_bytes_per_s: float
    find_bytes_per_s: float
    prove_bytes_per_s: float
    digest_bytes_per_s: float
    change_s: float
    pause_s: float
    codings: tuple[Coding, ...]
    origin: str = "given"

    def __post_init__(self) -> None:
        for name in ("copy", "find", "prove", "digest"):
            if not getattr(self, f"{name}_bytes_per_s") > 0:
                raise ConfigError(f"machine: {name}_bytes_per_s must be above 0")
        if not self.codings:
            raise ConfigError("machine: codings: expected at least one delta encoding")


REFERENCE = Machine(
    copy_bytes_per_s=2.0e10,
    find_bytes_per_s=1.3e10,
    prove_bytes_per_s=9e9,
    digest_bytes_per_s=2.0e9,
    change_s=3.7e-9,
    pause_s=0.0,
    codings=(
        Coding("indices", 0.0, 0.4e-9, 0.0, 0.3e-9),
        Coding("packed", 0.01e-9, 2.4e-9, 0.03e-9, 3.2e-9),
        Coding("tight", 0.17e-9, 9.5e-9, 0.16e-9, 10e-9, size_ratio=0.72),
    ),
    origin="recorded",
)
"""One core of an EPYC with AVX-512, by `measure_machine`; the sizes on weights out of RL."""


def measure_machine(pause_s: float = 0.0) -> Machine:
    """Return what this machine takes, on one thread. Cost: about a second, 300 MB of memory.

    Args:
        pause_s: see `Machine`; nothing here can measure what an engine takes to stop.
    """
    rng = np.random.default_rng(0)
    wide = rng.standard_normal(_UNITS, np.float32) * np.float32(0.02)
    old = (wide.view(np.uint32) >> 16).astype(np.uint16)
    few, many = (_changed(rng, old, share) for share in _SHARES)
    offsets, _, new_bits = kernels.diff(old, few)
    before, after, engine = (np.tile(bits, _COPIES) for bits in (old, few, old))
    seeds = kernels.seeds("machine")

    def write() -> None:
        kernels.gather(engine, offsets)
        kernels.scatter(engine, offsets, new_bits)
        kernels.gather(engine, offsets)

    def prove() -> None:
        kernels.diff(before, after)
        kernels.fingerprint(after, 0, seeds)

    find_s = _least_s(lambda: kernels.diff_and_fingerprint(before, after, 0, seeds))
    return Machine(
        copy_bytes_per_s=before.nbytes / _least_s(lambda: np.copyto(engine, before)),
        find_bytes_per_s=before.nbytes / find_s,
        prove_bytes_per_s=before.nbytes / _least_s(prove),
        digest_bytes_per_s=old.nbytes / _least_s(lambda: hashlib.sha256(old.data)),
        change_s=_least_s(write) / offsets.size,
        pause_s=pause_s,
        codings=tuple(_coding(name, old, few, many) for name in DELTAS),
        origin="measured here, one thread",
    )


def _changed(rng: np.random.Generator, old: Bits, share: float) -> Bits:
    new = old.copy()
    places = rng.choice(old.size, int(share * old.size), replace=False)
    new[places] += rng.integers(0, 2, places.size, np.uint16) * 2 - 1
    return new


def _coding(name: str, old: Bits, few: Bits, many: Bits) -> Coding:
    """Measure one encoding at two densities, and tell the cost of a unit from that of a change."""
    meta = TensorMeta("machine", "BF16", (_UNITS,))
    codec = codecs.get(name)
    counts, encode_s, decode_s = [], [], []
    for new in (few, many):
        window = Window(0, new, *kernels.diff(old, new))
        payload = b"".join(codec.encode(meta, [window]))
        counts.append(window.offsets.size)
        encode_s.append(_least_s(lambda window=window: list(codec.encode(meta, [window]))))  # type: ignore[misc]
        decode_s.append(_least_s(lambda payload=payload: list(codec.decode(meta, payload, old))))  # type: ignore[misc]
    ratio = next(c.size_ratio for c in REFERENCE.codings if c.name == name)
    return Coding(name, *_line(counts, encode_s), *_line(counts, decode_s), ratio)


def _line(counts: list[int], seconds: list[float]) -> tuple[float, float]:
    """Return seconds a unit and a change, neither below 0."""
    slope = max(0.0, (seconds[1] - seconds[0]) / (counts[1] - counts[0]))
    return max(0.0, seconds[0] - slope * counts[0]) / _UNITS, slope


def _least_s(call: Callable[[], object]) -> float:
    times = []
    for _ in range(_RUNS):
        start_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - start_s)
    return min(times)
