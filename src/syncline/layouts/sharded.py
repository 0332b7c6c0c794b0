"""Placements of FSDP2 / DTensor meshes, FSDP1 flat parameters and DeepSpeed ZeRO-3 partitions.

The functions that make layouts see metadata only. `dtensor_sharding` reads it off a real DTensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil, prod
from typing import Any

from syncline.errors import LayoutError
from syncline.layouts.blocks import (
    Block,
    Layout,
    LocalTensor,
    Placement,
    flat_boxes,
    plain,
    row_major,
)
from syncline.types import TensorMeta

_Ranges = tuple[tuple[int, int], ...]
"""(first, count) of consecutive indices along one axis, in the order in which they are local."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One mesh axis cuts one tensor axis, as `torch.chunk` does.

    Attributes:
        dim: the tensor axis.
        split_factor: more than 1 for torch's `_StridedShard`: the axis is first cut into that many, and
            every one of these is cut.
    """

    dim: int
    split_factor: int = 1


@dataclass(frozen=True, slots=True)
class Sharding:
    """How one tensor lies on a mesh: for each mesh axis a `Shard`, or None where it is replicated."""

    mesh: tuple[int, ...]
    axes: tuple[Shard | None, ...]

    def ranges(self, meta: TensorMeta, coordinate: Sequence[int]) -> list[_Ranges]:
        """Return for each tensor axis which indices the rank at a coordinate holds.

        Example:
            >>> sharding = Sharding((2, 2), (Shard(0, split_factor=2), Shard(0)))
            >>> sharding.ranges(TensorMeta("w", "BF16", (8, 4)), (0, 1))
            [((4, 2),), ((0, 4),)]
        """
        held: list[_Ranges] = [((0, side),) if side else () for side in meta.shape]
        for size, index, shard in zip(self.mesh, coordinate, self.axes, strict=True):
            if shard is None:
                continue
            if not 0 <= shard.dim < len(held):
                raise LayoutError(f"{meta.name}: {meta.shape} has no axis {shard.dim}")
            whole = held[shard.dim]
            length = sum(count for _, count in whole)
            parts: list[tuple[int, int]] = []
            for low, high in _chunks(length, shard.split_factor):
                pieces = _chunks(high - low, size)
                if index < len(pieces):
                    a, b = pieces[index]
                    parts.extend(_within(whole, low + a, low + b))
            held[shard.dim] = tuple(parts)
        return held


def _chunks(length: int, ways: int) -> list[tuple[int, int]]:
    """Return (first, end) of the chunks that `torch.chunk` makes: equal but for the last ones."""
    each = ceil(length / ways)
    if each == 0:
        return []
    return [(first, min(first + each, length)) for first in range(0, length, each)]


def _within(ranges: _Ranges, low: int, high: int) -> Iterator[tuple[int, int]]:
    """Yield what of the indices, counted through the ranges, lies in `low : high`."""
    place = 0
    for first, count in ranges:
        a, b = max(place, low), min(place + count, high)
        if a < b:
            yield first + a - place, b - a
        place += count


def dtensor_layout(metas: Sequence[TensorMeta], shardings: Mapping[str, Sharding]) -> Layout:
    """Return catalog and placements of tensors on a mesh; ranks count its last axis fastest.

    Local tensors have the canonical names. A rank whose shard is empty holds an empty tensor.

    Raises:
        LayoutError: a tensor has no sharding, or they are not all on one mesh.
    """
    meshes = {sharding.mesh for sharding in shardings.values()}
    missing = [meta.name for meta in metas if meta.name not in shardings]
    if missing or len(meshes) != 1:
        raise LayoutError(f"need one mesh for all, found {meshes}; without sharding: {missing[:8]}")
    (mesh,) = meshes
    placements = []
    for rank, coordinate in enumerate(product(*(range(size) for size in mesh))):
        tensors, blocks = [], []
        for meta in metas:
            tensor, its_blocks = _shard(meta, shardings[meta.name], coordinate)
            tensors.append(tensor)
            blocks.extend(its_blocks)
        placements.append(Placement(rank, tuple(tensors), tuple(blocks)))
    return Layout({meta.name: plain(meta) for meta in metas}, tuple(placements))


def _shard(
    meta: TensorMeta, sharding: Sharding, coordinate: Sequence[int]
) -> tuple[LocalTensor, list[Block]]:
    held = sharding.ranges(meta, coordinate)
    shape = tuple(sum(count for _, count in ranges) for ranges in held)
    strides = row_major(shape)
    copies = prod(
        size for size, shard in zip(sharding.mesh, sharding.axes, strict=True) if shard is None
    )
    placed = [
        [(first, count, sum(n for _, n in ranges[:i])) for i, (first, count) in enumerate(ranges)]
        for ranges in held
    ]
    blocks = []
    for choice in product(*placed):
        start = tuple(first for first, _, _ in choice)
        sides = tuple(count for _, count, _ in choice)
        offset = sum(at * step for (_, _, at), step in zip(choice, strides, strict=True))
        blocks.append(Block(meta.name, start, sides, meta.name, offset, strides, copies))
    return LocalTensor(meta.name, meta.dtype, shape), blocks


def flat_layout(units: Mapping[str, Sequence[TensorMeta]], world: int) -> Layout:
    """Return catalog and placements of tensors that are flattened, joined and cut into equal parts.

    FSDP1: one unit for each wrapped module, in the order of its flat parameter. ZeRO-3: one unit for each
    parameter. The end of the last part is padding.

    Args:
        units: by local name, the tensors of one flat parameter in order, all of one dtype.

    Raises:
        LayoutError: tensors of several dtypes in a unit.
    """
    placements = []
    for rank in range(world):
        tensors, blocks = [], []
        for local, metas in units.items():
            tensor, its_blocks = _flat_part(local, metas, rank, world)
            tensors.append(tensor)
            blocks.extend(its_blocks)
        placements.append(Placement(rank, tuple(tensors), tuple(blocks)))
    catalog = {meta.name: plain(meta) for metas in units.values() for meta in metas}
    return Layout(catalog, tuple(placements))


def _flat_part(
    local: str, metas: Sequence[TensorMeta], rank: int, world: int
) -> tuple[LocalTensor, list[Block]]:
    dtypes = {meta.dtype for meta in metas}
    if len(dtypes) != 1:
        raise LayoutError(f"{local}: a flat parameter has one dtype, found {sorted(dtypes)}")
    each = ceil(sum(meta.count for meta in metas) / world)
    low, high = rank * each, (rank + 1) * each
    blocks, place, named = [], 0, 0
    for meta in metas:
        a, b = max(place, low), min(place + meta.count, high)
        if a < b:
            steps = row_major(meta.shape)
            for start, shape in flat_boxes(meta.shape, a - place, b - a):
                first = sum(i * step for i, step in zip(start, steps, strict=True)) + place - low
                blocks.append(Block(meta.name, start, shape, local, first, steps))
            named += b - a
        place += meta.count
    return LocalTensor(local, dtypes.pop(), (each,), each - named), blocks


def dtensor_sharding(tensor: Any) -> Sharding:
    """Return how a real torch DTensor lies on its mesh.

    Raises:
        LayoutError: it is not a DTensor, or has a placement that holds no whole values (partial sums).
    """
    mesh, placements = getattr(tensor, "device_mesh", None), getattr(tensor, "placements", None)
    if mesh is None or placements is None:
        raise LayoutError(f"expected a torch DTensor, found {type(tensor)}")
    axes: list[Shard | None] = []
    for placement in placements:
        dim = getattr(placement, "dim", None)
        if placement.is_replicate():
            axes.append(None)
        elif dim is not None:
            dim = dim if dim >= 0 else dim + len(tensor.shape)
            axes.append(Shard(dim, getattr(placement, "split_factor", 1)))
        else:
            raise LayoutError(
                f"a tensor placed as {placement} cannot be published; redistribute it"
            )
    return Sharding(tuple(mesh.shape), tuple(axes))
