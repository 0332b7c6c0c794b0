"""Copies as blocks: an affine view of a checkpoint tensor as a box in a grid of its axes."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from syncline.engines.learned.notes import Region
from syncline.errors import LayoutError
from syncline.layouts.blocks import Block, row_major
from syncline.types import TensorMeta


@dataclass(frozen=True, slots=True)
class _Axis:
    """One axis of a copy: how many steps, how far each goes in the checkpoint tensor and in memory."""

    count: int
    stride: int
    step: int


def block_of(region: Region, meta: TensorMeta) -> tuple[tuple[int, ...], Block]:
    """Return a grid of the checkpoint tensor, and the copy as a block whose box lies in that grid.

    Raises:
        LayoutError: the copied elements are no box of any grid.

    Example:
        >>> rows = Region("w", (2, 2, 3), 6, (6, 3, 1), "t", 0, (3, 6, 1))
        >>> grid, block = block_of(rows, TensorMeta("w", "BF16", (6, 3)))
        >>> grid, str(block)
        ((3, 2, 3), 'w[1:3, 0:2, 0:3] = t@0 strides (3, 6, 1)')
    """
    axes = _axes(region)
    if any(axis.stride <= 0 or axis.step <= 0 for axis in axes):
        raise LayoutError("its loader repeats or reverses elements", tensor=meta.name)
    grid: list[int] = []
    start: list[int] = []
    shape: list[int] = []
    strides: list[int] = []
    left = region.offset
    for side, unit in zip(meta.shape, row_major(meta.shape), strict=True):
        inside = [part for axis in axes for part in _within(axis, unit, side, meta)]
        extents, counts, steps = _side(inside, unit, side, meta)
        first, left = divmod(left, unit) if unit else (0, left)
        place = _unravelled(first, extents)
        if any(a + n > extent for a, n, extent in zip(place, counts, extents, strict=True)):
            raise _no_box(meta)
        grid += extents
        start += place
        shape += counts
        strides += steps
    if prod(shape) != prod(region.shape):
        raise _no_box(meta)
    block = Block(
        region.name, tuple(start), tuple(shape), region.local, region.place, tuple(strides)
    )
    return tuple(grid), block


def _axes(region: Region) -> list[_Axis]:
    """Return the axes of a copy, the farthest steps first; those that follow each other are one."""
    sides = zip(region.strides, region.shape, region.steps, strict=True)
    axes: list[_Axis] = []
    for stride, count, step in sorted(sides, reverse=True):
        if count == 1:
            continue
        outer = axes[-1] if axes else None
        if outer and (outer.stride, outer.step) == (stride * count, step * count):
            axes[-1] = _Axis(outer.count * count, stride, step)
        else:
            axes.append(_Axis(count, stride, step))
    return axes


def _within(axis: _Axis, unit: int, side: int, meta: TensorMeta) -> list[_Axis]:
    """Return the part of a copy's axis that walks along one axis of the tensor, if one does."""
    below, above = unit, unit * side
    reach = axis.stride * axis.count
    if axis.stride >= above or reach <= below:
        return []
    low = max(axis.stride, below)
    high = min(reach, above)
    if low % axis.stride or reach % low or high % low:
        raise _no_box(meta)
    count = high // low
    if axis.stride < below and reach % below:
        raise _no_box(meta)
    # A reach beyond the side is walked on along the axes before it, which it must fill evenly.
    if reach > above and (reach % above or high != above):
        raise _no_box(meta)
    return [_Axis(count, low, axis.step * (low // axis.stride))] if count > 1 else []


def _side(
    inside: list[_Axis], unit: int, side: int, meta: TensorMeta
) -> tuple[list[int], list[int], list[int]]:
    """Return grid extents, counts and memory strides along one axis of the tensor."""
    inside = sorted(inside, key=lambda axis: -axis.stride)
    extents: list[int] = []
    counts: list[int] = []
    steps: list[int] = []
    room = side
    for axis in inside:
        if axis.stride % unit or room % (axis.stride // unit):
            raise _no_box(meta)
        step = axis.stride // unit
        extents.append(room // step)
        counts.append(axis.count)
        steps.append(axis.step)
        room = step
    if room != 1 or not inside:
        extents.append(room)
        counts.append(1)
        steps.append(0)
    return extents, counts, steps


def _unravelled(index: int, extents: list[int]) -> list[int]:
    place = []
    for unit in row_major(extents):
        first, index = divmod(index, unit) if unit else (0, index)
        place.append(first)
    return place


def _no_box(meta: TensorMeta) -> LayoutError:
    return LayoutError("what its loader copies is no box of the tensor", tensor=meta.name)
