"""`check`: does a layout name every element exactly once, or exactly as often as it declares?

One function decides the legality of a layout; it sees metadata only. Every defect is listed with its box.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod

from syncline.errors import CoverageError
from syncline.layouts.blocks import (
    Block,
    Box,
    CanonicalTensor,
    Layout,
    LocalTensor,
    Placement,
    flat_boxes,
    row_major,
    show,
)

_LISTED = 12


def check(layout: Layout) -> None:
    """Accept a layout whose blocks tile every canonical tensor and every local tensor.

    Canonical side: the distinct boxes of a tensor tile it; each is held by exactly as many blocks as
    these declare in `copies`. Local side: the blocks of a local tensor that are not aliases do not meet,
    and what they leave free is exactly its declared padding.

    Raises:
        CoverageError: a gap, an overlap, a wrong number of copies, a box out of bounds, a name that
            nobody knows, a tensor that nobody names. Lists the first defects with their boxes.

    Cost: O(blocks log blocks); looks at no element.
    """
    defects = [*_canonical_defects(layout), *_local_defects(layout)]
    if defects:
        listed = "\n".join(f"  {defect}" for defect in defects[:_LISTED])
        more = f"\n  and {len(defects) - _LISTED} more" if len(defects) > _LISTED else ""
        raise CoverageError(
            f"a layout must name every element exactly once, or as declared; {len(defects)} defects:\n"
            f"{listed}{more}"
        )


def holders(layout: Layout) -> dict[str, dict[Box, list[tuple[int, Block]]]]:
    """Return by canonical name the distinct boxes and who holds each: (rank, block), in layout order."""
    held: dict[str, dict[Box, list[tuple[int, Block]]]] = {name: {} for name in layout.catalog}
    for placement in layout.placements:
        rank = placement.rank
        for block in placement.blocks:
            held.setdefault(block.name, {}).setdefault(block.box, []).append((rank, block))
    return held


def _canonical_defects(layout: Layout) -> Iterator[str]:
    for name, boxes in holders(layout).items():
        tensor = layout.catalog.get(name)
        if tensor is None:
            ranks = sorted({rank for held in boxes.values() for rank, _ in held})
            yield f"{name}: unknown canonical tensor, held by ranks {_some(ranks)}"
        elif not boxes and tensor.meta.count:
            yield f"{name}{show(_whole(tensor.grid))}: no rank holds it"
        else:
            yield from _tensor_defects(tensor, boxes)


def _tensor_defects(
    tensor: CanonicalTensor, boxes: dict[Box, list[tuple[int, Block]]]
) -> Iterator[str]:
    name, grid = tensor.meta.name, tensor.grid
    for box, held in boxes.items():
        declared = {block.copies for _, block in held}
        if declared != {len(held)}:
            ranks = _some([rank for rank, _ in held])
            yield (
                f"{name}{show(box)}: held {len(held)} times, by ranks {ranks}; "
                f"declared copies {sorted(declared)}"
            )
    yield from tiling_defects(name, grid, list(boxes))


def tiling_defects(name: str, extents: Sequence[int], boxes: Sequence[Box]) -> Iterator[str]:
    """Yield what keeps the boxes from tiling an array: boxes out of bounds, gaps and overlaps."""
    inside = []
    for start, shape in boxes:
        fits = len(start) == len(extents) and all(
            min(a, n) >= 0 and a + n <= extent
            for a, n, extent in zip(start, shape, extents, strict=False)
        )
        if fits:
            inside.append((start, shape))
        else:
            yield f"{name}{show((start, shape))}: outside of {show(_whole(extents))}"
    for count, start, shape in _uneven(extents, inside):
        problem = "gap: no block names it" if count == 0 else f"overlap: {count} blocks name it"
        yield f"{name}{show((start, shape))}: {problem}"


def _uneven(
    extents: Sequence[int], boxes: Sequence[Box]
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Yield (how many boxes, start, shape) of every region that is not in exactly one box.

    Cuts the first axis into slabs in which the set of boxes does not change, and looks into each.
    """
    boxes = [(start, shape) for start, shape in boxes if all(shape)]
    if not all(extents) or (len(boxes) == 1 and boxes[0][1] == tuple(extents)):
        return
    if not extents:
        if len(boxes) != 1:
            yield len(boxes), (), ()
        return
    edges = {0, extents[0]}
    for start, shape in boxes:
        edges.update((start[0], start[0] + shape[0]))
    waiting = sorted(boxes, reverse=True)
    active: list[Box] = []
    for a, b in pairwise(sorted(edges)):
        active = [box for box in active if box[0][0] + box[1][0] > a]
        while waiting and waiting[-1][0][0] <= a:
            active.append(waiting.pop())
        inner = [(start[1:], shape[1:]) for start, shape in active]
        for count, start, shape in _uneven(extents[1:], inner):
            yield count, (a, *start), (b - a, *shape)


def _local_defects(layout: Layout) -> Iterator[str]:
    # Ranks that hold the same thing share the very same tuples; looking once is enough.
    seen: set[tuple[int, int]] = set()
    for placement in layout.placements:
        key = (id(placement.tensors), id(placement.blocks))
        if key not in seen:
            seen.add(key)
            yield from _placement_defects(placement)


def _placement_defects(placement: Placement) -> Iterator[str]:
    at = f"rank {placement.rank}: "
    by_local: dict[str, list[Block]] = {tensor.name: [] for tensor in placement.tensors}
    if len(by_local) != len(placement.tensors):
        yield f"{at}a local tensor is listed twice"
    for block in placement.blocks:
        if block.local not in by_local:
            yield f"{at}{block.local}: a block names it, but the rank has no such tensor"
        else:
            by_local[block.local].append(block)
    for tensor in placement.tensors:
        yield from _local_tensor_defects(at, tensor, by_local[tensor.name])


def _local_tensor_defects(at: str, tensor: LocalTensor, blocks: list[Block]) -> Iterator[str]:
    size = prod(tensor.shape)
    boxes = []
    for block in blocks:
        if block.is_alias or not block.count:
            continue
        last = sum((n - 1) * stride for n, stride in zip(block.shape, block.strides, strict=True))
        if block.offset < 0 or block.offset + last >= size:
            yield f"{at}{block}: outside of {tensor.name}{show(_whole(tensor.shape))}"
            return
        boxes.extend(local_boxes(block, tensor.shape))
    named = sum(prod(shape) for _, shape in boxes)
    if len(boxes) > 1:
        regions = list(_uneven(tensor.shape, boxes))
        for count, start, shape in regions:
            if count > 1:
                where = show((start, shape))
                yield f"{at}{tensor.name}{where}: overlap: {count} blocks name it"
        named = size - sum(prod(shape) for count, _, shape in regions if count == 0)
    if size - named != tensor.padding:
        yield (
            f"{at}{tensor.name}{show(_whole(tensor.shape))}: {size - named} elements are named by no "
            f"block, {tensor.padding} are declared padding"
        )


def local_boxes(block: Block, shape: Sequence[int]) -> list[Box]:
    """Return the boxes of the local tensor that a block fills: one, unless its memory is interleaved.

    Example:
        >>> [show(box) for box in local_boxes(Block("w", (0, 0), (2, 4), "t", 1, (1, 3)), (4, 3))]
        ['[0:4, 1:3]']
    """
    axes = sorted(
        ((stride, n) for stride, n in zip(block.strides, block.shape, strict=True) if n > 1),
        reverse=True,
    )
    offsets = [block.offset]
    sides: list[int] = []
    limit = None
    for local_stride in row_major(shape):
        mine = [(s, n) for s, n in axes if s >= local_stride and (limit is None or s < limit)]
        side = 1
        for stride, count in reversed(mine):
            if stride == local_stride * side:
                side *= count
            else:
                offsets = [offset + i * stride for offset in offsets for i in range(count)]
        sides.append(side)
        limit = local_stride
    boxes = [(_unravel(offset, shape), tuple(sides)) for offset in offsets]
    fits = all(
        a + n <= m for start, _ in boxes for a, n, m in zip(start, sides, shape, strict=True)
    )
    return boxes if fits else _stretches(block, shape)


def _stretches(block: Block, shape: Sequence[int]) -> list[Box]:
    """Return the boxes of a block whose memory runs over the ends of the local tensor's rows."""
    offsets, length = [block.offset], 1
    for stride, count in sorted(zip(block.strides, block.shape, strict=True)):
        if stride == length:
            length *= count
        elif count > 1:
            offsets = [offset + i * stride for offset in offsets for i in range(count)]
    return [box for offset in offsets for box in flat_boxes(shape, offset, length)]


def _unravel(offset: int, shape: Sequence[int]) -> tuple[int, ...]:
    place = []
    for stride in row_major(shape):
        index, offset = divmod(offset, stride)
        place.append(index)
    return tuple(place)


def _whole(shape: Sequence[int]) -> Box:
    return tuple(0 for _ in shape), tuple(shape)


def _some(ranks: Sequence[int]) -> str:
    return f"{list(ranks[:8])}{' ...' if len(ranks) > 8 else ''}"
