"""Placements written out element by element, so that they can be compared however their blocks are cut."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from syncline.layouts import Block, Placement
from syncline.layouts.blocks import Catalog, run_of

Places = dict[str, dict[str, NDArray[np.int64]]]
"""By canonical name and local name, where each canonical element lies; -1: nowhere."""


def places_of(catalog: Catalog, placement: Placement) -> Places:
    found: Places = {}
    for block in placement.blocks:
        tensor = catalog[block.name]
        run = run_of(block, tensor.grid)
        canonical = np.full(run.counts, run.canonical, np.int64)
        local = np.full(run.counts, run.local, np.int64)
        for axis, count in enumerate(run.counts):
            steps = np.arange(count).reshape(
                [-1 if i == axis else 1 for i in range(len(run.counts))]
            )
            canonical += steps * run.canonical_strides[axis]
            local += steps * run.local_strides[axis]
        of_name = found.setdefault(block.name, {})
        where = of_name.setdefault(block.local, np.full(tensor.meta.count, -1, np.int64))
        where[canonical.ravel()] = local.ravel()
    return found


def differences(learned: Places, table: Places) -> list[str]:
    """Say what a learned placement and a table's do not have in common; nothing if they agree."""
    found = []
    for name in sorted(learned.keys() | table.keys()):
        ours, theirs = learned.get(name, {}), table.get(name, {})
        if ours.keys() != theirs.keys():
            found.append(f"{name}: learned in {sorted(ours)}, by the table in {sorted(theirs)}")
            continue
        for local, where in ours.items():
            wrong = np.count_nonzero(where != theirs[local])
            if wrong:
                found.append(f"{name} in {local}: {wrong} of {where.size} elements lie elsewhere")
    return found


def placement_of(answer: dict[str, Any], rank: int) -> Placement:
    """What a worker said of its placement, as blocks; its local tensors are left out."""
    blocks = tuple(
        Block(name, tuple(start), tuple(shape), local, offset, tuple(strides), is_alias=is_alias)
        for name, start, shape, local, offset, strides, is_alias in answer["blocks"]
    )
    return Placement(rank, (), blocks)
