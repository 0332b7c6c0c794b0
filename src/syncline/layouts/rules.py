"""Rules: one row of a family's table, and how it becomes blocks. No family has code of its own.

A rule says: this local tensor is made of these pieces of canonical tensors, arranged and cut like that.
A piece is written as `NAME: ITEMS`, one item for each axis of the canonical tensor:

    self_attn.q_proj.weight: q hidden              the whole tensor, a matrix of `q` rows
    mlp.gate_up_proj.weight: inter+inter#1 hidden  the second `inter` rows of it
    self_attn.q_proj.weight: heads.head+head#0 hidden   of every head, the first `head` rows
    mlp.experts.down_proj: T e inter hidden        of the stacked tensor, expert `e`, transposed

An item is factors joined by `.`: they split the axis, outermost first, and are axes of the tensor's grid.
A factor is sections joined by `+`, of which `#i` takes one. A section is a number, a dimension of
the model, or a product `4*hidden`. `e` is the axis of the experts; one of them is taken. Items other than `e` are the axes of
the piece, in reverse order after `T`. `{e}` in a name is the number of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import prod

from syncline.errors import LayoutError
from syncline.layouts.blocks import Block, flat_boxes, row_major

Dims = Mapping[str, int]
"""Sizes of a model by the names that tables use."""

KINDS = {
    "replicated": "every rank holds all of it",
    "column": "rows are cut: each piece by itself, and a rank holds its cuts one after the other",
    "row": "columns are cut",
    "qkv": "rows of query groups, q.. k v of one group after the other; the whole is cut evenly",
    "heads": "as column, but pieces after the first are cut into `groups` at most, then repeated",
    "groups": "as column, but every piece is cut into `groups` at most, then repeated",
    "vocab": "rows are cut after rows of padding were added",
    "first": "the first rank holds all of it, the memory of the others is padding",
}
"""The ways in which pieces are arranged and cut, by name."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One local tensor, the pieces of canonical tensors that it is made of, and how.

    Attributes:
        kind: a name in `KINDS`.
        local: name of the local tensor after its layer's prefix; `a|b` where versions differ in it.
            With `{e}`, one for each expert that the rank holds; without, the local tensor of a rule for
            experts has a first axis for those that the rank holds.
        pieces: what it is made of (see above); `a | b` where checkpoints differ in it.
        on: tags of the layer (`moe`, `full`, `attention_bias` ...) under which the rule holds, all of
            them; `!tag` excludes. Empty: always.
        dtype: the canonical dtype where it is not the model's.
        add: canonical value minus local value, where they differ.
        stored: pieces that are the first piece again: canonical tensors that the checkpoint stores as
            copies of it.
    """

    kind: str
    local: str
    pieces: tuple[str, ...]
    on: str = ""
    dtype: str | None = None
    add: int = 0
    stored: tuple[str, ...] = ()

    def holds(self, tags: frozenset[str]) -> bool:
        """Say whether the rule applies to a layer with these tags."""
        return all(
            (word[1:] not in tags) if word[0] == "!" else (word in tags) for word in self.on.split()
        )

    @property
    def is_expert(self) -> bool:
        """Whether the rule speaks of one expert at a time, and so is cut among the expert ranks."""
        return any("{e}" in text or _is_stacked(text) for text in self.pieces)


def _is_stacked(piece: str) -> bool:
    return "e" in piece.partition(":")[2].split()


@dataclass(frozen=True, slots=True)
class Piece:
    """A resolved piece: a box of a canonical tensor, seen as an array.

    Attributes:
        name, shape, grid: the canonical tensor.
        start: where the box begins in the grid.
        axes: for each axis of the array, the grid axes that it runs along (outermost first).
        extents: for each axis of the array, how far it runs along each of these.
    """

    name: str
    shape: tuple[int, ...]
    grid: tuple[int, ...]
    start: tuple[int, ...]
    axes: tuple[tuple[int, ...], ...]
    extents: tuple[tuple[int, ...], ...]

    @property
    def sides(self) -> tuple[int, ...]:
        """Shape of the array."""
        return tuple(prod(extents) for extents in self.extents)

    def blocks(
        self,
        ranges: Sequence[tuple[int, int]],
        local: str,
        offset: int,
        strides: Sequence[int],
        copies: int,
    ) -> Iterator[Block]:
        """Yield the blocks that put a part of the array, (start, count) per axis, at a local place."""
        choices = [
            list(flat_boxes(extents, first, count))
            for extents, (first, count) in zip(self.extents, ranges, strict=True)
        ]
        for boxes in product(*choices):
            start, shape, steps = list(self.start), [1] * len(self.grid), [0] * len(self.grid)
            place = offset
            for axis, (box_start, box_shape) in enumerate(boxes):
                inner = row_major(self.extents[axis])
                flat = sum(a * step for a, step in zip(box_start, inner, strict=True))
                place += (flat - ranges[axis][0]) * strides[axis]
                for k, a, n, step in zip(self.axes[axis], box_start, box_shape, inner, strict=True):
                    start[k] += a
                    shape[k] = n
                    steps[k] = step * strides[axis]
            yield Block(self.name, tuple(start), tuple(shape), local, place, tuple(steps), copies)


@cache
def _parsed(
    text: str,
) -> tuple[str, bool, tuple[tuple[tuple[tuple[str, ...], int | None], ...], ...]]:
    """Split a piece into its name, whether it is transposed, and items of factors (sections, index)."""
    name, _, rest = text.partition(": ")
    words = rest.split()
    transposed = words[:1] == ["T"]
    items = []
    for word in words[transposed:]:
        factors = []
        for factor in word.split("."):
            sections, _, index = factor.partition("#")
            factors.append((tuple(sections.split("+")), int(index) if index else None))
        items.append(tuple(factors))
    return name, transposed, tuple(items)


def size_of(term: str, dims: Dims) -> int:
    """Return the size that a section names: a number, a dimension, or a product of these.

    Raises:
        LayoutError: the model's config does not give this dimension.
    """
    try:
        return prod(int(word) if word.isdigit() else dims[word] for word in term.split("*"))
    except KeyError as error:
        raise LayoutError(
            f"a rule needs the dimension {term!r}, which the config does not give; is this the right "
            "family for it?"
        ) from error


def resolve(
    text: str,
    dims: Dims,
    prefix: str,
    expert: int = 0,
    rename: Callable[[str], str] = str,
) -> Piece:
    """Return a piece with numbers for names; `rename` has the last word on its tensor's name.

    Example:
        >>> resolve("up.weight: inter+inter#1 hidden", {"inter": 6, "hidden": 4}, "mlp.")
        Piece(name='mlp.up.weight', shape=(12, 4), grid=(12, 4), start=(6, 0), axes=((0,), (1,)), \
extents=((6,), (4,)))
    """
    name, transposed, items = _parsed(text)
    shape: list[int] = []
    grid: list[int] = []
    start: list[int] = []
    axes: list[tuple[int, ...]] = []
    extents: list[tuple[int, ...]] = []
    for item in items:
        side = 1
        item_axes, item_extents = [], []
        for sections, index in item:
            is_expert = sections == ("e",)
            sizes = [dims["experts"]] if is_expert else [size_of(term, dims) for term in sections]
            first = expert if is_expert else sum(sizes[: index or 0])
            item_axes.append(len(grid))
            item_extents.append(sum(sizes) if index is None else sizes[index])
            grid.append(sum(sizes))
            start.append(first)
            side *= sum(sizes)
        shape.append(side)
        if item != ((("e",), None),):
            axes.append(tuple(item_axes))
            extents.append(tuple(item_extents))
    if transposed:
        axes.reverse()
        extents.reverse()
    return Piece(
        rename(prefix + name.replace("{e}", str(expert))),
        tuple(shape),
        tuple(grid),
        tuple(start),
        tuple(axes),
        tuple(extents),
    )


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a rank stands among those that cut a tensor between them.

    Attributes:
        index, ways: which of how many.
        copies: how many ranks hold the same cut, all over the layout.
        padded_rows: rows of the whole, padding included, for kind `vocab`.
        groups: query groups of the model.
    """

    index: int
    ways: int
    copies: int
    groups: int = 1
    padded_rows: int | None = None


def arrange(
    kind: str, pieces: Sequence[Piece], cut: Cut, local: str
) -> tuple[tuple[int, ...], list[Block], int]:
    """Return shape, blocks and padding elements of the local tensor that a rank holds.

    Raises:
        LayoutError: the pieces cannot be cut that way: sides that do not divide, or do not fit.
    """
    sides = [piece.sides for piece in pieces]
    whole = [(0, n) for n in sides[0]]
    runs: list[tuple[int, list[tuple[int, int]], int, int]] = []  # piece, ranges, local row, copies
    rows, columns, padding = 0, list(sides[0][1:]), 0
    if kind == "first" and cut.index:
        rows, padding = sides[0][0], prod(sides[0])
    elif kind == "row":
        first, count = _window(sides[0][1], cut.ways, cut.index, local)
        runs.append((0, [whole[0], (first, count), *whole[2:]], 0, 1))
        rows, columns[0] = sides[0][0], count
    elif kind == "vocab":
        real = sides[0][0]
        padded = real if cut.padded_rows is None else cut.padded_rows
        first, rows = _window(padded, cut.ways, cut.index, local)
        held = max(0, min(first + rows, real) - first)
        padding = (rows - held) * prod(columns)
        runs.append((0, [(min(first, real), held), *whole[1:]], 0, 1))
    else:
        for part, ways, copies in _parts(kind, sides, cut, local):
            length = sum(count for _, _, count in part)
            low, count = _window(length, ways, cut.index * ways // cut.ways, local)
            for index, first, held in _slice(part, low, count):
                runs.append((index, [(first, held), *whole[1:]], rows, copies))
                rows += held
    shape = (rows, *columns) if sides[0] else ()
    strides = row_major(shape)
    blocks = [
        block
        for index, ranges, row, copies in runs
        for block in pieces[index].blocks(
            ranges if sides[0] else [],
            local,
            row * strides[0] if strides else 0,
            strides,
            cut.copies * copies,
        )
        if block.count
    ]
    return shape, blocks, padding


def _parts(
    kind: str, sides: Sequence[tuple[int, ...]], cut: Cut, local: str
) -> Iterator[tuple[list[tuple[int, int, int]], int, int]]:
    """Yield what is cut as one: (piece, first row, rows) in order, into how many cuts, copies of each."""
    if len({side[1:] for side in sides}) != 1:
        raise LayoutError(f"{local}: pieces of shapes {sides} do not stack", tensor=local)
    rows = [side[0] if side else 1 for side in sides]
    if kind == "qkv":
        if any(n % cut.groups for n in rows):
            raise LayoutError(f"{local}: rows {rows} are not {cut.groups} groups", tensor=local)
        order = [
            (index, group * (n // cut.groups), n // cut.groups)
            for group in range(cut.groups)
            for index, n in enumerate(rows)
        ]
        yield order, cut.ways, 1
        return
    for index, n in enumerate(rows):
        ways = cut.ways
        if kind in ("replicated", "first"):
            ways = 1
        elif kind == "groups" or (kind == "heads" and index):
            ways = min(ways, cut.groups)
        elif kind not in KINDS:
            raise LayoutError(f"{local}: no kind {kind!r}; there are {sorted(KINDS)}", tensor=local)
        if cut.ways % ways:
            raise LayoutError(f"{local}: {cut.ways} ranks for {ways} groups", tensor=local)
        copies = cut.ways // ways if kind in ("heads", "groups") else 1
        yield [(index, 0, n)], ways, copies


def _window(length: int, ways: int, index: int, local: str) -> tuple[int, int]:
    if length % ways:
        raise LayoutError(f"{local}: {length} cannot be cut into {ways} equal parts", tensor=local)
    return index * (length // ways), length // ways


def _slice(
    part: Sequence[tuple[int, int, int]], low: int, count: int
) -> Iterator[tuple[int, int, int]]:
    """Yield what of consecutive rows lies in `low : low + count`."""
    place = 0
    for index, first, rows in part:
        a, b = max(place, low), min(place + rows, low + count)
        if a < b:
            yield index, first + a - place, b - a
        place += rows
