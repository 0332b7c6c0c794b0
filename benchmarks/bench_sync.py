"""What does a whole sync cost, against writing and reading the full weights through the same store?

Case: 256,406,528 BF16 parameters in 128 tensors (14 Llama-style layers, hidden size 1024, vocabulary 64,000), 1 %
of the elements of each tensor moved by one ulp at random places. Prints a table, or JSON with --json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from case_c import shapes
from machine import machine

import syncline
from syncline import config
from syncline.abc import WeightSource
from syncline.types import Bits, TensorMeta

PIECE_BYTES = 8 << 20


class CaseSource(WeightSource):
    """The case's weights; `step` moves the given share of them by one ulp."""

    is_stable = True

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self.weights: dict[str, tuple[TensorMeta, Bits]] = {}
        for name, shape in shapes():
            meta = TensorMeta(name, "BF16", shape)
            wide = self._rng.standard_normal(meta.count, np.float32) * np.float32(0.02)
            bits = (wide.view(np.uint32) >> 16).astype(np.uint16)
            self.weights[name] = (meta, bits)

    def step(self, share: float) -> None:
        """Move this share of each tensor's elements by one ulp."""
        for meta, bits in self.weights.values():
            count = max(1, round(meta.count * share))
            places = np.unique(self._rng.integers(0, meta.count, count))
            bits[places] += self._rng.integers(0, 2, places.size, np.uint16) * 2 - 1

    def tensors(self) -> Iterator[tuple[TensorMeta, Bits]]:
        """Yield the weights."""
        yield from self.weights.values()


def full_copy_s(
    store: syncline.FilesystemStore, source: CaseSource, key: str
) -> tuple[float, float]:
    """Return the seconds of writing, and of reading and hashing, the weights as one object."""
    start_s = time.perf_counter()
    store.put(key, (memoryview(bits).cast("B") for _, bits in source.tensors()))
    written_s = time.perf_counter()
    total_bytes = sum(meta.nbytes for meta, _ in source.tensors())
    digest = hashlib.sha256()
    for at in range(0, total_bytes, PIECE_BYTES):
        digest.update(store.get(key, at, min(at + PIECE_BYTES, total_bytes)))
    return written_s - start_s, time.perf_counter() - written_s


def read_roof_bytes_per_s(source: CaseSource) -> float:
    """Return how fast numpy sums the weights: a simple figure for memory reads on one thread."""
    _, bits = max(source.tensors(), key=lambda item: item[0].nbytes)
    words = bits[: bits.size // 4 * 4].view(np.uint64)
    best_s = min(_seconds(lambda: np.bitwise_xor.reduce(words)) for _ in range(5))
    return words.nbytes / best_s


def _seconds(call: object) -> float:
    start_s = time.perf_counter()
    call()  # type: ignore[operator]
    return time.perf_counter() - start_s


def main() -> None:
    """Run the case and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--encoding", default="auto")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="syncline-bench-"))
    try:
        result = run(directory, arguments.runs, arguments.density, arguments.encoding)
    finally:
        shutil.rmtree(directory)
    if arguments.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:28} {value}")


def run(directory: Path, runs: int, density: float, encoding: str) -> dict[str, object]:
    """Return medians over `runs` syncs."""
    source = CaseSource()
    store = syncline.FilesystemStore(directory / "run")
    publisher = syncline.Publisher(store, encoding=encoding)
    publisher.publish(source)
    engine = syncline.MemoryEngine()
    receiver = syncline.Receiver(store, engine)
    receiver.sync()
    published, applied, full = [], [], []
    for _ in range(runs):
        source.step(density)
        published.append(publisher.publish(source))
        applied.append(receiver.sync())
    # Not in turn with the syncs: half a gigabyte that is freed keeps the kernel busy for seconds.
    for number in range(runs):
        plain = syncline.FilesystemStore(directory / f"full{number}")
        plain.compare_and_swap("HEAD.json", None, b"{}")
        full.append(full_copy_s(plain, source, "weights"))
        shutil.rmtree(directory / f"full{number}")
    for name, (_, bits) in source.weights.items():
        if not np.array_equal(engine.view(name), bits):
            raise SystemExit(f"{name} differs")

    def median(rows: list[dict[str, float]]) -> dict[str, float]:
        return {
            key: round(statistics.median(row.get(key, 0.0) for row in rows), 4)
            for key in sorted({key for row in rows for key in row})
        }

    publish = median([dict(report.seconds) for report in published])
    sync = median([dict(report.seconds) for report in applied])
    full_s = statistics.median(w + r for w, r in full)
    sync_s = publish["total"] + sync["total"]
    last = published[-1]
    return {
        **machine(),
        "threads": config.threads(),
        "parameters": last.total,
        "changed": last.changed,
        "payload_bytes": last.payload_bytes,
        "times_smaller": round(last.full_bytes / last.payload_bytes, 1),
        "publish_s": publish,
        "sync_s": sync,
        "publish_and_sync_s": round(sync_s, 4),
        "full_write_and_read_s": round(full_s, 4),
        "times_faster_than_full": round(full_s / sync_s, 2),
        "numpy_read_bytes_per_s": round(read_roof_bytes_per_s(source)),
    }


if __name__ == "__main__":
    main()
