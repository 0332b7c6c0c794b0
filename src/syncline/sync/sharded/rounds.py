"""A full version out of shards: in every round each writer gets one window of the tensor it writes.

No tensor is put together anywhere. A rank holds one window of its own and the pieces that it sends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from syncline.errors import FormatError
from syncline.layouts import Layout
from syncline.layouts.blocks import Block, Box, Run, flat_boxes, overlap, part, run_of
from syncline.layouts.dense import canonical_view, local_view
from syncline.layouts.values import to_canonical
from syncline.sync.sharded.part import full_order
from syncline.sync.sharded.ranks import Ranks
from syncline.sync.sharded.shard import Shard
from syncline.sync.sharded.shares import Shares
from syncline.types import WINDOW_UNITS, Bits, TensorMeta, Window, unsigned

Place = tuple[TensorMeta, int]
"""A window: its tensor, and where it begins."""


class Rounds:
    """One rank's side of the rounds; every rank makes one and runs it to its end.

    Args:
        shard: what this rank holds of the version.

    Collective: yes. Memory: one window, and this rank's share of one window for each writer.
    """

    def __init__(self, layout: Layout, shares: Shares, ranks: Ranks, shard: Shard) -> None:
        self._catalog = layout.catalog
        self._shares = shares
        self._ranks = ranks
        self._bits = shard.bits()
        self._schedule = {writer: _places(layout, shares, writer) for writer in shares.writers}
        self._mine: dict[str, list[Block]] = {}
        for held in (held for blocks in shares.blocks.values() for held in blocks):
            if held.is_answered:
                block = held.run.block
                self._mine.setdefault(block.name, []).append(block)
        # Both sides take a rank's pieces in the order of their boxes; local tensors may lie in another.
        for blocks in self._mine.values():
            blocks.sort(key=_box)
        self._done = 0
        self._unconfirmed: set[int] = set()

    def windows(self, meta: TensorMeta) -> Iterator[Window]:
        """Yield the windows of a tensor that this rank writes; each takes one round of all ranks."""
        nothing = np.empty(0, np.uint32)
        for start in range(0, meta.unit_count, WINDOW_UNITS):
            bits = self._round()
            if bits is None:
                raise FormatError(f"{meta.name}: no round is left for its window at {start}")
            yield Window(start, bits, nothing, bits[:0], bits[:0])

    def finish(self) -> None:
        """Take part in the rounds in which only others write, and wait until they have what was sent."""
        while self._done < max(map(len, self._schedule.values())):
            self._round()
        self._confirm()

    def _round(self) -> Bits | None:
        """Send what this rank has of every writer's window; return its own window, if it has one."""
        self._confirm()  # or a fast rank would have all that it sends in flight at once
        number, self._done = self._done, self._done + 1
        own: bytes | None = None
        for writer, places in self._schedule.items():
            if number >= len(places):
                continue
            meta, start = places[number]
            blocks = self._mine.get(meta.name, [])
            pieces = [run for block in blocks for run in self._within(block, meta, start)]
            if not pieces:
                continue
            message = b"".join(self._value(run, meta) for run in pieces)
            if writer == self._ranks.rank:
                own = message
                continue
            self._ranks.send(writer, message)
            self._unconfirmed.add(writer)
        places = self._schedule.get(self._ranks.rank, [])
        return self._window(*places[number], own) if number < len(places) else None

    def _confirm(self) -> None:
        for writer in sorted(self._unconfirmed):
            self._ranks.receive(writer, "that it has its window")
        self._unconfirmed.clear()

    def _window(self, meta: TensorMeta, start: int, own: bytes | None) -> Bits:
        """Return a window of a tensor that this rank writes, out of the ranks' pieces."""
        stop = min(start + WINDOW_UNITS, meta.unit_count)
        window = np.empty(stop - start, unsigned(meta.unit_bytes))
        pieces: dict[int, list[Run]] = {}
        for rank, block in sorted(self._shares.answers[meta.name], key=lambda pair: _box(pair[1])):
            runs = self._within(block, meta, start)
            if runs:
                pieces.setdefault(rank, []).extend(runs)
        for rank, runs in pieces.items():
            message = own if rank == self._ranks.rank else None
            if message is None:
                message = self._ranks.receive(rank, f"its piece of {meta.name}")
                self._ranks.send(rank, b"")
            wanted_bytes = sum(run.block.count for run in runs) * meta.unit_bytes
            if len(message) != wanted_bytes:
                raise FormatError(
                    f"{meta.name}: rank {rank} sent {len(message)} bytes of the window at {start}, "
                    f"expected {wanted_bytes}: the ranks do not have one layout",
                    tensor=meta.name,
                )
            place = 0
            for run in runs:
                nbytes = run.block.count * meta.unit_bytes
                values = np.frombuffer(message[place : place + nbytes], window.dtype)
                there = canonical_view(replace(run, canonical=run.canonical - start), meta, window)
                there[...] = values.reshape(there.shape)
                place += nbytes
        return window

    def _within(self, block: Block, meta: TensorMeta, start: int) -> list[Run]:
        """Return what of a block lies in the window of its tensor that begins at `start`."""
        grid = self._catalog[meta.name].grid
        count = min(WINDOW_UNITS, meta.unit_count - start)
        boxes = (overlap(box, block.box) for box in flat_boxes(grid, start, count))
        return [run_of(part(block, box), grid) for box in boxes if box is not None]

    def _value(self, run: Run, meta: TensorMeta) -> bytes:
        bits = local_view(run, meta, self._bits[run.block.local])
        return to_canonical(bits, run.block, meta).tobytes()


def _box(block: Block) -> Box:
    return block.box


def _places(layout: Layout, shares: Shares, writer: int) -> list[Place]:
    """Return the windows that a rank writes, in the order of its part."""
    owned = (layout.catalog[name].meta for name, owner in shares.owners.items() if owner == writer)
    return [
        (meta, start)
        for meta in full_order(owned)
        for start in range(0, meta.unit_count, WINDOW_UNITS)
    ]
