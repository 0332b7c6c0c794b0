"""A full version out of shards: in every round each writer gets one window of the tensor it writes.

No tensor is put together anywhere. A rank holds one window of its own and the pieces that it sends.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from syncline.errors import FormatError
from syncline.layouts import Layout
from syncline.sync.sharded.gathering import Gathering, Told
from syncline.sync.sharded.part import full_order
from syncline.sync.sharded.ranks import Ranks
from syncline.sync.sharded.shard import Shard
from syncline.sync.sharded.shares import Shares
from syncline.types import WINDOW_UNITS, Bits, TensorMeta, Window

Place = tuple[TensorMeta, int]
"""A window: its tensor, and where it begins."""


class Rounds:
    """One rank's side of the rounds; every rank makes one and runs it to its end.

    Args:
        shard: what this rank holds of the version.

    Collective: yes. Memory: one window, and this rank's share of one window for each writer.
    """

    def __init__(self, layout: Layout, shares: Shares, ranks: Ranks, shard: Shard) -> None:
        self._ranks = ranks
        self._gathering = Gathering(layout, shares, shard)
        self._schedule = {writer: _places(layout, shares, writer) for writer in shares.writers}
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
            pieces = self._gathering.pieces(meta, start, _units(meta, start))
            if not pieces:
                continue
            message = b"".join(pieces)
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
        count = _units(meta, start)
        told = {}
        for rank, runs in self._gathering.senders(meta, start, count).items():
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
            told[rank] = Told(message)
        return self._gathering.span(
            meta, start, count, lambda rank, nbytes: told[rank].take(nbytes)
        )


def _units(meta: TensorMeta, start: int) -> int:
    return min(WINDOW_UNITS, meta.unit_count - start)


def _places(layout: Layout, shares: Shares, writer: int) -> list[Place]:
    """Return the windows that a rank writes, in the order of its part."""
    owned = (layout.catalog[name].meta for name, owner in shares.owners.items() if owner == writer)
    return [
        (meta, start)
        for meta in full_order(owned)
        for start in range(0, meta.unit_count, WINDOW_UNITS)
    ]
