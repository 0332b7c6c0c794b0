"""The record of a canonical tensor: where trainer and engines hold it, how it lies there, what it is now."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from syncline.errors import PlanError
from syncline.layouts import Layout
from syncline.layouts.blocks import Block, CanonicalTensor, show
from syncline.layouts.coverage import holders

Stage = Callable[[int], Mapping[str, int]]
State = Callable[[str], Mapping[str, Any]]
_UNKNOWN = {"version": None, "fingerprint": None}


def record(
    name: str,
    source: Layout,
    target: Layout,
    *,
    engines: int = 1,
    stage: Stage | None = None,
    state: State | None = None,
) -> dict[str, Any]:
    """Return everything that a plan knows of one canonical tensor, as JSON would have it (see `records`).

    Raises:
        PlanError: neither layout has the tensor.
    """
    more: dict[str, Any] = {"engines": engines, "stage": stage, "state": state}
    for found in records(source, target, [name], **more):
        return found
    raise PlanError(f"{name}: in neither layout", tensor=name)


def records(
    source: Layout,
    target: Layout,
    names: Iterable[str] | None = None,
    *,
    engines: int = 1,
    stage: Stage | None = None,
    state: State | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the records of these tensors, by default of all, that one of the layouts has.

    Args:
        engines: how many engines have the target layout; a target speaks of its rank in each of them.
        stage: where a source rank stands, such as `{"tp": 1, "pp": 0, ...}`; adds it to each source.
        state: version and fingerprint of a tensor; without it both are None.

    Yields:
        name, shape, dtype, nbytes and grid of the canonical tensor; sources, targets, engines; version and
        fingerprint. A source or target has: rank; box, and `cuts`, the axes of the grid along which it is
        less than the tensor; experts, the ids it holds (None: not of an expert); replicas, all ranks that
        hold the same box; local name, local shape, dtype, offset and strides; transforms, the words
        `transposed`, `interleaved` and `add N`, and copies and is_alias as in `Block`.
    """
    sides = [(holders(layout), _locals(layout)) for layout in (source, target)]
    for name in {**source.catalog, **target.catalog} if names is None else names:
        tensor = source.catalog.get(name) or target.catalog.get(name)
        if tensor is None:
            continue
        experts = _experts(name)
        sources, targets = (
            [
                {
                    **_place(rank, block, local[rank][block.local], tensor, experts),
                    "replicas": list(dict.fromkeys(other for other, _ in held)),
                }
                for held in by_name.get(name, {}).values()
                for rank, block in held
            ]
            for by_name, local in sides
        )
        if stage is not None:
            sources = [{**place, **stage(place["rank"])} for place in sources]
        yield {
            "name": name,
            "shape": list(tensor.meta.shape),
            "dtype": tensor.meta.dtype,
            "nbytes": tensor.meta.nbytes,
            "grid": list(tensor.grid),
            "sources": sources,
            "engines": engines,
            "targets": targets,
            **(_UNKNOWN if state is None else state(name)),
        }


def _locals(layout: Layout) -> dict[int, dict[str, tuple[tuple[int, ...], str]]]:
    return {
        placement.rank: {tensor.name: (tensor.shape, tensor.dtype) for tensor in placement.tensors}
        for placement in layout.placements
    }


def _place(
    rank: int,
    block: Block,
    local: tuple[tuple[int, ...], str],
    tensor: CanonicalTensor,
    experts: int | list[int] | None,
) -> dict[str, Any]:
    start, shape = block.box
    cuts = [
        {"axis": axis, "start": first, "count": count, "of": whole}
        for axis, (first, count, whole) in enumerate(zip(start, shape, tensor.grid, strict=True))
        if count != whole
    ]
    if isinstance(experts, int):
        experts = list(range(start[experts], start[experts] + shape[experts]))
    return {
        "rank": rank,
        "box": show(block.box),
        "cuts": cuts,
        "experts": experts,
        "local": block.local,
        "local_shape": list(local[0]),
        "dtype": local[1],
        "offset": block.offset,
        "strides": list(block.strides),
        "transforms": _transforms(block, tensor),
        "copies": block.copies,
        "is_alias": block.is_alias,
    }


def _transforms(block: Block, tensor: CanonicalTensor) -> list[str]:
    """Return in words what is done to a box besides moving it."""
    steps = [s for s, n in zip(block.strides, block.shape, strict=True) if n > 1]
    words = ["transposed"] if steps != sorted(steps, reverse=True) else []
    if _is_interleaved(block, tensor):
        words.append("interleaved")
    if block.add:
        words.append(f"add {block.add}")
    return words


def _is_interleaved(block: Block, tensor: CanonicalTensor) -> bool:
    """Say whether the box takes a part again and again along one axis of the tensor."""
    axis = 0
    for side in tensor.meta.shape:
        first, product = axis, 1
        while axis < len(tensor.grid) and product < side:
            if axis > first and block.shape[axis] < tensor.grid[axis] and product > 1:
                return True
            product *= tensor.grid[axis]
            axis += 1
        axis = max(axis, first + 1)
    return False


def _experts(name: str) -> int | list[int] | None:
    """Return the number of the expert in a name, or the axis along which a tensor stacks them."""
    _, found, rest = name.partition(".experts.")
    if not found:
        return None
    number = rest.partition(".")[0]
    return [int(number)] if number.isdigit() else 0
