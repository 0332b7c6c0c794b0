"""How much memory do publish and pull take beside the snapshot and the engine, and does it grow with the model?

Weights, snapshot and engine lie in mapped files, so the anonymous memory of the process, above what it had once
everything was imported, is all that the library takes: batches at work and the bucket, which is a part of up to 64 MiB.
`resume` is a publisher's first publish, which also makes the snapshot from the store. One process a figure. Prints a
table, or JSON with --json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Self

import numpy as np
from machine import machine
from safetensors.numpy import save_file

from syncline import CheckpointDir, CheckpointSource, FilesystemStore, Publisher, Receiver

SIZES_MIB = (256, 1024, 2048)
TENSOR_MIB = 64
DENSITY = 0.01
LOOK_EVERY_S = 0.002


def anonymous_bytes() -> int:
    """Return what the process holds of memory that is in no file."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


class Peak:
    """Watches the anonymous memory while it runs; `extra_bytes` is the most above the beginning."""

    def __enter__(self) -> Self:
        self._start_bytes = self._worst_bytes = anonymous_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def extra_bytes(self) -> int:
        """The most above what there was at the beginning."""
        return self._worst_bytes - self._start_bytes

    def _watch(self) -> None:
        while not self._stop.wait(LOOK_EVERY_S):
            self._worst_bytes = max(self._worst_bytes, anonymous_bytes())


def make(root: Path, size_mib: int) -> None:
    """Write two checkpoints, publish the first, and let an engine take it."""
    rng = np.random.default_rng(0)
    units = (TENSOR_MIB << 20) // 2
    weights = {
        f"layer.{index}": rng.integers(0, 60000, units, np.uint16)
        for index in range(size_mib // TENSOR_MIB)
    }
    for name in ("old", "new"):
        (root / name).mkdir()
        save_file(weights, root / name / "model.safetensors")
        for bits in weights.values():
            bits[rng.integers(0, units, int(units * DENSITY))] += 1
    store = FilesystemStore(root / "store")
    Publisher(store, snapshot_dir=root).publish(CheckpointSource(root / "old"))
    Receiver(store, CheckpointDir(root / "engine")).sync()


def run(job: str, root: Path, encoding: str) -> int:
    """Do one job in this process and return the memory that it took."""
    store = FilesystemStore(root / "store")
    if job == "pull":
        with Peak() as peak:
            Receiver(store, CheckpointDir(root / "engine")).sync()
        return peak.extra_bytes
    with Peak() as resuming:
        publisher = Publisher(store, encoding=encoding, snapshot_dir=root / "snapshot")
        publisher.publish(CheckpointSource(root / "new"))
    with Peak() as publishing:
        publisher.publish(CheckpointSource(root / "old"))
    return (resuming if job == "resume" else publishing).extra_bytes


def in_child(*arguments: str) -> str:
    """Run this script again in a process of its own and return what it prints."""
    command = [sys.executable, __file__, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> None:
    """Measure every size, or do the one step that a parent asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--encoding", default="auto")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--step", nargs=2, metavar=("JOB", "DIRECTORY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.step is not None:
        job, directory = arguments.step
        root = Path(directory)
        if job.startswith("make"):
            make(root, int(job.removeprefix("make")))
        else:
            print(run(job, root, arguments.encoding))
        return
    rows = []
    for size_mib in SIZES_MIB:
        with tempfile.TemporaryDirectory(prefix="syncline-bench-") as directory:
            in_child("--step", f"make{size_mib}", directory)
            row: dict[str, float] = {"model_mib": size_mib}
            for job in ("resume", "publish", "pull"):
                found = in_child("--encoding", arguments.encoding, "--step", job, directory)
                row[f"{job}_extra_mib"] = round(int(found) / 2**20, 1)
            rows.append(row)
    result = {**machine(), "encoding": arguments.encoding, "density": DENSITY, "rows": rows}
    if arguments.json:
        print(json.dumps(result))
        return
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
