"""How near are scatter and gather to what this machine can do with scattered places, and to plain torch?

64 Mi BF16 units (128 MiB, more than the caches hold), places at several densities: ascending in windows, as changes
come, and in random order over everything, which nothing in Syncline does. Two roofs, each measured in turns with the
kernels: a bare loop in C that writes (or reads) at the same places and does nothing else, compiled here; and reading
every cache line that has a place once, at the speed of the machine's best read. torch's `index_put_` and
`index_select` get their int64 places for nothing. One thread; fastest of fifteen: what else runs hits a median by chance. Prints JSON.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import machine

from syncline import kernels
from syncline.kernels import _native
from syncline.types import WINDOW_UNITS

COUNT = 16 * WINDOW_UNITS
LINE_BYTES = 64
ROUNDS = 15
LOOPS = """
#include <stddef.h>
#include <stdint.h>
void write_at(uint16_t* units, const uint32_t* places, size_t count) {
  for (size_t i = 0; i < count; ++i) units[places[i]] = (uint16_t)i;
}
uint64_t read_at(const uint16_t* units, const uint32_t* places, size_t count) {
  uint64_t sum = 0;
  for (size_t i = 0; i < count; ++i) sum += units[places[i]];
  return sum;
}
"""

Act = Callable[[], object]


def compiled() -> ctypes.CDLL:
    """Return the loops, compiled for this processor."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise SystemExit("the roofs need a C compiler (cc); install one")
    with tempfile.TemporaryDirectory() as directory:
        library = Path(directory) / "loops.so"
        command = [compiler, "-O3", "-march=native", "-shared", "-fPIC", "-x", "c", "-"]
        subprocess.run([*command, "-o", library], input=LOOPS.encode(), check=True)
        return ctypes.CDLL(str(library))


def loop(function: Any, units: np.ndarray, places: np.ndarray) -> Act:
    """Return a call of one of the loops; it keeps the arrays."""
    return lambda: function(
        ctypes.c_void_p(units.ctypes.data),
        ctypes.c_void_p(places.ctypes.data),
        ctypes.c_size_t(places.size),
    )


def windowed(call: Callable[[int, slice], object], places: np.ndarray) -> Act:
    """Return a call for every window that has places: its first unit, and which places are its."""
    bounds = np.searchsorted(places, np.arange(0, COUNT + 1, WINDOW_UNITS))
    cuts = [slice(int(low), int(high)) for low, high in pairwise(bounds)]

    def act() -> None:
        for index, cut in enumerate(cuts):
            call(index * WINDOW_UNITS, cut)

    return act


def ours(
    units: np.ndarray, places: np.ndarray, bits: np.ndarray, ascending: bool
) -> dict[str, Act]:
    """Return scatter and gather: window by window, or all at once where the order is random."""
    if not ascending:
        return {
            "scatter": lambda: kernels.scatter(units, places, bits),
            "gather": lambda: kernels.gather(units, places),
        }
    offsets = (places % WINDOW_UNITS).astype(np.uint32)

    def scatter(start: int, cut: slice) -> None:
        kernels.scatter(units[start : start + WINDOW_UNITS], offsets[cut], bits[cut])

    def gather(start: int, cut: slice) -> object:
        return kernels.gather(units[start : start + WINDOW_UNITS], offsets[cut])

    return {"scatter": windowed(scatter, places), "gather": windowed(gather, places)}


def in_torch(units: np.ndarray, places: np.ndarray, bits: np.ndarray) -> dict[str, Act]:
    """Return the same in torch, on the same memory."""
    target = torch.from_numpy(units.view(np.int16))
    index, values = torch.from_numpy(places.astype(np.int64)), torch.from_numpy(bits.view(np.int16))
    return {
        "scatter": lambda: target.index_put_((index,), values),
        "gather": lambda: torch.index_select(target, 0, index),
    }


def measure(loops: ctypes.CDLL, density: float, ascending: bool) -> dict[str, Any]:
    """Return nanoseconds a place and shares of the roofs."""
    rng = np.random.default_rng(0)
    units = rng.integers(0, 1 << 16, COUNT, np.uint16)
    places = np.unique(rng.integers(0, COUNT, int(COUNT * density))).astype(np.uint32)
    lines = np.unique(places // (LINE_BYTES // 2)).size
    if not ascending:
        rng.shuffle(places)
    bits = units[places] + np.uint16(1)
    half = COUNT // 2
    acts = {
        "read everything": lambda: kernels.read_words(units[:half], units[half:]),
        "write loop": loop(loops.write_at, units.copy(), places),
        "read loop": loop(loops.read_at, units, places),
        **{f"{name}, ours": act for name, act in ours(units, places, bits, ascending).items()},
        **{f"{name}, torch": act for name, act in in_torch(units, places, bits).items()},
    }
    times: dict[str, list[float]] = {name: [] for name in acts}
    for _ in range(ROUNDS):
        for name, act in acts.items():
            start_s = time.perf_counter()
            act()
            times[name].append(time.perf_counter() - start_s)
    fastest_s = {name: min(taken) for name, taken in times.items()}
    lines_s = fastest_s["read everything"] * lines * LINE_BYTES / units.nbytes
    result: dict[str, Any] = {
        "density": density,
        "ascending": ascending,
        "places": places.size,
        "lines_roof_ns": 1e9 * lines_s / places.size,
        "ns_a_place": {name: 1e9 * taken / places.size for name, taken in fastest_s.items()},
    }
    for name, roof in (("scatter", "write loop"), ("gather", "read loop")):
        mine = fastest_s[f"{name}, ours"]
        result[name] = {
            "of_loop": fastest_s[roof] / mine,
            "of_lines": lines_s / mine,
            "times_torch": fastest_s[f"{name}, torch"] / mine,
        }
    return result


def main() -> None:
    """Print every figure as JSON."""
    torch.set_num_threads(1)
    loops = compiled()
    document = {
        **machine(),
        "isa": _native.selected_isa(),
        "cases": [
            measure(loops, density, ascending)
            for density, ascending in ((0.003, True), (0.01, True), (0.05, True), (0.01, False))
        ],
    }
    print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
