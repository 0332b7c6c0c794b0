"""Every kernel against this machine's own memory, and against plain torch operations doing the same work."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from syncline import kernels
from syncline.bench.torch_rivals import TorchRivals
from syncline.types import WINDOW_UNITS, Bits

_WINDOWS = 16
_ROUNDS = 9

Act = Callable[[], object]


@dataclass(frozen=True, slots=True)
class KernelFigures:
    """One kernel on one thread.

    Attributes:
        name: kernel and what it worked on.
        nbytes: memory that it has to touch.
        seconds: median; `fastest_s`: the fastest run; `spread_s`: slowest less fastest.
        roof_s: what nothing but reading as many bytes in two streams takes; the fastest run, measured in
            turns with the kernel.
        torch_s: fastest run of the same work as plain torch operations; None without torch, or where
            torch has none.

    Shares are of fastest runs: what else runs on the machine hits each median by chance.
    """

    name: str
    nbytes: int
    seconds: float
    fastest_s: float
    spread_s: float
    roof_s: float
    torch_s: float | None

    @property
    def bytes_per_s(self) -> float:
        """Bytes touched a second."""
        return self.nbytes / self.seconds

    @property
    def of_roof(self) -> float:
        """Share of the machine's read speed, 0 to 1."""
        return self.roof_s / self.fastest_s

    @property
    def times_torch(self) -> float | None:
        """How many times faster than torch."""
        return None if self.torch_s is None else self.torch_s / self.fastest_s


def bench_kernels(density: float = 0.01, seed: int = 0) -> tuple[float, list[KernelFigures]]:
    """Measure the kernels on 64 Mi BF16 elements in windows, `density` of them changed by one ulp.

    Returns:
        the read roof in bytes a second (the fastest read of two streams by the native loop, or by numpy
        where that is not built), and the figures.
    """
    work = _Work(density, seed)
    rivals = TorchRivals(work.old, work.new, work.places) if find_spec("torch") else None
    figures, fastest_s = [], float("inf")
    for name, nbytes, act, in_torch in _cases(work, rivals):
        taken = _measure(work, act, in_torch)
        fastest_s = min(fastest_s, *taken["read"])
        figures.append(
            KernelFigures(
                name,
                nbytes,
                statistics.median(taken["kernel"]),
                min(taken["kernel"]),
                max(taken["kernel"]) - min(taken["kernel"]),
                min(taken["read"]) * nbytes / work.read_bytes,
                min(taken["torch"], default=None),
            )
        )
    return work.read_bytes / fastest_s, figures


class _Work:
    """Old and new bits, a scratch copy of the old, and what the kernels make of each window."""

    def __init__(self, density: float, seed: int) -> None:
        rng = np.random.default_rng(seed)
        count = _WINDOWS * WINDOW_UNITS
        self.old = rng.integers(0, 1 << 16, count, np.uint16)
        self.new = self.old.copy()
        self.places: NDArray[np.int64] = np.unique(rng.integers(0, count, int(count * density)))
        self.new[self.places] += 1
        self.scratch = self.old.copy()
        self.windows = [slice(at, at + WINDOW_UNITS) for at in range(0, count, WINDOW_UNITS)]
        self.changes = [kernels.diff(self.old[w], self.new[w]) for w in self.windows]
        self.gaps = [kernels.encode_gaps(offsets, 0) for offsets, _, _ in self.changes]
        self.seeds = kernels.seeds("bench")
        self.read_bytes = self.old.nbytes + self.new.nbytes

    def each(self, call: Callable[[Bits, Bits, Bits], object]) -> Act:
        """Return a call for every window with its old, new and scratch bits."""
        views = [(self.old[w], self.new[w], self.scratch[w]) for w in self.windows]
        return _all_of(call, views)

    def each_change(self, call: Callable[..., object]) -> Act:
        """Return a call for every window with its scratch bits and its changes."""
        views = [(self.scratch[w], *c) for w, c in zip(self.windows, self.changes, strict=True)]
        return _all_of(call, views)


def _all_of(call: Callable[..., object], views: list[Any]) -> Act:
    """Return a call for every view; like a publisher, it lets go of a window's results at once."""

    def act() -> None:
        for view in views:
            call(*view)

    return act


def _cases(work: _Work, rivals: TorchRivals | None) -> Iterator[tuple[str, int, Act, Act | None]]:
    """Yield name, bytes touched, the kernel's work and torch's."""
    dense, listed, gaps = work.old.nbytes, 8 * work.places.size, 5 * work.places.size
    seeds = work.seeds

    def rival(name: str) -> Any:
        return None if rivals is None else getattr(rivals, name)

    yield "memcpy", 2 * dense, work.each(lambda _, new, to: np.copyto(to, new)), rival("copy")
    diff = work.each(lambda old, new, _: kernels.diff(old, new))
    yield "diff and compact", 2 * dense, diff, rival("diff")
    refresh = work.each(lambda _, new, to: kernels.diff(to, new, refresh=True))
    yield "diff, compact and refresh", 2 * dense, refresh, rival("diff_and_refresh")
    fingerprint = work.each(lambda _, new, __: kernels.fingerprint(new, 0, seeds))
    yield "fingerprint of everything", dense, fingerprint, rival("fingerprint")
    change = work.each_change(
        lambda _, offsets, old, new: kernels.fingerprint_change(0, offsets, old, new, seeds)
    )
    yield "fingerprint of changes", listed, change, None
    scatter = work.each_change(lambda to, offsets, _, bits: kernels.scatter(to, offsets, bits))
    yield "scatter", listed, scatter, rival("scatter")
    gather = work.each_change(lambda at, offsets, *_: kernels.gather(at, offsets))
    yield "gather", listed, gather, rival("gather")
    yield "xor", 3 * dense, work.each(lambda old, new, _: kernels.xor(old, new)), rival("xor")
    encode = work.each_change(lambda _, offsets, *__: kernels.encode_gaps(offsets, 0))
    yield "gaps, encode", gaps, encode, None
    counted = [(*g, c[0].size) for g, c in zip(work.gaps, work.changes, strict=True)]
    decode = _all_of(
        lambda low, high, count: kernels.decode_gaps(low, high, count, WINDOW_UNITS), counted
    )
    yield "gaps, decode", gaps, decode, None


def _measure(work: _Work, act: Act, in_torch: Act | None) -> dict[str, list[float]]:
    """Return the seconds of reads, of the kernel and of torch, taken in turns."""
    taken: dict[str, list[float]] = {"read": [], "kernel": [], "torch": []}
    for _ in range(_ROUNDS):
        for name, timed in (("kernel", act), ("torch", in_torch)):
            if timed is None:
                continue
            np.copyto(work.scratch, work.old)
            taken["read"].append(_seconds(lambda: kernels.read_words(work.old, work.new)))
            taken[name].append(_seconds(timed))
    return taken


def _seconds(act: Act) -> float:
    start_s = time.perf_counter()
    act()
    return time.perf_counter() - start_s
