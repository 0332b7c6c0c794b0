"""Blocks: where a box of a canonical tensor lies in the memory of a rank.

A placement is the list of blocks that one rank holds; a layout is the placements of all ranks with the
catalog of canonical tensors that they hold. All of it is metadata: frozen, printable, without torch, and
no operation here looks at an element.

The canonical side of a block is a box in the tensor's **grid**: its shape, with axes split where a
layout needs it (heads, interleaved halves). Splitting axes moves no element, so every flat index stays
the same. The local side is an offset and one stride for each canonical axis, in elements of the local
tensor's row-major memory: that says transposes, fused rows, stacked experts and flat parameters alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from syncline.errors import LayoutError
from syncline.types import DTYPE_BITS, TensorMeta

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Start and shape, one entry for each axis."""


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a row-major tensor of this shape.

    Example:
        >>> row_major((4, 3, 2))
        (6, 2, 1)
    """
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


@dataclass(frozen=True, slots=True)
class CanonicalTensor:
    """A canonical tensor and the grid in which its blocks are boxes.

    Raises:
        LayoutError: the grid does not split the shape axis by axis, or several elements share a byte.
    """

    meta: TensorMeta
    grid: tuple[int, ...]

    def __post_init__(self) -> None:
        if DTYPE_BITS[self.meta.dtype] % 8:
            raise LayoutError(
                f"tensor {self.meta.name!r}: {self.meta.dtype} packs elements into bytes; describe it "
                "as U8 with its packed shape",
                tensor=self.meta.name,
            )
        if not _splits(self.grid, self.meta.shape):
            raise LayoutError(
                f"tensor {self.meta.name!r}: grid {self.grid} does not split shape {self.meta.shape}",
                tensor=self.meta.name,
            )


def _splits(grid: Sequence[int], shape: Sequence[int]) -> bool:
    """Say whether consecutive runs of the grid multiply up to the sides of the shape."""
    if not shape:
        return not grid
    axis = 0
    for side in shape:
        product = 1
        first = True
        while first or (product != side and axis < len(grid)):
            if axis == len(grid):
                return False
            product *= grid[axis]
            axis += 1
            first = False
        if product != side:
            return False
    return all(extent == 1 for extent in grid[axis:])


def plain(meta: TensorMeta) -> CanonicalTensor:
    """Return the tensor with its own shape for a grid."""
    return CanonicalTensor(meta, meta.shape)


Catalog = Mapping[str, CanonicalTensor]
"""Canonical tensors by name."""


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """One tensor in a rank's memory, contiguous and row-major.

    Attributes:
        padding: how many of its elements no block names, because they are padding.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    padding: int = 0


@dataclass(frozen=True, slots=True)
class Block:
    """A box of a canonical tensor, and where its elements lie in a local tensor.

    The element at canonical grid coordinates `start + i` is the local element
    `offset + sum(i[k] * strides[k])`.

    Attributes:
        name, start, shape: the box in the grid of the canonical tensor `name`.
        local, offset, strides: the local tensor, and the affine place of the box in its memory.
        copies: how many blocks of the whole layout hold exactly this box; other counts are errors.
        is_alias: the memory also belongs to another canonical tensor, whose block is not an alias: this
            tensor is a stored copy of that one. Reading gives both; writing both must agree.
        add: what a canonical value has on top of the local value: 0, except where a family says so.

    Example:
        >>> print(Block("w", (2, 0), (2, 3), "qkv", 12, (3, 1)))
        w[2:4, 0:3] = qkv@12 strides (3, 1)
    """

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    local: str
    offset: int
    strides: tuple[int, ...]
    copies: int = 1
    is_alias: bool = False
    add: int = 0

    @property
    def count(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def box(self) -> Box:
        """Start and shape in the canonical grid."""
        return self.start, self.shape

    def __str__(self) -> str:
        return f"{self.name}{show(self.box)} = {self.local}@{self.offset} strides {self.strides}"


def show(box: Box) -> str:
    """Return a box as slices: `[0:4, 8:16]`."""
    sides = (f"{start}:{start + side}" for start, side in zip(*box, strict=True))
    return f"[{', '.join(sides)}]"


@dataclass(frozen=True, slots=True)
class Placement:
    """What one rank holds: its local tensors, and the blocks that fill them."""

    rank: int
    tensors: tuple[LocalTensor, ...]
    blocks: tuple[Block, ...]

    def __str__(self) -> str:
        return "\n".join([f"rank {self.rank}", *(f"  {block}" for block in self.blocks)])


@dataclass(frozen=True, slots=True)
class Layout:
    """Canonical tensors, and the placement of every rank that holds a part of them."""

    catalog: Catalog
    placements: tuple[Placement, ...]


def overlap(one: Box, other: Box) -> Box | None:
    """Return the box that two boxes of one grid share, or None.

    Example:
        >>> overlap(((0, 0), (4, 4)), ((2, 3), (9, 9)))
        ((2, 3), (2, 1))
    """
    starts, sides = [], []
    for a, n, b, m in zip(*one, *other, strict=True):
        start = max(a, b)
        side = min(a + n, b + m) - start
        if side <= 0:
            return None
        starts.append(start)
        sides.append(side)
    return tuple(starts), tuple(sides)


def part(block: Block, box: Box) -> Block:
    """Return the part of a block that holds `box`, which lies inside the block's own box."""
    start, shape = box
    moved = sum(
        (a - b) * stride for a, b, stride in zip(start, block.start, block.strides, strict=True)
    )
    return replace(block, start=start, shape=shape, offset=block.offset + moved)


def flat_boxes(extents: Sequence[int], start: int, count: int) -> Iterator[Box]:
    """Cut `count` consecutive elements of a row-major array into boxes, in order; as few as it takes.

    Example:
        >>> [show(box) for box in flat_boxes((3, 4), 3, 7)]
        ['[0:1, 3:4]', '[1:2, 0:4]', '[2:3, 0:2]']
    """
    if count == 0:
        return
    if not extents:
        yield (), ()
        return
    inner = prod(extents[1:])
    row, into = divmod(start, inner)
    if into or count < inner:
        head = min(count, inner - into)
        for tail_start, tail_shape in flat_boxes(extents[1:], into, head):
            yield (row, *tail_start), (1, *tail_shape)
        yield from flat_boxes(extents, start + head, count - head)
        return
    rows = count // inner
    yield (row, *(0 for _ in extents[1:])), (rows, *extents[1:])
    yield from flat_boxes(extents, start + rows * inner, count - rows * inner)


@dataclass(frozen=True, slots=True)
class Run:
    """A block on flat memory, with as few axes as it takes: one where both sides are contiguous.

    Element `i` is at `canonical + sum(i[k] * canonical_strides[k])` of the flat canonical tensor and at
    `local + sum(i[k] * local_strides[k])` of the flat local one. Canonical strides fall.
    """

    block: Block
    canonical: int
    local: int
    counts: tuple[int, ...]
    canonical_strides: tuple[int, ...]
    local_strides: tuple[int, ...]


def run_of(block: Block, grid: Sequence[int]) -> Run:
    """Return the block on flat memory; axes that follow each other on both sides become one.

    Example:
        >>> run_of(Block("w", (2, 0), (2, 3), "qkv", 12, (3, 1)), (8, 3)).counts
        (6,)
    """
    strides = row_major(grid)
    axes: list[tuple[int, int, int]] = []
    for count, outer, local in zip(block.shape, strides, block.strides, strict=True):
        if count == 1:
            continue
        if axes and axes[-1][1] == outer * count and axes[-1][2] == local * count:
            axes[-1] = (axes[-1][0] * count, outer, local)
        else:
            axes.append((count, outer, local))
    start = sum(a * stride for a, stride in zip(block.start, strides, strict=True))
    counts, outers, locals_ = zip(*axes, strict=True) if axes else ((), (), ())
    return Run(block, start, block.offset, counts, outers, locals_)


def names(blocks: Iterable[Block]) -> list[str]:
    """Return the canonical names that blocks mention, each once, in order of appearance."""
    return list(dict.fromkeys(block.name for block in blocks))
