"""A device, how work on it is timed, and what it can do at most; used by gpu.py."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from syncline.kernels import gpu

READ_BLOCK = 4096


@dataclass(frozen=True, slots=True)
class Figure:
    """One thing that was timed.

    Attributes:
        nbytes: memory, or link, that it has to touch.
        roof: which roof that is compared with; None: this is one, or no roof says anything.
    """

    name: str
    nbytes: int
    median_s: float
    fastest_s: float
    spread_s: float
    roof: str | None = None
    of_roof: float | None = None


@triton.jit
def read_all(words, sums, BLOCK: tl.constexpr):
    """Read one block of 64-bit words and write one: a loop that does nothing but read."""
    block = tl.program_id(0).to(tl.int64)
    tl.store(sums + block, tl.sum(tl.load(words + block * BLOCK + tl.arange(0, BLOCK)), axis=0))


class Machine:
    """Where it runs, how it is timed, and the roofs found so far."""

    def __init__(self, place: str, units: int, runs: int) -> None:
        self.device = torch.device(place)
        self.is_real = place == "cuda"
        self.units = units
        self.runs = runs
        self.figures: list[Figure] = []
        self.roofs: dict[str, float] = {}

    def finish(self) -> None:
        """Wait for the device."""
        if self.is_real:
            torch.cuda.synchronize()

    def time(
        self,
        name: str,
        nbytes: int,
        act: Callable[[], object],
        *,
        roof: str | None = None,
        before: Callable[[], object] = lambda: None,
    ) -> None:
        """Time an act from its call to the device's being done, launches included; note the figure."""
        taken = []
        for _ in range(self.runs + 1):
            before()
            self.finish()
            start_s = time.perf_counter()
            act()
            self.finish()
            taken.append(time.perf_counter() - start_s)
        del taken[0]  # it compiled the kernels and made room
        fastest_s = min(taken)
        share = None if roof is None else nbytes / fastest_s / self.roofs[roof]
        if roof is None:
            self.roofs[name] = nbytes / fastest_s
        median_s = statistics.median(taken)
        spread_s = max(taken) - fastest_s
        self.figures.append(Figure(name, nbytes, median_s, fastest_s, spread_s, roof, share))
        rate = "" if share is None else f", {share:6.1%} of {roof}"
        print(
            f"{name:34} {fastest_s * 1e3:9.3f} ms {nbytes / fastest_s / 1e9:8.1f} GB/s{rate}",
            file=sys.stderr,
        )

    def random_bits(self, count: int, dtype: Any) -> Any:
        """Return bits on the device."""
        nbytes = count * torch.empty(0, dtype=dtype).element_size()
        return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=self.device).view(dtype)


def measure_roofs(machine: Machine) -> None:
    """Time plain copies and reads on the device, and transfers."""
    nbytes = machine.units * 4
    words = machine.random_bits(nbytes // 8, torch.int64)
    other = torch.empty_like(words)
    machine.time("device copy", 2 * nbytes, lambda: other.copy_(words))
    blocks = words.numel() // READ_BLOCK or 1
    block = min(READ_BLOCK, words.numel())
    sums = torch.empty(blocks, dtype=torch.int64, device=machine.device)
    machine.time("device read", nbytes, lambda: gpu.run(read_all, blocks, words, sums, BLOCK=block))
    check("device read", np.array([sums.sum().item()]), np.array([words.sum().item()]))
    some = words[: len(words) // 2]
    for kind, is_pinned in (("pinned", machine.is_real), ("pageable", False)):
        host = torch.empty(len(some), dtype=torch.int64, pin_memory=is_pinned)
        machine.time(f"to host, {kind}", some.nbytes, lambda host=host: host.copy_(some))
        machine.time(f"to device, {kind}", some.nbytes, lambda host=host: some.copy_(host))


def check(name: str, found: Any, wanted: Any) -> None:
    if not np.array_equal(found, wanted):
        raise SystemExit(f"{name}: the device's result is not the right one")
