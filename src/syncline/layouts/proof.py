"""`fingerprint`: what a rank's memory holds, in canonical terms; and which rank answers for what.

Fingerprints of the ranks of `once(layout)` add up to those of the canonical tensors: nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from syncline import kernels
from syncline.errors import LayoutError
from syncline.layouts.blocks import Block, CanonicalTensor, Catalog, Layout, Placement, Run, run_of
from syncline.layouts.coverage import holders
from syncline.layouts.dense import Shard, local_view
from syncline.layouts.values import to_canonical
from syncline.types import ZERO, Bits, Fingerprint

_ROW = 1024
_CHUNK = 1 << 20


def once(layout: Layout) -> Layout:
    """Return a layout in which every canonical element is named by one rank, of those that hold it.

    A box that several ranks hold is answered for by the one with the fewest bytes so far, the lowest
    first. What a rank no longer answers for is left out of its blocks; its tensors stay. So `check` holds
    for the canonical side of the result only.
    """
    answers: dict[int, list[Block]] = {placement.rank: [] for placement in layout.placements}
    load = dict.fromkeys(answers, 0)
    for name, boxes in holders(layout).items():
        itemsize = layout.catalog[name].meta.unit_bytes
        for held in boxes.values():
            rank, block = min(held, key=lambda pair: (load[pair[0]], pair[0]))
            load[rank] += block.count * itemsize
            answers[rank].append(replace(block, copies=1))
    return Layout(
        layout.catalog,
        tuple(
            Placement(placement.rank, placement.tensors, tuple(answers[placement.rank]))
            for placement in layout.placements
        ),
    )


def fingerprint(catalog: Catalog, placement: Placement, shard: Shard) -> dict[str, Fingerprint]:
    """Return by canonical name the fingerprint of the elements that a rank holds.

    Args:
        shard: the rank's flat bits by local name.

    Raises:
        LayoutError: a local tensor is missing or does not fit its blocks.

    Cost: one pass over the named elements. Memory: O(1 Mi elements).
    """
    found: dict[str, Fingerprint] = {}
    for block in placement.blocks:
        if block.local not in shard:
            raise LayoutError(
                f"{block}: rank {placement.rank} gave no {block.local!r}", tensor=block.name
            )
        value = block_fingerprint(block, catalog[block.name], shard[block.local])
        found[block.name] = found.get(block.name, ZERO) + value
    return found


def block_fingerprint(block: Block, tensor: CanonicalTensor, local: Bits) -> Fingerprint:
    """Return the fingerprint of the canonical elements of one block."""
    seeds, total = kernels.seeds(block.name), ZERO
    for start, values, strides in _stretches(block, tensor, local):
        bits = np.ascontiguousarray(to_canonical(values, block, tensor.meta)).ravel()
        if strides in ((), (1,)):
            total += kernels.fingerprint(bits, start, seeds)
            continue
        offsets = np.zeros((), dtype=np.uint32)
        for count, stride in zip(values.shape, strides, strict=True):
            steps = np.arange(0, count * stride, stride, dtype=np.uint32)
            offsets = np.add.outer(offsets, steps)
        # From nothing but zeros, which add nothing, to these bits.
        total += kernels.fingerprint_change(
            start, offsets.ravel(), np.zeros_like(bits), bits, seeds
        )
    return total


def _stretches(
    block: Block, tensor: CanonicalTensor, local: Bits
) -> Iterator[tuple[int, NDArray[Any], tuple[int, ...]]]:
    """Yield (first canonical index, values, canonical strides) of parts of a block.

    A part is one contiguous row where rows are long, else as many rows as make a chunk.
    """
    run = run_of(block, tensor.grid)
    view = local_view(run, tensor.meta, local)
    inner = len(run.counts)
    if inner and run.canonical_strides[-1] == 1 and run.counts[-1] >= _ROW:
        inner -= 1
    else:
        while (
            inner and prod(run.counts[inner - 1 :]) <= _CHUNK and _reach(run, inner - 1) < 1 << 32
        ):
            inner -= 1
    for index in product(*(range(count) for count in run.counts[:inner])):
        moved = sum(i * s for i, s in zip(index, run.canonical_strides, strict=False))
        yield run.canonical + moved, view[index], run.canonical_strides[inner:]


def _reach(run: Run, axis: int) -> int:
    """Return how many canonical elements the axes from this one on reach over."""
    return run.counts[axis] * run.canonical_strides[axis]
