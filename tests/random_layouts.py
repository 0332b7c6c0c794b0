"""Random layouts: every tensor cut into random boxes, every box put somewhere on some ranks."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np

from syncline.layouts import Block, CanonicalTensor, Layout, LocalTensor, Placement
from syncline.layouts.blocks import Box, row_major
from syncline.types import Bits, TensorMeta, unsigned

DTYPES = ("U8", "BF16", "F32", "I64")


def random_catalog(rng: np.random.Generator) -> dict[str, CanonicalTensor]:
    """Up to five tensors of up to four axes: 0-d, 1-d, with sides of 1, some empty."""
    catalog = {}
    for number in range(rng.integers(1, 6)):
        shape = tuple(int(side) for side in rng.integers(1, 8, rng.integers(0, 5)))
        if shape and rng.random() < 0.05:
            shape = (0, *shape[1:])
        meta = TensorMeta(f"t{number}", str(rng.choice(DTYPES)), shape)
        catalog[meta.name] = CanonicalTensor(meta, shape)
    return catalog


def random_split(tensor: CanonicalTensor, rng: np.random.Generator) -> CanonicalTensor:
    """The same tensor, some axes of which are split in two where they divide."""
    grid: list[int] = []
    for side in tensor.meta.shape:
        factors = [n for n in range(2, side) if side % n == 0]
        outer = int(rng.choice(factors)) if factors and rng.random() < 0.5 else 1
        grid += [outer, side // outer] if outer > 1 else [side]
    return CanonicalTensor(tensor.meta, tuple(grid))


def random_boxes(extents: tuple[int, ...], rng: np.random.Generator) -> list[Box]:
    """Boxes that tile an array: cut in two at random, again and again."""
    boxes = [(tuple(0 for _ in extents), extents)]
    for _ in range(rng.integers(0, 6)):
        start, shape = boxes.pop(int(rng.integers(len(boxes))))
        axes = [axis for axis, side in enumerate(shape) if side > 1]
        if not axes:
            boxes.append((start, shape))
            continue
        axis = int(rng.choice(axes))
        cut = int(rng.integers(1, shape[axis]))
        for first, side in ((0, cut), (cut, shape[axis] - cut)):
            moved = tuple(a + first * (k == axis) for k, a in enumerate(start))
            boxes.append((moved, tuple(side if k == axis else n for k, n in enumerate(shape))))
    return boxes


def random_layout(
    catalog: Mapping[str, CanonicalTensor], ranks: int, rng: np.random.Generator
) -> Layout:
    """A legal layout of the catalog: permuted, padded and flat local tensors, with copies."""
    tensors: list[list[LocalTensor]] = [[] for _ in range(ranks)]
    blocks: list[list[Block]] = [[] for _ in range(ranks)]
    for name, tensor in catalog.items():
        if prod(tensor.grid) == 0:
            continue
        for number, box in enumerate(random_boxes(tensor.grid, rng)):
            copies = int(rng.integers(1, ranks + 1))
            for rank in rng.permutation(ranks)[:copies].tolist():
                local = f"{name}.{number}"
                made, block = _place(tensor, box, local, copies, rng)
                tensors[rank].append(made)
                blocks[rank].append(block)
    return Layout(
        dict(catalog),
        tuple(Placement(r, tuple(tensors[r]), tuple(blocks[r])) for r in range(ranks)),
    )


def _place(
    tensor: CanonicalTensor, box: Box, local: str, copies: int, rng: np.random.Generator
) -> tuple[LocalTensor, Block]:
    start, shape = box
    order = rng.permutation(len(shape)).tolist()
    extra = rng.integers(0, 3, len(shape)).tolist()
    before = [int(rng.integers(0, n + 1)) for n in extra]
    whole = [shape[axis] + n for axis, n in zip(order, extra, strict=True)]
    steps = row_major(whole)
    offset = sum(a * step for a, step in zip(before, steps, strict=True))
    strides = [0] * len(shape)
    for step, axis in zip(steps, order, strict=True):
        strides[axis] = step
    if rng.random() < 0.5:
        whole = [prod(whole)]
    padding = prod(whole) - prod(shape)
    dtype = tensor.meta.dtype
    return (
        LocalTensor(local, dtype, tuple(whole), padding),
        Block(tensor.meta.name, start, shape, local, offset, tuple(strides), copies),
    )


def random_values(
    catalog: Mapping[str, CanonicalTensor], rng: np.random.Generator
) -> dict[str, tuple[TensorMeta, Bits]]:
    """Random bits for every tensor."""
    values = {}
    for name, tensor in catalog.items():
        meta = tensor.meta
        raw = rng.integers(0, 256, meta.nbytes, np.uint8)
        values[name] = (meta, raw.view(unsigned(meta.unit_bytes)).copy())
    return values


def empty_shards(layout: Layout) -> dict[int, dict[str, Bits]]:
    """Memory of every rank, filled with zeros."""
    shards: dict[int, dict[str, Bits]] = {}
    for placement in layout.placements:
        shards[placement.rank] = {
            tensor.name: np.zeros(
                prod(tensor.shape), unsigned(TensorMeta("", tensor.dtype, ()).unit_bytes)
            )
            for tensor in placement.tensors
        }
    return shards
