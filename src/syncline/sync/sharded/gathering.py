"""Spans of canonical tensors out of the pieces that ranks hold: what to send of one, and how to put one together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from syncline.layouts import Layout
from syncline.layouts.blocks import Block, Box, Run, flat_boxes, overlap, part, run_of
from syncline.layouts.dense import canonical_view, local_view
from syncline.layouts.values import to_canonical
from syncline.sync.sharded.shard import Shard
from syncline.sync.sharded.shares import Shares
from syncline.types import Bits, TensorMeta, unsigned

Take = Callable[[int, int], memoryview]
"""Returns a rank's next so many bytes."""


class Told:
    """The bytes that one rank sent of a span, taken from the front."""

    def __init__(self, message: bytes | memoryview) -> None:
        self._left = memoryview(message)

    @property
    def left_bytes(self) -> int:
        """How many were not taken yet."""
        return self._left.nbytes

    def take(self, nbytes: int) -> memoryview:
        """Return the next so many."""
        taken, self._left = self._left[:nbytes], self._left[nbytes:]
        return taken


class Gathering:
    """One rank's view of spans: the bytes that it answers for, and whole spans of tensors that it owns.

    Both sides take a rank's pieces of a span in the order of their boxes.
    """

    def __init__(self, layout: Layout, shares: Shares, shard: Shard) -> None:
        self._catalog = layout.catalog
        self._answers = shares.answers
        self._bits = shard.bits()
        self._mine: dict[str, list[Block]] = {}
        for held in (held for blocks in shares.blocks.values() for held in blocks):
            if held.is_answered:
                block = held.run.block
                self._mine.setdefault(block.name, []).append(block)
        for blocks in self._mine.values():
            blocks.sort(key=_box)

    def pieces(self, meta: TensorMeta, start: int, count: int) -> list[bytes]:
        """Return what this rank answers for of `count` units from `start` on; nothing if none of it."""
        return [
            to_canonical(
                local_view(run, meta, self._bits[run.block.local]), run.block, meta
            ).tobytes()
            for block in self._mine.get(meta.name, [])
            for run in self._within(block, meta, start, count)
        ]

    def senders(self, meta: TensorMeta, start: int, count: int) -> dict[int, list[Run]]:
        """Return by rank the pieces of a span of a tensor that this rank owns."""
        found: dict[int, list[Run]] = {}
        for rank, block in sorted(self._answers.get(meta.name, ()), key=_box_of):
            runs = self._within(block, meta, start, count)
            if runs:
                found.setdefault(rank, []).extend(runs)
        return found

    def span(self, meta: TensorMeta, start: int, count: int, take: Take) -> Bits:
        """Put a span of a tensor that this rank owns together. Memory: the span."""
        window = np.empty(count, unsigned(meta.unit_bytes))
        for rank, runs in self.senders(meta, start, count).items():
            for run in runs:
                values = np.frombuffer(take(rank, run.block.count * meta.unit_bytes), window.dtype)
                there = canonical_view(replace(run, canonical=run.canonical - start), meta, window)
                there[...] = values.reshape(there.shape)
        return window

    def _within(self, block: Block, meta: TensorMeta, start: int, count: int) -> list[Run]:
        """Return what of a block lies in a span of its tensor."""
        grid = self._catalog[meta.name].grid
        boxes = (overlap(box, block.box) for box in flat_boxes(grid, start, count))
        return [run_of(part(block, box), grid) for box in boxes if box is not None]


def _box(block: Block) -> Box:
    return block.box


def _box_of(pair: tuple[int, Block]) -> Box:
    return pair[1].box
