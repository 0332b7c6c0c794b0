"""Two layouts may split the axes of one tensor differently; this brings them to a common grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import prod

from syncline.errors import LayoutError
from syncline.layouts.blocks import Block, flat_boxes, row_major


def common_grid(name: str, one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    """Return the coarsest grid that splits both grids of one tensor.

    Raises:
        LayoutError: they split an axis in ways that do not nest, or are not of one tensor.

    Example:
        >>> common_grid("w", (8, 6), (2, 4, 3, 2))
        (2, 4, 3, 2)
    """
    grid: list[int] = []
    left, right = list(one), list(other)
    while left and right:
        a, b = left.pop(0), right.pop(0)
        small, big = min(a, b), max(a, b)
        if small == 0 or big % small:
            if a == b:
                grid.append(a)
                continue
            raise LayoutError(f"{name}: grids {one} and {other} have no common one", tensor=name)
        grid.append(small)
        if big != small:
            (left if a == big else right).insert(0, big // small)
    if prod(left) != 1 or prod(right) != 1:
        raise LayoutError(f"{name}: grids {one} and {other} are of different tensors", tensor=name)
    return (*grid, *left, *right)


def refine(block: Block, grid: Sequence[int], fine: Sequence[int]) -> list[Block]:
    """Return the blocks that say in a finer grid what a block says in its own.

    Example:
        >>> [str(part) for part in refine(Block("w", (3,), (5,), "t", 0, (1,)), (8,), (2, 4))]
        ['w[0:1, 3:4] = t@0 strides (4, 1)', 'w[1:2, 0:4] = t@1 strides (4, 1)']
    """
    axes = _split_axes(grid, fine)
    choices = [
        list(flat_boxes(extents, first, count))
        for extents, first, count in zip(axes, block.start, block.shape, strict=True)
    ]
    blocks = []
    for boxes in product(*choices):
        offset, strides = block.offset, list[int]()
        for axis, (box_start, _) in enumerate(boxes):
            inner = row_major(axes[axis])
            flat = sum(a * step for a, step in zip(box_start, inner, strict=True))
            offset += (flat - block.start[axis]) * block.strides[axis]
            strides.extend(step * block.strides[axis] for step in inner)
        start = tuple(a for box_start, _ in boxes for a in box_start)
        shape = tuple(n for _, box_shape in boxes for n in box_shape)
        moved = replace(block, start=start, shape=shape, offset=offset, strides=tuple(strides))
        blocks.append(moved)
    return blocks


def _split_axes(grid: Sequence[int], fine: Sequence[int]) -> list[tuple[int, ...]]:
    """Return for each axis of a grid the axes of the finer one that it became."""
    axes: list[tuple[int, ...]] = []
    place = 0
    for side in grid:
        taken = [fine[place]]
        place += 1
        while prod(taken) != side:
            taken.append(fine[place])
            place += 1
        axes.append(tuple(taken))
    if axes:
        axes[-1] += tuple(fine[place:])
    return axes
