"""Every kernel against this machine's own memory, and against plain torch operations doing the same work."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from syncline import kernels
from syncline.types import WINDOW_UNITS, Bits

_WINDOWS = 16
_RUNS = 7


@dataclass(frozen=True, slots=True)
class KernelFigures:
    """One kernel on one thread.

    Attributes:
        name: kernel and what it worked on.
        nbytes: memory that it has to touch.
        seconds: median; `spread_s`: slowest less fastest run.
        roof_s: what reading (or, for scatter and gather, nothing but touching) these bytes takes at best.
        torch_s: median of the same work as plain torch operations; None without torch, or where torch has
            none.
    """

    name: str
    nbytes: int
    seconds: float
    spread_s: float
    roof_s: float
    torch_s: float | None

    @property
    def bytes_per_s(self) -> float:
        """Bytes touched a second."""
        return self.nbytes / self.seconds

    @property
    def of_roof(self) -> float:
        """Share of the machine's best read speed, 0 to 1."""
        return self.roof_s / self.seconds

    @property
    def times_torch(self) -> float | None:
        """How many times faster than torch."""
        return None if self.torch_s is None else self.torch_s / self.seconds


def bench_kernels(density: float = 0.01, seed: int = 0) -> tuple[float, list[KernelFigures]]:
    """Measure the kernels on 64 Mi BF16 elements in windows, `density` of them changed by one ulp.

    Returns:
        the read roof in bytes a second (the fastest read of two streams by the native loop, or by numpy
        where that is not built), and the figures.
    """
    rng = np.random.default_rng(seed)
    count = _WINDOWS * WINDOW_UNITS
    old = rng.integers(0, 1 << 16, count, np.uint16)
    new = old.copy()
    places = np.unique(rng.integers(0, count, int(count * density)))
    new[places] += 1
    roof = 2 * old.nbytes / min(_times(lambda: kernels.read_words(old, new)))
    windows = [slice(at, at + WINDOW_UNITS) for at in range(0, count, WINDOW_UNITS)]
    changes = [kernels.diff(old[w], new[w]) for w in windows]
    gaps = [kernels.encode_gaps(offsets, 0) for offsets, _, _ in changes]
    seeds = kernels.seeds("bench")
    work = old.copy()
    torch = _TorchWork(old, new, places) if find_spec("torch") else None
    listed_bytes = 8 * places.size

    def scatter() -> None:
        for window, (offsets, _, bits) in zip(windows, changes, strict=True):
            kernels.scatter(work[window], offsets, bits)

    cases: list[tuple[str, int, Callable[[], object], Callable[[], object] | None]] = [
        (
            "diff and compact",
            2 * old.nbytes,
            lambda: [kernels.diff(old[w], new[w]) for w in windows],
            torch.diff if torch else None,
        ),
        (
            "diff, compact and refresh",
            2 * old.nbytes,
            lambda: [kernels.diff(work[w], new[w], refresh=True) for w in windows],
            torch.diff_and_refresh if torch else None,
        ),
        (
            "fingerprint of everything",
            old.nbytes,
            lambda: kernels.fingerprint(new, 0, seeds),
            None,
        ),
        (
            "fingerprint of changes",
            listed_bytes,
            lambda: [kernels.fingerprint_change(0, *change, seeds) for change in changes],
            None,
        ),
        (
            "scatter",
            listed_bytes,
            scatter,
            torch.scatter if torch else None,
        ),
        (
            "gather",
            listed_bytes,
            lambda: [
                kernels.gather(work[w], offsets)
                for w, (offsets, _, _) in zip(windows, changes, strict=True)
            ],
            torch.gather if torch else None,
        ),
        ("xor", 3 * old.nbytes, lambda: kernels.xor(old, new), torch.xor if torch else None),
        (
            "gaps, encode",
            5 * places.size,
            lambda: [kernels.encode_gaps(offsets, 0) for offsets, _, _ in changes],
            None,
        ),
        (
            "gaps, decode",
            5 * places.size,
            lambda: [
                kernels.decode_gaps(*gap, change[0].size, WINDOW_UNITS)
                for gap, change in zip(gaps, changes, strict=True)
            ],
            None,
        ),
    ]
    return roof, [_figures(*case, roof, lambda: np.copyto(work, old)) for case in cases]


def _figures(
    name: str,
    nbytes: int,
    call: Callable[[], object],
    in_torch: Callable[[], object] | None,
    roof: float,
    reset: Callable[[], object],
) -> KernelFigures:
    times = _times(call, reset)
    torch_s = None if in_torch is None else statistics.median(_times(in_torch))
    spread_s = max(times) - min(times)
    return KernelFigures(name, nbytes, statistics.median(times), spread_s, nbytes / roof, torch_s)


def _times(call: Callable[[], object], reset: Callable[[], object] | None = None) -> list[float]:
    times = []
    for _ in range(_RUNS):
        if reset is not None:
            reset()
        start_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - start_s)
    return times


class _TorchWork:
    """The same work with plain torch operations, on one thread, as a rival."""

    def __init__(self, old: Bits, new: Bits, places: Any) -> None:
        import torch

        torch.set_num_threads(1)
        self._torch = torch
        self._old = torch.from_numpy(old.view(np.int16))
        self._new = torch.from_numpy(new.view(np.int16))
        self._snapshot = self._old.clone()
        self._places = torch.from_numpy(places)
        self._values = self._new[self._places]

    def diff(self) -> object:
        places = (self._old != self._new).nonzero().squeeze(1)
        return places.to(self._torch.int32), self._old[places], self._new[places]

    def diff_and_refresh(self) -> object:
        found = self.diff()
        self._snapshot.copy_(self._new)
        return found

    def scatter(self) -> object:
        return self._snapshot.index_copy_(0, self._places, self._values)

    def gather(self) -> object:
        return self._snapshot[self._places]

    def xor(self) -> object:
        return self._old ^ self._new
