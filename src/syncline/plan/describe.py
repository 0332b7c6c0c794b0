"""What a plan says, for people and for programs: load, memory, a heat map."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from syncline.errors import ConfigError
from syncline.layouts import Layout, Placement
from syncline.plan.planner import Load, Plan
from syncline.types import TensorMeta

_SHADES = " .:-=+*#%@"


def read_sizes(text: str, allowed: Mapping[str, int]) -> dict[str, int]:
    """Return sizes written as `tp=8,pp=4`, with the defaults of `allowed` for those left out.

    Raises:
        ConfigError: a word is not `name=number`, or names nothing in `allowed`.

    Example:
        >>> read_sizes("tp=8,ep=4", {"tp": 1, "pp": 1, "ep": 1})
        {'tp': 8, 'pp': 1, 'ep': 4}
    """
    sizes = dict(allowed)
    for word in filter(None, text.split(",")):
        name, _, number = word.partition("=")
        if name not in allowed or not number.isdigit():
            raise ConfigError(f"{word!r} is not NAME=NUMBER with a name of {sorted(allowed)}")
        sizes[name] = int(number)
    return sizes


def summary(plan: Plan, load: Load, source: Layout, target: Layout) -> dict[str, Any]:
    """Return the figures of a plan, as JSON would have it; sizes in bytes.

    `peak_bytes` is the most that a rank of either side needs, its own shard and its largest bucket together;
    `tightest` is the rank that needs it.
    """
    sent, received = load.sent_bytes, load.received_bytes
    source_bytes = np.array([held_bytes(placement) for placement in source.placements])
    target_bytes = np.array([held_bytes(placement) for placement in target.placements])
    sides = {"source": source_bytes, "target": target_bytes}
    side = max(sides, key=lambda key: int(sides[key].max()))
    return {
        "digest": plan.digest,
        "tensors": len(target.catalog),
        "model_bytes": sum(tensor.meta.nbytes for tensor in target.catalog.values()),
        "engines": plan.engines,
        "buckets": len(plan.buckets),
        "moved_bytes": load.moved_bytes,
        "repeated_bytes": load.repeated_bytes,
        "staged_bytes": load.staged_bytes,
        "sent_bytes": _spread(sent),
        "received_bytes": _spread(received),
        "links": int(np.count_nonzero(load.links)),
        "link_bytes_max": int(load.links.max()),
        "peak_bytes": {key: int(held.max()) + load.staged_bytes for key, held in sides.items()},
        "tightest": {
            "side": side,
            "rank": int(sides[side].argmax()),
            "bytes": int(sides[side].max()) + load.staged_bytes,
        },
    }


def held_bytes(placement: Placement) -> int:
    """Return the size of what a rank holds, padding included."""
    return sum(
        prod(tensor.shape) * TensorMeta(tensor.name, tensor.dtype, ()).unit_bytes
        for tensor in placement.tensors
    )


def _spread(values: NDArray[np.int64]) -> dict[str, int]:
    return {"min": int(values.min()), "mean": int(values.mean()), "max": int(values.max())}


def heat_map(load: Load, rows: int = 16, columns: int = 64) -> str:
    """Return bytes from source ranks (down) to engine ranks (across) as shades, one line for each row.

    Ranks are summed where there are more than rows or columns.

    Example:
        >>> print(heat_map(Load(np.array([[0, 5], [10, 10]]), 25, 0, 0), rows=2, columns=2))
         +
        @@
    """
    cells = _cells(load, rows, columns)
    top = max(int(cells.max()), 1)
    # Rounded up: a cell with any bytes is never blank.
    shades = -(-cells * (len(_SHADES) - 1) // top)
    return "\n".join("".join(_SHADES[shade] for shade in line).rstrip() for line in shades)


def legend(load: Load, write: Callable[[float], str], rows: int = 16, columns: int = 64) -> str:
    """Return what the shades of a heat map mean, and how many ranks one of its cells stands for.

    Args:
        write: writes a number of bytes.
        rows, columns: as for `heat_map`.

    Example:
        >>> load = Load(np.array([[0, 5], [10, 10]]), 25, 0, 0)
        >>> legend(load, "{:.0f} B".format, rows=2, columns=2)
        'blank: nothing; . to @: up to 1 B to 10 B; a cell is 1 x 1 rank(s)'
    """
    cells = _cells(load, rows, columns)
    top, steps = int(cells.max()), len(_SHADES) - 1
    down, across = (
        -(-ranks // shown) for ranks, shown in zip(load.links.shape, cells.shape, strict=True)
    )
    first, last = _SHADES[1], _SHADES[-1]
    return (
        f"blank: nothing; {first} to {last}: up to {write(top // steps)} to {write(top)}; "
        f"a cell is {'up to ' if down * across > 1 else ''}{down} x {across} rank(s)"
    )


def _cells(load: Load, rows: int, columns: int) -> NDArray[np.int64]:
    return _summed(_summed(load.links, rows).T, columns).T


def _summed(links: NDArray[np.int64], lines: int) -> NDArray[np.int64]:
    """Return the rows added up in at most so many groups of neighbours."""
    edges = np.unique(np.linspace(0, len(links), min(lines, len(links)) + 1).astype(int))[:-1]
    return np.add.reduceat(links, edges, axis=0)
