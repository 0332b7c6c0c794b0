"""`intersect`: which box of which canonical tensor must go from which ranks to which ranks.

Planning sees metadata only. A piece is a box that lies inside one block of a source rank and inside one
block of a target rank, so that both can find it in their memory by name and box alone.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from syncline.errors import CoverageError
from syncline.layouts import Layout
from syncline.layouts.blocks import Block, Box, overlap, show
from syncline.layouts.coverage import check, holders
from syncline.layouts.grids import common_grid, refine

_LISTED = 12
_Held = Mapping[Box, Sequence[tuple[int, Block]]]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a canonical tensor that moves as one.

    Attributes:
        name, start, shape: the box, in the grid that both layouts have in common.
        grid: that grid.
        nbytes: its size.
        sources: ranks of the source layout that hold it, all the same bits.
        targets: ranks of the target layout that want it.
    """

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    grid: tuple[int, ...]
    nbytes: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name}{show((self.start, self.shape))} {self.sources} -> {self.targets}"


def intersect(source: Layout, target: Layout, unused: Collection[str] = ()) -> list[Piece]:
    """Return the pieces that tile every box of the target layout, out of boxes of the source layout.

    Args:
        unused: canonical tensors of the source that the target need not have.

    Raises:
        CoverageError: one of the layouts is not legal (see `layouts.check`); the target wants a tensor
            that the source lacks, or of another dtype or shape; the source has one that nobody wants
            and `unused` does not name.

    Cost: O(blocks) for tensors that are cut alike, else boxes x boxes of one tensor. No torch, no
    elements, never the canonical tensor.
    """
    check(source)
    check(target)
    _same_tensors(source, target, unused)
    given, wanted = holders(source), holders(target)
    pieces: list[Piece] = []
    ranks: dict[tuple[int, ...], tuple[int, ...]] = {}
    for name in target.catalog:
        one, other = source.catalog[name].grid, target.catalog[name].grid
        grid = one if one == other else common_grid(name, one, other)
        here, there = _refined(given[name], one, grid), _refined(wanted[name], other, grid)
        itemsize = target.catalog[name].meta.unit_bytes
        for box, froms, tos in _common(name, here, there):
            # Equal lists of ranks are kept once: there are few of them, and many pieces.
            pieces.append(
                Piece(
                    name,
                    *box,
                    grid,
                    prod(box[1]) * itemsize,
                    ranks.setdefault(froms, froms),
                    ranks.setdefault(tos, tos),
                )
            )
    return pieces


def _same_tensors(source: Layout, target: Layout, unused: Collection[str]) -> None:
    problems = []
    for name, tensor in target.catalog.items():
        if name not in source.catalog:
            problems.append(f"{name}: the target wants it, no source rank has it")
        elif source.catalog[name].meta != tensor.meta:
            ours = source.catalog[name].meta
            problems.append(
                f"{name}: {ours.dtype} {ours.shape} at the source, {tensor.meta.dtype} "
                f"{tensor.meta.shape} at the target"
            )
    problems.extend(
        f"{name}: the source has it, no target rank wants it; name it in `unused` if that is meant"
        for name in source.catalog
        if name not in target.catalog and name not in unused
    )
    if problems:
        more = f"\n  and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
        listed = "\n  ".join(problems[:_LISTED])
        raise CoverageError(f"source and target do not hold the same tensors:\n  {listed}{more}")


def _refined(held: _Held, grid: Sequence[int], fine: Sequence[int]) -> _Held:
    if tuple(grid) == tuple(fine):
        return held
    found: dict[Box, list[tuple[int, Block]]] = {}
    for pairs in held.values():
        for rank, block in pairs:
            for part in refine(block, grid, fine):
                found.setdefault(part.box, []).append((rank, part))
    return found


def _common(
    name: str, given: _Held, wanted: _Held
) -> Iterator[tuple[Box, tuple[int, ...], tuple[int, ...]]]:
    """Yield the boxes that a box of each side share, with the ranks that hold either."""
    sources = sorted(given)
    firsts = [start[:1] for start, _ in sources]
    longest = max((shape[0] for _, shape in sources if shape), default=0)
    for box, held in wanted.items():
        tos = _ranks(held)
        if box in given:
            yield box, _ranks(given[box]), tos
            continue
        found = 0
        # Only boxes that begin near enough on the first axis can meet this one.
        start, shape = box
        low = bisect_right(firsts, (start[0] - longest,))
        high = bisect_left(firsts, (start[0] + shape[0],))
        for other in sources[low:high]:
            shared = overlap(other, box)
            if shared is not None:
                found += prod(shared[1])
                yield shared, _ranks(given[other]), tos
        if found != prod(shape):
            raise CoverageError(
                f"{name}{show(box)}: sources give {found} of {prod(shape)} elements", tensor=name
            )


def _ranks(held: Sequence[tuple[int, Block]]) -> tuple[int, ...]:
    """Return the ranks that hold a box, each once."""
    return tuple(dict.fromkeys(rank for rank, _ in held))
