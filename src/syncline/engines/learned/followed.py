"""What a tensor that a loader made of checkpoint tensors holds: boxes, each an affine view of one of them.

Only what moves elements without changing them is followed. Anything else is an error whose message says
what was lost; the tensor is then not mapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from syncline.errors import LayoutError
from syncline.layouts.blocks import Box, flat_boxes, overlap, row_major

_MOST_PIECES = 4096


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a followed tensor, and where its elements come from.

    The element at `start + i` is element `offset + sum(i[k] * strides[k])` of the checkpoint tensor `name`.
    """

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]

    @property
    def box(self) -> Box:
        """Start and shape in the followed tensor."""
        return self.start, self.shape


@dataclass(frozen=True, slots=True)
class Followed:
    """A tensor whose every element is known to be a certain element of a checkpoint tensor.

    Attributes:
        shape: of the tensor.
        pieces: boxes that tile it; none if it is empty.

    Example:
        >>> whole = Followed.whole("w", (4, 6))
        >>> whole.sliced(0, 2, 4, 1).permuted((1, 0)).pieces
        (Piece(name='w', start=(0, 0), shape=(6, 2), offset=12, strides=(1, 6)),)
    """

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @classmethod
    def whole(cls, name: str, shape: Sequence[int]) -> Followed:
        """Return a checkpoint tensor itself."""
        sides = tuple(shape)
        piece = Piece(name, (0,) * len(sides), sides, 0, row_major(sides))
        return cls(sides, (piece,) if prod(sides) else ())

    @property
    def names(self) -> tuple[str, ...]:
        """The checkpoint tensors that it comes from, each once."""
        return tuple(dict.fromkeys(piece.name for piece in self.pieces))

    def sliced(self, axis: int, first: int, stop: int, step: int) -> Followed:
        """Return `self[first:stop:step]` along an axis; the arguments are in range.

        Raises:
            LayoutError: a step over pieces that were joined along the axis.
        """
        count = max(0, -(-(stop - first) // step))
        shape = _put(self.shape, axis, count)
        if not prod(shape):
            return Followed(shape, ())
        if step != 1:
            if any(piece.shape[axis] != self.shape[axis] for piece in self.pieces):
                raise LayoutError("a step was taken over joined tensors")
            return Followed(
                shape, tuple(_stepped(piece, axis, first, count, step) for piece in self.pieces)
            )
        window = (_put((0,) * len(shape), axis, first), shape)
        moved = (_inside(piece, window) for piece in self.pieces)
        return Followed(shape, tuple(piece for piece in moved if piece is not None))

    def permuted(self, axes: Sequence[int]) -> Followed:
        """Return the tensor with its axes in this order."""

        def ordered(values: Sequence[int]) -> tuple[int, ...]:
            return tuple(values[axis] for axis in axes)

        pieces = (
            replace(
                piece,
                start=ordered(piece.start),
                shape=ordered(piece.shape),
                strides=ordered(piece.strides),
            )
            for piece in self.pieces
        )
        return Followed(ordered(self.shape), tuple(pieces))

    def reshaped(self, shape: Sequence[int]) -> Followed:
        """Return the same elements, in row-major order, under another shape.

        Raises:
            LayoutError: an axis of the new shape would not be affine in the checkpoint tensor.
        """
        target = tuple(shape)
        if target == self.shape:
            return self
        if not self.pieces:
            return Followed(target, ())
        if len(self.pieces) == 1:
            return Followed(target, tuple(_reshaped(self.pieces[0], target, _MOST_PIECES)))
        mine, other = _without_ones(self.shape), _without_ones(target)
        if mine != other:
            raise LayoutError("joined tensors were given another shape")
        return self._with_ones(target)

    def _with_ones(self, target: tuple[int, ...]) -> Followed:
        """Return the tensor with axes of length 1 where `target` has them, of several pieces."""
        pieces = []
        for piece in self.pieces:
            axes = iter([i for i, side in enumerate(self.shape) if side != 1])
            kept = [next(axes) if side != 1 else None for side in target]

            def spread(
                values: Sequence[int], empty: int, kept: list[int | None] = kept
            ) -> tuple[int, ...]:
                return tuple(empty if axis is None else values[axis] for axis in kept)

            pieces.append(
                replace(
                    piece,
                    start=spread(piece.start, 0),
                    shape=spread(piece.shape, 1),
                    strides=spread(piece.strides, 0),
                )
            )
        return Followed(target, tuple(pieces))

    def expanded(self, shape: Sequence[int]) -> Followed:
        """Return the tensor with axes of length 1 added in front; nothing may be repeated.

        Raises:
            LayoutError: an element would stand in several places.
        """
        if prod(shape) != prod(self.shape):
            raise LayoutError("its elements were repeated")
        return self.reshaped(shape)

    def taken(self, axis: int, indices: Sequence[int]) -> Followed:
        """Return the slices at these indices along an axis, in this order.

        Raises:
            LayoutError: there are so many stretches that they are no layout but a shuffle.
        """
        stretches = list(_stretches(indices))
        if len(stretches) > _MOST_PIECES:
            raise LayoutError("its rows were shuffled")
        return joined([self.sliced(axis, a, b, 1) for a, b in stretches], axis)


def joined(parts: Sequence[Followed], axis: int) -> Followed:
    """Return what `torch.cat` makes of the parts.

    Example:
        >>> both = joined([Followed.whole("a", (2, 3)), Followed.whole("b", (1, 3))], 0)
        >>> both.shape, [piece.start for piece in both.pieces]
        ((3, 3), [(0, 0), (2, 0)])
    """
    pieces: list[Piece] = []
    place = 0
    for part in parts:
        pieces.extend(
            replace(piece, start=_put(piece.start, axis, piece.start[axis] + place))
            for piece in part.pieces
        )
        place += part.shape[axis]
    return Followed(_put(parts[0].shape, axis, place), tuple(pieces))


def _put(values: Sequence[int], axis: int, value: int) -> tuple[int, ...]:
    return (*values[:axis], value, *values[axis + 1 :])


def _without_ones(shape: Iterable[int]) -> tuple[int, ...]:
    return tuple(side for side in shape if side != 1)


def _stepped(piece: Piece, axis: int, first: int, count: int, step: int) -> Piece:
    stride = piece.strides[axis]
    return replace(
        piece,
        shape=_put(piece.shape, axis, count),
        offset=piece.offset + first * stride,
        strides=_put(piece.strides, axis, stride * step),
    )


def _inside(piece: Piece, window: Box) -> Piece | None:
    """Return the part of a piece that lies in a window, in the window's coordinates."""
    shared = overlap(piece.box, window)
    if shared is None:
        return None
    start, shape = shared
    moved = sum((a - b) * s for a, b, s in zip(start, piece.start, piece.strides, strict=True))
    return replace(
        piece,
        start=tuple(a - b for a, b in zip(start, window[0], strict=True)),
        shape=shape,
        offset=piece.offset + moved,
    )


def _reshaped(piece: Piece, target: tuple[int, ...], most: int) -> Iterator[Piece]:
    """Yield the pieces of another shape that hold the same elements in row-major order.

    Raises:
        LayoutError: they are more than `most`, or no boxes.
    """
    strides = _regrouped(piece.shape, piece.strides, target)
    if strides is not None:
        yield replace(piece, start=(0,) * len(target), shape=target, strides=strides)
        return
    axis = next(axis for axis, side in enumerate(piece.shape) if side != 1)
    side, inner = piece.shape[axis], prod(piece.shape[axis + 1 :])
    for i in range(side):
        boxes = list(flat_boxes(target, i * inner, inner))
        if len(boxes) != 1 or side > most:
            raise LayoutError("it was given another shape after its axes were rearranged")
        ((start, shape),) = boxes
        row = replace(
            piece,
            shape=piece.shape[axis + 1 :],
            strides=piece.strides[axis + 1 :],
            offset=piece.offset + i * piece.strides[axis],
        )
        for part in _reshaped(row, shape, most // side):
            moved = tuple(a + b for a, b in zip(start, part.start, strict=True))
            yield replace(part, start=moved)


def _regrouped(
    shape: Sequence[int], strides: Sequence[int], target: Sequence[int]
) -> tuple[int, ...] | None:
    """Return the strides of the same elements under another shape, as torch's `view` finds them.

    None if there are none.
    """
    merged: list[tuple[int, int]] = []
    for count, stride in zip(shape, strides, strict=True):
        if count == 1:
            continue
        if merged and merged[-1][1] == stride * count:
            merged[-1] = (merged[-1][0] * count, stride)
        else:
            merged.append((count, stride))
    found: list[int] = []
    for side in reversed(target):
        if side == 1:
            found.append(0)
            continue
        count, stride = merged.pop()
        if count % side:
            return None
        found.append(stride)
        if count != side:
            merged.append((count // side, stride * side))
    return tuple(reversed(found))


def _stretches(indices: Sequence[int]) -> Iterable[tuple[int, int]]:
    """Yield (first, stop) of the runs of consecutive indices, in order."""
    first = previous = None
    for index in indices:
        if first is None or previous is None or index != previous + 1:
            if first is not None and previous is not None:
                yield first, previous + 1
            first = index
        previous = index
    if first is not None and previous is not None:
        yield first, previous + 1


Follow = Callable[..., Followed | list[Followed]]
"""What an operation makes of followed tensors: one, or several."""
