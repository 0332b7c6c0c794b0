"""Do predictions put the ways in the order in which they are measured? Several ways, densities and speeds of a store.

Everything in one process: an engine in a thread, a store in memory that is as slow as asked for. For every case: the median
seconds from the call of `publish` until the engine holds the version, and what `predict` says for this machine, which is
measured in the same run. Prints JSON, or writes it with --out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine

from syncline import MemoryEngine, MemoryStore, Publisher, Receiver
from syncline.abc import Buffer, WeightSource
from syncline.channels import SharedMemoryInlet, SharedMemoryOutlet
from syncline.choice import MATRIX, Density, Link, Links, Topology, measure_machine, predict
from syncline.types import Bits, TensorMeta

SPEEDS = (2e6, 20e6, 200e6)
SHARES = (0.002, 0.01, 0.2)
UNITS = 16 << 20
WAIT_S = 300.0


class Model(WeightSource):
    """One BF16 tensor; every step moves some elements by one ulp."""

    is_stable = True

    def __init__(self) -> None:
        self._rng = np.random.default_rng(1)
        wide = self._rng.standard_normal(UNITS, np.float32) * np.float32(0.02)
        self._bits = (wide.view(np.uint32) >> 16).astype(np.uint16)

    def step(self, share: float) -> None:
        """Change a share of the elements."""
        places = self._rng.choice(UNITS, int(share * UNITS), replace=False)
        self._bits[places] += self._rng.integers(0, 2, places.size, np.uint16) * 2 - 1

    def tensors(self) -> Iterator[tuple[TensorMeta, Bits]]:
        """Yield the tensor."""
        yield TensorMeta("w", "BF16", (UNITS,)), self._bits


class SlowStore(MemoryStore):
    """A store in memory behind a link, which is quick until a speed is set."""

    bytes_per_s = math.inf

    def put(self, key: str, chunks: Iterable[Buffer]) -> None:
        super().put(key, self._slowly(chunks))

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        data = super().get(key, start, stop)
        time.sleep(len(data) / self.bytes_per_s)
        return data

    def _slowly(self, chunks: Iterable[Buffer]) -> Iterator[Buffer]:
        for chunk in chunks:
            time.sleep(memoryview(chunk).nbytes / self.bytes_per_s)
            yield chunk


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    here = measure_machine()
    cases = []
    for share in SHARES:
        cases += [_case("apart", "delta", share, at, options.runs, here) for at in SPEEDS]
        cases.append(_case("apart", "full", share, SPEEDS[-1], options.runs, here))
        cases.append(_case("colocated", "full", share, SPEEDS[-1], options.runs, here))
    report = {
        "machine": machine(),
        "load_average": os.getloadavg(),
        "costs": asdict(here),
        "cases": cases,
    }
    text = json.dumps(report, indent=1)
    if options.out is None:
        print(text)
    else:
        options.out.write_text(text + "\n")


def _case(
    place: str, kind: str, share: float, speed: float, runs: int, here: Any
) -> dict[str, Any]:
    topology = Topology(colocated=place == "colocated")
    row = next(row for row in MATRIX if (row.place, row.kind) == (place, kind))
    density = Density(2 * UNITS, share)
    found = predict(row, topology, density, Links(store=Link.of(speed)), here)
    model, seconds = Model(), []
    with tempfile.TemporaryDirectory() as folder:
        store = SlowStore()
        outlet = SharedMemoryOutlet(f"{folder}/path") if place == "colocated" else None
        coding = "packed" if found.encoding is None else found.encoding
        publisher = Publisher(store, live=outlet, encoding=coding, anchor_every=None)
        inlet = None if outlet is None else SharedMemoryInlet(f"{folder}/path", name="engine")
        receiver = Receiver(store if inlet is None else inlet, MemoryEngine())
        for _ in range(runs + 1):
            seconds.append(_once(publisher, receiver, model, outlet, full=kind == "full"))
            model.step(share)
            store.bytes_per_s = speed  # the first version, which warms up, came at once
        if outlet is not None and inlet is not None:
            inlet.close()
            outlet.close()
    return {
        "place": place,
        "kind": kind,
        "share": share,
        "store_bytes_per_s": speed,
        "encoding": found.encoding,
        "measured_s": statistics.median(seconds[1:]),
        "predicted": asdict(found.terms),
    }


def _once(
    publisher: Publisher,
    receiver: Receiver,
    model: Model,
    outlet: SharedMemoryOutlet | None,
    *,
    full: bool,
) -> float:
    """Publish once and return the seconds until the engine has it."""
    if outlet is None:
        start_s = time.perf_counter()
        publisher.publish(model, full=full)
        receiver.sync()
        return time.perf_counter() - start_s
    taking = threading.Thread(target=receiver.sync)
    taking.start()
    outlet.wait(1, WAIT_S)
    start_s = time.perf_counter()
    report = publisher.publish(model)
    taking.join()
    if report.delivery is None:
        raise RuntimeError("nothing was delivered")
    report.delivery.require()
    return time.perf_counter() - start_s


if __name__ == "__main__":
    main()
