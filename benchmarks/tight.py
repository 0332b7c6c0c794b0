"""How small and how fast is `tight`, against `packed`, what entropy allows, and reading the weights once?

Weights of 2^24 BF16 elements, normal with deviation 0.02, in windows of 2^22. Three pairs are one AdamW-like step
apart (`tests/weight_pairs.py`), with about 0.3, 1 and 5 % changed; in the fourth, 1 % moved by one ulp at random
places, as in case C. One thread. Bytes are whole payloads over changed elements; speeds are weights over the median
time. Prints a table, or JSON with --json.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from syncline import codecs, kernels
from syncline.kernels import _native
from syncline.types import WINDOW_UNITS, Bits, TensorMeta, Window

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from weight_pairs import optimizer_step  # noqa: E402

COUNT = 1 << 24
LEARNING_RATES = {"step 0.3 %": 2.2e-7, "step 1 %": 8e-7, "step 5 %": 5.2e-6}


def pairs(case: str) -> tuple[Bits, Bits]:
    """Return weights before and after."""
    if case in LEARNING_RATES:
        parts = [optimizer_step(1 << 22, LEARNING_RATES[case], seed) for seed in range(4)]
        return np.concatenate([old for old, _ in parts]), np.concatenate([new for _, new in parts])
    rng = np.random.default_rng(0)
    old, _ = optimizer_step(COUNT, 0)
    new = old.copy()
    places = np.unique(rng.integers(0, COUNT, COUNT // 100))
    new[places] += rng.choice(np.array([1, 0xFFFF], np.uint16), places.size)
    return old, new


def entropy_bits(counts: np.ndarray) -> float:
    """Return the entropy of as many symbols as `counts` adds up to."""
    counts = counts[counts > 0].astype(float)
    return float(-(counts * np.log2(counts / counts.sum())).sum())


def bound_bytes(old: Bits, new: Bits, groups: np.ndarray) -> float:
    """Return the entropy of places and steps, given the group of each unit, per changed unit."""
    changed = old != new
    steps = (new - old).astype(np.int16)
    total = 0.0
    for group in np.unique(groups[changed]):
        here = groups == group
        count = np.count_nonzero(changed & here)
        total += entropy_bits(np.array([count, np.count_nonzero(here) - count]))
        total += entropy_bits(np.unique(steps[changed & here], return_counts=True)[1])
    return total / 8 / np.count_nonzero(changed)


def windows(old: Bits, new: Bits) -> list[Window]:
    """Return the windows of the pair."""
    starts = range(0, old.size, WINDOW_UNITS)
    spans = [slice(start, start + WINDOW_UNITS) for start in starts]
    return [Window(at.start, new[at], *kernels.diff(old[at], new[at])) for at in spans]


def speed(
    run: Callable[[], object], nbytes: int, prepare: Callable[[], object]
) -> dict[str, float]:
    """Return median and best speed in GB/s."""
    times = []
    for _ in range(15):
        prepare()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return {
        "median": nbytes / statistics.median(times) / 1e9,
        "best": nbytes / min(times) / 1e9,
    }


def measure(case: str) -> dict[str, object]:
    """Return sizes and speeds of one pair."""
    old, new = pairs(case)
    held = old.copy()
    meta = TensorMeta("w", "BF16", old.shape)
    changed = int(np.count_nonzero(old != new))
    ready = windows(old, new)
    half = new.size // 2

    def timed(run: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> object:
        return speed(run, meta.nbytes, prepare)

    result: dict[str, object] = {
        "changed_share": changed / old.size,
        "bound_bytes_per_change": bound_bytes(old, new, np.zeros(old.size, np.uint8)),
        "bound_given_exponent": bound_bytes(old, new, old >> 7 & 0xFF),
        "read_gb_per_s": timed(lambda: _native.read_words(new[:half], new[half:])),
        "diff_gb_per_s": timed(lambda: windows(old, new)),
    }
    for name in ("tight", "packed"):
        codec = codecs.get(name)
        payload = b"".join(codec.encode(meta, ready))

        def decode_and_apply(payload: bytes = payload, codec: codecs.Codec = codec) -> None:
            for item in codec.decode(meta, payload, old):
                kernels.scatter(
                    held[item.start : item.start + WINDOW_UNITS], item.offsets, item.bits
                )

        result[name] = {
            "bytes_per_change": len(payload) / changed,
            "times_smaller": meta.nbytes / len(payload),
            "encode_gb_per_s": timed(lambda codec=codec: list(codec.encode(meta, ready))),
            "diff_encode_gb_per_s": timed(
                lambda codec=codec: list(codec.encode(meta, windows(old, new)))
            ),
            "decode_apply_gb_per_s": timed(decode_and_apply, lambda: np.copyto(held, old)),
        }
        if (held != new).any():
            raise SystemExit(f"{name} is not exact")
    return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.strip()
    cases = {case: measure(case) for case in (*LEARNING_RATES, "uniform 1 %")}
    document = {
        "commit": commit,
        "machine": platform.processor() or platform.machine(),
        "isa": _native.selected_isa(),
        "numpy": np.__version__,
        "cases": cases,
    }
    if arguments.json:
        print(json.dumps(document, indent=2))
        return
    for case, found in cases.items():
        print(f"{case}: {json.dumps(found, indent=2)}")


if __name__ == "__main__":
    main()
