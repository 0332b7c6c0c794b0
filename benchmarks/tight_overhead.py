"""What keeps `tight` above the entropy: few classes, Rice codes, how steps are told, or headers?

python benchmarks/tight_overhead.py OLD NEW

Prints bits for each changed element of two checkpoints, all tensors together, and what Golomb codes with any
divisor would take in place of Rice codes.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from pathlib import Path

import numpy as np
from make_pairs import tensors_of
from numpy.typing import NDArray

from syncline import TensorMeta, codecs, kernels
from syncline.codecs import exponents
from syncline.codecs.tight import rice_bits
from syncline.types import WINDOW_UNITS, Bits, Window


def entropy_bits(counts: NDArray[np.int64]) -> float:
    """Return the entropy of as many symbols as the counts add up to, in bits."""
    some = counts[counts > 0].astype(np.float64)
    return float(-(some * np.log2(some / some.sum())).sum())


def place_bits(groups: NDArray[np.int64], is_changed: NDArray[np.bool_]) -> float:
    """Return the entropy of which units change, given the group of each."""
    members, moved = (
        np.bincount(groups),
        np.bincount(groups[is_changed], minlength=groups.max() + 1),
    )
    return sum(
        entropy_bits(np.array([some, every - some]))
        for some, every in zip(moved.tolist(), members.tolist(), strict=True)
    )


def gap_bits(is_changed: NDArray[np.bool_]) -> tuple[int, int]:
    """Return what Rice codes, and what Golomb codes of the best divisor, take for one class."""
    is_marked = ~is_changed if 2 * np.count_nonzero(is_changed) > is_changed.size else is_changed
    places = np.flatnonzero(is_marked)
    if not places.size:
        return 0, 0
    gaps = np.diff(places, prepend=-1) - 1
    low = rice_bits(is_changed.size, places.size)
    rice = int((gaps >> low).sum()) + (1 + low) * gaps.size
    share = places.size / is_changed.size
    divisor = max(1, math.ceil(-math.log(2 - share) / math.log1p(-share))) if share < 1 else 1
    width = (divisor - 1).bit_length()
    is_short = gaps % divisor < (1 << width) - divisor
    golomb = int((gaps // divisor).sum()) + (1 + width) * gaps.size - int(is_short.sum())
    return rice, golomb


def measure(name: str, old: Bits, new: Bits) -> Counter[str]:
    """Return bits of one tensor, by what they are for."""
    found: Counter[str] = Counter()
    windows = []
    for start in range(0, new.size, WINDOW_UNITS):
        before, after = old[start : start + WINDOW_UNITS], new[start : start + WINDOW_UNITS]
        windows.append(Window(start, after, *kernels.diff(before, after)))
        if not windows[-1].offsets.size:
            continue
        meta = TensorMeta(name, "BF16", old.shape)
        classes = exponents.choose(meta, windows[-1])
        exponent = (before >> 7 & 0xFF).astype(np.int64)
        group = np.clip(exponent - classes.lowest, 0, classes.count - 1)
        is_changed = before != after
        found["places, entropy given every exponent"] += place_bits(exponent, is_changed)
        found["places, entropy given the classes"] += place_bits(group, is_changed)
        steps = kernels.steps(windows[-1].old_bits, windows[-1].new_bits)
        for index in np.unique(group[is_changed]):
            rice, golomb = gap_bits(is_changed[group == index])
            found["places, as written: Rice"] += rice
            found["places, Golomb"] += golomb
            here = steps[group[is_changed] == index]
            found["steps, entropy given the classes"] += entropy_bits(
                np.unique(here, return_counts=True)[1]
            )
    size_bytes = sum(len(piece) for piece in codecs.get("tight").encode(meta, windows))
    found["payload"] = 8 * size_bytes
    found["steps and tables of classes, as written"] = (
        8 * size_bytes - found["places, as written: Rice"]
    )
    found["changes"] = sum(window.offsets.size for window in windows)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    arguments = parser.parse_args()
    total: Counter[str] = Counter()
    for name, old, new in tensors_of(arguments.old, arguments.new):
        if (old != new).any():
            total.update(measure(name, old, new))
    changes = total.pop("changes")
    print(f"{changes:,} changes; bits, and bytes, for each")
    for what, bits in total.items():
        print(f"{what:44}{bits / changes:9.4f}{bits / changes / 8:9.4f}")


if __name__ == "__main__":
    main()
