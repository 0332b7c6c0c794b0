"""What does the hook detector add to a training step, what does it keep in memory, and what does it save at a publish?

Three ways to train about 67 M weights, 16 matrices of 2048 by 2048, with AdamW and gradients that are random:

- `masters`: the optimizer steps FP32 masters, which are then rounded into BF16 weights inside `writing()`;
- `fp32`: the weights are FP32 and are published in BF16 (`watch(..., dtype=torch.bfloat16)`);
- `bf16`: the weights are BF16, and the optimizer writes them (foreach, fused, and one by one).

In each, a watched model and an unwatched one step in turns, so that both see the same machine; then the watched one is
published by the hook and the other by a snapshot. Times in the table are medians of the processor's; JSON (--json) has the
clock's as well. Memory is what the detector says that it holds, against the bytes of the weights as published.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import numpy as np
import torch
from machine import machine

import syncline
from syncline.sources import WatchedWeights

SIDE, MATRICES = 2048, 16
CASES = {
    "masters": {"fused": True},
    "fp32": {"fused": True},
    "bf16 foreach": {"foreach": True},
    "bf16 fused": {"fused": True},
    "bf16 one by one": {"foreach": False},
}
LEARNING_RATE = {"masters": 1e-6, "fp32": 1e-6, "bf16": 2e-6}


class Run:
    """Weights, what steps them, and a publisher that has published once."""

    def __init__(self, case: str, learning_rate: float) -> None:
        generator = torch.Generator().manual_seed(0)
        kind = case.split(maxsplit=1)[0]
        wide = [
            torch.empty(SIDE, SIDE).normal_(0, 0.02, generator=generator) for _ in range(MATRICES)
        ]
        self.working = [weight.bfloat16() for weight in wide] if kind != "fp32" else wide
        self.stepped = self.working
        if kind == "masters":
            # Anywhere in their rounding cell, as after many steps.
            self.stepped = [
                weight.float() * (1 + (torch.rand(SIDE, SIDE, generator=generator) - 0.5) * 2**-8)
                for weight in self.working
            ]
        self.optimizer = torch.optim.AdamW(self.stepped, lr=learning_rate, **CASES[case])
        for weight in self.stepped:
            weight.grad = torch.empty_like(weight).normal_(0, 1, generator=generator)
        self.dtype = torch.bfloat16 if kind == "fp32" else None
        self.named = {f"w{i:02}": weight for i, weight in enumerate(self.working)}
        self.publisher = syncline.Publisher(syncline.MemoryStore(), anchor_every=None)
        self.writing: Callable[[], AbstractContextManager[None]] = nullcontext

    def step(self) -> None:
        """Step once, and round masters into the working weights."""
        self.optimizer.step()
        if self.stepped is not self.working:
            with self.writing():
                for weight, master in zip(self.working, self.stepped, strict=True):
                    weight.copy_(master)

    def published(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what a snapshot publisher is given."""
        for name, weight in self.named.items():
            yield name, weight if self.dtype is None else weight.to(self.dtype)

    def watch(self, compare: str, check: str) -> WatchedWeights:
        """See what is written from now on."""
        # Masters are no weights: only the copy from them is watched.
        optimizers = [self.optimizer] if self.stepped is self.working else []
        weights = syncline.watch(
            optimizers, self.named, dtype=self.dtype, compare=compare, check=check
        )
        self.writing = weights.writing
        return weights


Result = TypeVar("Result")
Times = list[tuple[float, float]]


def timed(call: Callable[[], Result]) -> tuple[Result, tuple[float, float]]:
    """Return the result, and the seconds on the clock and of the processor, which others do not lengthen."""
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    result = call()
    return result, (time.perf_counter() - start_s, time.process_time() - start_cpu_s)


def summary(times: Times) -> dict[str, float]:
    """Return medians and best."""
    clock, cpu = zip(*times, strict=True)
    return {
        "median_s": statistics.median(clock),
        "best_s": min(clock),
        "cpu_median_s": statistics.median(cpu),
        "cpu_best_s": min(cpu),
    }


def measure(case: str, compare: str, check: str, rounds: int) -> dict[str, object]:
    """Return times and memory of one way to train."""
    learning_rate = LEARNING_RATE[case.split(maxsplit=1)[0]]
    plain, watched = Run(case, learning_rate), Run(case, learning_rate)
    weights = watched.watch(compare, check)
    plain.publisher.publish(plain.published())
    watched.publisher.publish(weights)
    times: dict[str, Times] = {"plain": [], "watched": [], "hook": [], "snapshot": []}
    kept_bytes, densities = [], []
    for _ in range(rounds + 1):
        times["plain"].append(timed(plain.step)[1])
        times["watched"].append(timed(watched.step)[1])
        kept_bytes.append(weights.memory_bytes)
        ours, took_s = timed(lambda: watched.publisher.publish(weights))
        times["hook"].append(took_s)
        theirs, took_s = timed(lambda: plain.publisher.publish(plain.published()))
        times["snapshot"].append(took_s)
        if (ours.changed, ours.payload_bytes) != (theirs.changed, theirs.payload_bytes):
            raise SystemExit(f"{case}: hook and snapshot disagree")
        densities.append(ours.density)
    # The first round warms up.
    found = {name: summary(some[1:]) for name, some in times.items()}
    snapshot_bytes = ours.full_bytes
    return {
        "case": case,
        "compare": compare,
        "check": check,
        "density": statistics.median(densities),
        "step": {"plain": found["plain"], "watched": found["watched"]},
        "publish": {"hook": found["hook"], "snapshot": found["snapshot"]},
        "added_to_step_cpu_s": found["watched"]["cpu_median_s"] - found["plain"]["cpu_median_s"],
        "snapshot_bytes": snapshot_bytes,
        "kept_bytes": max(kept_bytes),
        "kept_share": max(kept_bytes) / snapshot_bytes,
        "peak_copy_bytes": weights.peak_copy_bytes,
    }


def kept_when_skipping(publish_every: int, steps: int) -> dict[str, float]:
    """Return how much is kept when only every so many steps are published."""
    run = Run("masters", LEARNING_RATE["masters"])
    weights = run.watch("operations", "full")
    run.publisher.publish(weights)
    kept, densities = [], []
    for step in range(1, steps + 1):
        run.step()
        kept.append(weights.memory_bytes)
        if step % publish_every == 0:
            densities.append(run.publisher.publish(weights).density)
    nbytes = sum(weight.nbytes for weight in run.working)
    return {
        "publish_every": publish_every,
        "density": statistics.median(densities),
        "kept_share_at_most": max(kept) / nbytes,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    os.environ["SYNCLINE_THREADS"] = str(arguments.threads)
    rows = [measure(case, "operations", "full", arguments.rounds) for case in CASES]
    rows.append(measure("masters", "operations", "sampled", arguments.rounds))
    rows.append(measure("bf16 fused", "step", "full", arguments.rounds))
    skipped = [kept_when_skipping(every, 2 * every) for every in (1, 4, 16)]
    document = {
        **machine(),
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "numpy": np.__version__,
        "torch": torch.__version__,
        "weights": SIDE * SIDE * MATRICES,
        "rows": rows,
        "skipped": skipped,
    }
    if arguments.json:
        print(json.dumps(document, indent=2))
        return
    print(
        f"{'case':17}{'compare':11}{'check':8} changed   step ms  + ms   publish ms (snapshot)  kept"
    )
    for row in rows:
        step, publish = row["step"], row["publish"]
        print(
            f"{row['case']:17}{row['compare']:11}{row['check']:8}{row['density']:8.2%}"
            f"{step['plain']['cpu_median_s'] * 1e3:10.0f}{row['added_to_step_cpu_s'] * 1e3:+6.0f}"
            f"{publish['hook']['cpu_median_s'] * 1e3:13.0f}"
            f" ({publish['snapshot']['cpu_median_s'] * 1e3:.0f})"
            f"{row['kept_share']:18.1%}, in a step {row['peak_copy_bytes'] >> 20} MiB"
        )
    for row in skipped:
        print(row)


if __name__ == "__main__":
    main()
