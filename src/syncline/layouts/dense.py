"""`gather` and `scatter`: move dense values through blocks, one canonical tensor at a time.

Values are bits: arrays of unsigned integers of the element's width. Nothing here holds more than one
canonical tensor beside what the caller gave it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from syncline.errors import LayoutError, VerifyError
from syncline.layouts.blocks import Block, CanonicalTensor, Layout, run_of
from syncline.layouts.coverage import holders
from syncline.layouts.values import to_canonical, to_local
from syncline.types import Bits, TensorMeta, unsigned

Shard = Mapping[str, Bits]
"""What one rank holds: flat bits by local name."""


def views(
    block: Block, tensor: CanonicalTensor, canonical: Bits, local: Bits
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the block's elements as two views of one shape: in the canonical tensor, in the local one.

    Raises:
        LayoutError: the arrays are too short for the block, or of another width than the tensor.

    Cost: O(axes). Aliasing: both are writable views of writable arguments.
    """
    run = run_of(block, tensor.grid)
    width = tensor.meta.unit_bytes
    found = []
    for flat, first, strides in (
        (canonical, run.canonical, run.canonical_strides),
        (local, run.local, run.local_strides),
    ):
        last = first + sum((n - 1) * step for n, step in zip(run.counts, strides, strict=True))
        if flat.ndim != 1 or flat.itemsize != width or first < 0 or last >= flat.size:
            raise LayoutError(
                f"{block}: needs a flat array of {width}-byte bits, at least {last + 1} of them; found "
                f"{flat.dtype} {flat.shape}",
                tensor=block.name,
            )
        step = flat.strides[0]
        found.append(as_strided(flat[first:], run.counts, tuple(s * step for s in strides)))
    return found[0], found[1]


def gather(layout: Layout, shards: Mapping[int, Shard]) -> Iterator[tuple[TensorMeta, Bits]]:
    """Yield every canonical tensor of a layout, put together from the shards of all ranks.

    Every copy that several ranks hold is compared with the first.

    Args:
        shards: by rank, flat bits by local name.
    Raises:
        VerifyError: copies differ; names the ranks, and the first elements.
        LayoutError: a rank or a local tensor is missing, or does not fit its blocks.

    Cost: one pass over the shards. Memory: one canonical tensor; the caller may keep it.
    """
    for name, boxes in holders(layout).items():
        tensor = layout.catalog[name]
        bits = np.empty(tensor.meta.unit_count, unsigned(tensor.meta.unit_bytes))
        for held in boxes.values():
            first_rank, first = held[0]
            there, here = views(first, tensor, bits, _local(shards, first_rank, first))
            there[...] = to_canonical(here, first, tensor.meta)
            for rank, block in held[1:]:
                there, here = views(block, tensor, bits, _local(shards, rank, block))
                value = to_canonical(here, block, tensor.meta)
                if not np.array_equal(there, value):
                    raise _drift(block, tensor, first_rank, rank, there, value)
        yield tensor.meta, bits


def _drift(
    block: Block,
    tensor: CanonicalTensor,
    first_rank: int,
    rank: int,
    there: NDArray[Any],
    value: NDArray[Any],
) -> VerifyError:
    wrong = np.argwhere(there != value)
    run = run_of(block, tensor.grid)
    places = (wrong @ np.array(run.canonical_strides, dtype=np.int64)) + run.canonical
    return VerifyError(
        f"{block.name}: ranks {first_rank} and {rank} hold different copies; {len(wrong)} of "
        f"{block.count} elements differ, first at canonical indices {places[:8].tolist()}",
        tensor=block.name,
    )


def scatter(
    layout: Layout, tensors: Iterable[tuple[TensorMeta, Bits]], shards: Mapping[int, Shard]
) -> None:
    """Write canonical tensors into the shards of the given ranks; other ranks are left out.

    A stored copy of another tensor (`Block.is_alias`) is compared with what stands there instead, once
    all tensors are in.

    Raises:
        LayoutError: a tensor is unknown or of another shape or dtype, or a shard does not fit its blocks.
        VerifyError: a stored copy is not equal to its original.

    Cost: one pass over the shards. Memory: the stored copies, until the end.
    """
    held = holders(layout)
    copies: list[tuple[int, Block, CanonicalTensor, Bits]] = []
    for meta, bits in tensors:
        tensor = layout.catalog.get(meta.name)
        if tensor is None or tensor.meta != meta:
            found = "nothing" if tensor is None else tensor.meta
            raise LayoutError(f"the layout has {found}, given {meta}", tensor=meta.name)
        for boxes in held[meta.name].values():
            for rank, block in boxes:
                if rank not in shards:
                    continue
                if block.is_alias:
                    copies.append((rank, block, tensor, bits))
                    continue
                there, here = views(block, tensor, bits, _local(shards, rank, block))
                here[...] = to_local(there, block, meta)
    for rank, block, tensor, bits in copies:
        there, here = views(block, tensor, bits, _local(shards, rank, block))
        if not np.array_equal(here, to_local(there, block, tensor.meta)):
            raise VerifyError(
                f"{block.name} is stored as a copy of what is in {block.local}, but its bits differ; use a "
                "checkpoint in which they agree",
                tensor=block.name,
            )


def _local(shards: Mapping[int, Shard], rank: int, block: Block) -> Bits:
    try:
        return shards[rank][block.local]
    except KeyError as error:
        raise LayoutError(
            f"{block}: rank {rank} gave no {block.local!r}", tensor=block.name
        ) from error
