"""An engine's placement, learned from what its own loader copies: no table has to be kept in step with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from math import prod
from typing import TYPE_CHECKING, Any

from syncline.engines.learned.boxes import block_of
from syncline.errors import LayoutError
from syncline.layouts.blocks import (
    Block,
    Catalog,
    Layout,
    LocalTensor,
    Placement,
    names,
    overlap,
    plain,
)
from syncline.layouts.coverage import holders, local_boxes
from syncline.layouts.grids import common_grid, refine
from syncline.types import TensorMeta

if TYPE_CHECKING:
    from syncline.engines.learned.memories import Memories
    from syncline.engines.learned.notes import Overwritten, Recording, Region
    from syncline.engines.learned.recording import Load


@dataclass(frozen=True)
class Learned:
    """What one worker holds of a checkpoint, and what could not be found out.

    Attributes:
        layout: the checkpoint's tensors, and one placement: this worker's.
        unmapped: by canonical name of a tensor that is loaded in a way that cannot be followed: why.
        absent: canonical names that the loader drops here: another worker's, or nobody's.
        partial: canonical names of which this worker holds some elements and not others.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 2, bias=False)
        >>> def load(weights):
        ...     for name, tensor in weights:
        ...         model.weight.data[:1].copy_(tensor)
        >>> learned = learn(load, [TensorMeta("w", "F32", (1, 3))], dict(model.named_parameters()))
        >>> print(learned.layout.placements[0])
        rank 0
          w[0:1, 0:3] = weight@0 strides (0, 1)
    """

    layout: Layout
    unmapped: Mapping[str, str]
    absent: tuple[str, ...]
    partial: tuple[str, ...]

    @property
    def placement(self) -> Placement:
        """What the worker holds."""
        return self.layout.placements[0]

    def __str__(self) -> str:
        mapped = len({block.name for block in self.placement.blocks})
        head = (
            f"{mapped} of {len(self.layout.catalog)} tensors mapped, {len(self.partial)} of them in "
            f"part; {len(self.absent)} not held; {len(self.unmapped)} not mapped"
        )
        return "\n".join([head, *(f"  {name}: {why}" for name, why in self.unmapped.items())])


def learn(
    load: Load,
    metas: Iterable[TensorMeta],
    live: Mapping[str, Any] | Memories,
    *,
    rank: int = 0,
) -> Learned:
    """Watch a model's loader once and return where it puts every element; nothing is written.

    Args:
        load: the model's `load_weights`; it is handed tensors without storage, and must not keep them.
        metas: every tensor of the checkpoint.
        live: every parameter and buffer by name, tied ones under each of their names
            (`named_parameters(remove_duplicate=False)` and the same of buffers). They may be on the meta
            device: what is learned is where they would be loaded.
        rank: of the placement.

    A local tensor of the placement is one torch storage, under the name of the first live tensor in it.

    Raises:
        LayoutError: the loader fails before it draws a tensor, or replaces live tensors.
        VerifyError: the loader wrote live memory; load the model again.

    Cost: the loader's own work without its copies, and two readings of live memory.
    """
    memories = live if not isinstance(live, Mapping) else _memories(live)
    listed = {meta.name: meta for meta in metas}
    recording = import_module("syncline.engines.learned.recording").record(
        load, listed.values(), memories
    )
    return _learned(recording, listed, memories, rank)


def _memories(live: Mapping[str, Any]) -> Memories:
    made: Memories = import_module("syncline.engines.learned.memories").Memories(live)
    return made


def _learned(
    recording: Recording, metas: Mapping[str, TensorMeta], memories: Memories, rank: int
) -> Learned:
    unmapped = dict(recording.reasons)
    regions: dict[str, list[Region]] = {}
    for region in dict.fromkeys(recording.regions):
        for other in recording.overwritten:
            if other.local == region.local and _meets(region, other):
                unmapped.setdefault(region.name, f"{region.local} is also written by {other.by}")
        regions.setdefault(region.name, []).append(region)
    grids: dict[str, tuple[int, ...]] = {}
    blocks: dict[str, list[Block]] = {}
    for name in [name for name in regions if name not in unmapped]:
        try:
            grids[name], blocks[name] = _blocks(regions[name], metas[name])
        except LayoutError as error:
            unmapped[name] = str(error)
    locals_ = {memory.name: memory.local for memory in memories}
    blocks = _without_conflicts(blocks, locals_, unmapped)
    catalog = {
        name: replace(plain(meta), grid=grids.get(name, meta.shape))
        for name, meta in metas.items()
        if name not in unmapped
    }
    flat = tuple(block for found in blocks.values() for block in found)
    placement = Placement(rank, _padded(locals_.values(), flat), flat)
    layout = _counted(catalog, (placement,))
    return Learned(
        layout,
        unmapped,
        tuple(name for name in catalog if name not in blocks),
        tuple(
            name
            for name, boxes in holders(layout).items()
            if boxes and sum(prod(shape) for _, shape in boxes) != metas[name].count
        ),
    )


def _blocks(regions: Sequence[Region], meta: TensorMeta) -> tuple[tuple[int, ...], list[Block]]:
    """Return one grid for all copies of a tensor, and their blocks in it.

    Raises:
        LayoutError: a copy is no box, or two of them share some of their elements.
    """
    found = [block_of(region, meta) for region in regions]
    grid = meta.shape
    for own, _ in found:
        grid = common_grid(meta.name, grid, own)
    blocks = [part for own, block in found for part in refine(block, own, grid)]
    boxes = list(dict.fromkeys(block.box for block in blocks))
    by_start = sorted(boxes)
    for i, one in enumerate(by_start):
        for other in by_start[i + 1 :]:
            if other[0][:1] >= tuple(a + n for a, n in zip(one[0][:1], one[1][:1], strict=True)):
                break
            if overlap(one, other) is not None:
                raise LayoutError("its loader copies parts that share elements", tensor=meta.name)
    return grid, blocks


def _meets(region: Region, other: Overwritten) -> bool:
    last = region.place + sum((n - 1) * s for n, s in zip(region.shape, region.steps, strict=True))
    return region.place <= other.last and other.first <= last


def _without_conflicts(
    blocks: Mapping[str, list[Block]],
    locals_: Mapping[str, LocalTensor],
    unmapped: dict[str, str],
) -> dict[str, list[Block]]:
    """Return the blocks by canonical name; tied tensors are marked, those that meet otherwise dropped."""
    first: dict[object, str] = {}
    kept: dict[str, list[Block]] = {}
    for name, found in blocks.items():
        places = tuple((b.local, b.offset, b.shape, b.strides, b.start) for b in found)
        tied = first.setdefault(places, name)
        kept[name] = [replace(block, is_alias=True) for block in found] if tied != name else found
    by_local: dict[str, list[Block]] = {}
    for block in (block for found in kept.values() for block in found if not block.is_alias):
        by_local.setdefault(block.local, []).append(block)
    for local, found in by_local.items():
        for one, other in _meeting(found, locals_[local].shape):
            unmapped.setdefault(one.name, f"{other.name} is loaded over it in {local}")
            unmapped.setdefault(other.name, f"it is loaded over {one.name} in {local}")
    lost = {name for name in kept if name in unmapped}
    ties = {name: first[places] for places, name in _ties(blocks, first)}
    for name, original in ties.items():
        if original in lost:
            unmapped.setdefault(name, f"it is tied to {original}: {unmapped[original]}")
    return {name: found for name, found in kept.items() if name not in unmapped}


def _ties(
    blocks: Mapping[str, list[Block]], first: Mapping[object, str]
) -> Iterable[tuple[object, str]]:
    for name, found in blocks.items():
        places = tuple((b.local, b.offset, b.shape, b.strides, b.start) for b in found)
        if first[places] != name:
            yield places, name


def _meeting(blocks: Sequence[Block], shape: Sequence[int]) -> Iterable[tuple[Block, Block]]:
    """Yield the pairs of blocks that share memory of one local tensor."""
    spans = sorted(((b.offset, _last(b), i) for i, b in enumerate(blocks)), key=lambda s: s[:2])
    open_: list[tuple[int, int]] = []
    for first, last, i in spans:
        open_ = [(end, j) for end, j in open_ if end >= first]
        for _, j in open_:
            if _share(blocks[j], blocks[i], shape):
                yield blocks[j], blocks[i]
        open_.append((last, i))


def _share(one: Block, other: Block, shape: Sequence[int]) -> bool:
    theirs = local_boxes(other, shape)
    return any(overlap(a, b) is not None for a in local_boxes(one, shape) for b in theirs)


def _last(block: Block) -> int:
    return block.offset + sum((n - 1) * s for n, s in zip(block.shape, block.strides, strict=True))


def _padded(locals_: Iterable[LocalTensor], blocks: Sequence[Block]) -> tuple[LocalTensor, ...]:
    """Return the local tensors with what no block names for padding."""
    named: dict[str, int] = {}
    for block in blocks:
        if not block.is_alias:
            named[block.local] = named.get(block.local, 0) + block.count
    return tuple(replace(t, padding=prod(t.shape) - named.get(t.name, 0)) for t in locals_)


def together(workers: Sequence[Learned]) -> Layout:
    """Return the layout of all workers of an engine, with how many hold each box; `check` proves it.

    Tensors that a worker could not map are left out.

    Raises:
        LayoutError: workers learned of different checkpoints, or cut a tensor in ways that do not nest.
    """
    lost = {name for worker in workers for name in worker.unmapped}
    catalog = dict(workers[0].layout.catalog)
    for worker in workers[1:]:
        if worker.layout.catalog.keys() | lost != catalog.keys() | lost:
            raise LayoutError("the workers learned their placements of different checkpoints")
        for name, tensor in worker.layout.catalog.items():
            if name not in lost:
                grid = common_grid(name, catalog[name].grid, tensor.grid)
                catalog[name] = replace(tensor, grid=grid)
    for name in lost:
        catalog.pop(name, None)
    placements = []
    for worker in workers:
        own = worker.layout.catalog
        found = tuple(
            part
            for block in worker.placement.blocks
            if block.name not in lost
            for part in refine(block, own[block.name].grid, catalog[block.name].grid)
        )
        tensors = _padded(worker.placement.tensors, found)
        placements.append(Placement(worker.placement.rank, tensors, found))
    held = {name for placement in placements for name in names(placement.blocks)}
    return _counted({name: t for name, t in catalog.items() if name in held}, tuple(placements))


def _counted(catalog: Catalog, placements: tuple[Placement, ...]) -> Layout:
    """Return the layout with each block told how many there are of its box."""
    held = holders(Layout(catalog, placements))
    return Layout(
        catalog,
        tuple(
            replace(
                placement,
                blocks=tuple(
                    replace(block, copies=len(held[block.name][block.box]))
                    for block in placement.blocks
                ),
            )
            for placement in placements
        ),
    )
