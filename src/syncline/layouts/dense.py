"""`gather` and `scatter`: move dense values through blocks, one canonical tensor at a time.

Values are bits: arrays of unsigned integers of the element's width. Nothing here holds more than one
canonical tensor beside what the caller gave it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from syncline.errors import LayoutError, VerifyError
from syncline.layouts.blocks import Block, CanonicalTensor, Layout, Run, run_of
from syncline.layouts.coverage import holders
from syncline.layouts.values import to_canonical, to_local
from syncline.types import Bits, TensorMeta, unsigned

Shard = Mapping[str, Bits]
"""What one rank holds: flat bits by local name."""


def local_view(run: Run, meta: TensorMeta, local: Bits) -> NDArray[Any]:
    """Return the elements of a block in a local tensor's flat bits, as a view, canonical order.

    Raises:
        LayoutError: the bits are too few for the block, or of another width than the tensor.
    """
    return _view(run, meta, local, run.local, run.local_strides)


def canonical_view(run: Run, meta: TensorMeta, canonical: Bits) -> NDArray[Any]:
    """Return the elements of a block in the canonical tensor's flat bits, as a view.

    Raises:
        LayoutError: as `local_view`.
    """
    return _view(run, meta, canonical, run.canonical, run.canonical_strides)


def _view(
    run: Run, meta: TensorMeta, flat: Bits, first: int, strides: Sequence[int]
) -> NDArray[Any]:
    last = first + sum((n - 1) * step for n, step in zip(run.counts, strides, strict=True))
    width = meta.unit_bytes
    if flat.ndim != 1 or flat.dtype != unsigned(width) or first < 0 or last >= flat.size:
        raise LayoutError(
            f"{run.block}: needs flat {width}-byte bits, at least {last + 1} of them; found "
            f"{flat.dtype} {flat.shape}",
            tensor=meta.name,
        )
    step = flat.strides[0]
    return as_strided(flat[first:], run.counts, tuple(s * step for s in strides))


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
            run = run_of(first, tensor.grid)
            here = local_view(run, tensor.meta, _local(shards, first_rank, first))
            canonical_view(run, tensor.meta, bits)[...] = to_canonical(here, first, tensor.meta)
            for rank, block in held[1:]:
                run = run_of(block, tensor.grid)
                here = local_view(run, tensor.meta, _local(shards, rank, block))
                value = to_canonical(here, block, tensor.meta)
                there = canonical_view(run, tensor.meta, bits)
                if not np.array_equal(there, value):
                    raise _drift(run, first_rank, rank, there != value)
        yield tensor.meta, bits


def _drift(run: Run, first_rank: int, rank: int, differs: NDArray[np.bool_]) -> VerifyError:
    wrong = np.argwhere(differs)
    places = run.canonical + wrong @ np.array(run.canonical_strides, dtype=np.int64)
    name = run.block.name
    return VerifyError(
        f"{name}: ranks {first_rank} and {rank} hold different copies; {len(wrong)} of "
        f"{run.block.count} elements differ, first at canonical indices {places[:8].tolist()}",
        tensor=name,
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
                run = run_of(block, tensor.grid)
                here = local_view(run, meta, _local(shards, rank, block))
                here[...] = to_local(canonical_view(run, meta, bits), block, meta)
    for rank, block, tensor, bits in copies:
        run = run_of(block, tensor.grid)
        here = local_view(run, tensor.meta, _local(shards, rank, block))
        there = canonical_view(run, tensor.meta, bits)
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
