"""Torch's operations on followed tensors: those that only move elements, by the name of the operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any

from syncline.engines.learned.followed import Follow, Followed, joined
from syncline.errors import LayoutError


def _same(value: Followed, *_: Any, **__: Any) -> Followed:
    return value


def _slice(
    value: Followed, axis: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Followed:
    at = axis % len(value.shape)
    first, stop, _ = slice(start, end).indices(value.shape[at])
    return value.sliced(at, first, max(first, stop), step)


def _select(value: Followed, axis: int, index: int) -> Followed:
    at = axis % len(value.shape)
    first = index % value.shape[at]
    kept = value.sliced(at, first, first + 1, 1)
    return kept.reshaped((*value.shape[:at], *value.shape[at + 1 :]))


def _transpose(value: Followed, one: int, other: int) -> Followed:
    axes = list(range(len(value.shape)))
    axes[one], axes[other] = axes[other], axes[one]
    return value.permuted(axes)


def _t(value: Followed) -> Followed:
    return _transpose(value, 0, 1) if len(value.shape) == 2 else value


def _permute(value: Followed, axes: Sequence[int]) -> Followed:
    return value.permuted([axis % len(value.shape) for axis in axes])


def _view(value: Followed, shape: Sequence[int], *_: Any) -> Followed:
    known = prod(side for side in shape if side != -1)
    return value.reshaped([prod(value.shape) // known if side == -1 else side for side in shape])


def _unsqueeze(value: Followed, axis: int) -> Followed:
    at = axis % (len(value.shape) + 1)
    return value.reshaped((*value.shape[:at], 1, *value.shape[at:]))


def _squeeze(value: Followed, axes: int | Sequence[int] | None = None) -> Followed:
    sides = len(value.shape)
    listed = range(sides) if axes is None else [axes] if isinstance(axes, int) else axes
    dropped = {axis % sides for axis in listed if value.shape[axis] == 1} if sides else set()
    return value.reshaped([n for axis, n in enumerate(value.shape) if axis not in dropped])


def _split(value: Followed, size: int | Sequence[int], axis: int = 0) -> list[Followed]:
    at = axis % len(value.shape)
    side = value.shape[at]
    sizes = [min(size, side - i) for i in range(0, side, size)] if isinstance(size, int) else size
    parts, place = [], 0
    for count in sizes:
        parts.append(value.sliced(at, place, place + count, 1))
        place += count
    return parts


def _unbind(value: Followed, axis: int = 0) -> list[Followed]:
    return [_select(value, axis, i) for i in range(value.shape[axis % len(value.shape)])]


def _cat(values: Sequence[Followed], axis: int = 0) -> Followed:
    # torch lets flat empty tensors join anything.
    parts = [value for value in values if value.shape != (0,)]
    return joined(parts, axis % len(parts[0].shape)) if parts else values[0]


def _stack(values: Sequence[Followed], axis: int = 0) -> Followed:
    at = axis % (len(values[0].shape) + 1)
    return joined([_unsqueeze(value, at) for value in values], at)


def _index_select(value: Followed, axis: int, indices: Any) -> Followed:
    return value.taken(axis % len(value.shape), indices.tolist())


def _index(value: Followed, indices: Sequence[Any]) -> Followed:
    used = [(axis, one) for axis, one in enumerate(indices) if one is not None]
    if len(used) != 1 or used[0][1].ndim != 1 or not _is_integer(used[0][1]):
        raise LayoutError("it was indexed by several tensors, or by a mask")
    axis, chosen = used[0]
    side = value.shape[axis]
    return value.taken(axis, [index % side for index in chosen.tolist()])


def _is_integer(tensor: Any) -> bool:
    return not tensor.dtype.is_floating_point and str(tensor.dtype) != "torch.bool"


def _expand(value: Followed, shape: Sequence[int], **_: Any) -> Followed:
    ahead = len(shape) - len(value.shape)
    own = (*(1 for _ in range(ahead)), *value.shape)
    return value.expanded([a if n == -1 else n for n, a in zip(shape, own, strict=True)])


FOLLOWED: Mapping[str, Follow] = MappingProxyType(
    {
        "aten::_reshape_alias": _view,
        "aten::_to_copy": _same,
        "aten::_unsafe_view": _view,
        "aten::alias": _same,
        "aten::cat": _cat,
        "aten::clone": _same,
        "aten::contiguous": _same,
        "aten::detach": _same,
        "aten::expand": _expand,
        "aten::index": _index,
        "aten::index_select": _index_select,
        "aten::lift_fresh": _same,
        "aten::permute": _permute,
        "aten::select": _select,
        "aten::slice": _slice,
        "aten::split": _split,
        "aten::split_with_sizes": _split,
        "aten::squeeze": _squeeze,
        "aten::stack": _stack,
        "aten::t": _t,
        "aten::transpose": _transpose,
        "aten::unbind": _unbind,
        "aten::unsqueeze": _unsqueeze,
        "aten::view": _view,
    }
)
"""By operator name, without its overload: how it moves elements."""
