"""A copy of the weights in the host's memory, which goes ahead of the live ones.

Deltas are decoded against it and proved on it while the engine generates. What it has taken and the live
weights have not is kept as records: they say what to overwrite there, and what to put back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from syncline.abc import Store, WeightSource
from syncline.engines import MemoryEngine
from syncline.sync import Receiver
from syncline.sync.accounting import Moved
from syncline.types import WINDOW_UNITS, Bits, Record
from syncline.version import HeldVersion


class HostCopy(MemoryEngine):
    """The canonical tensors of a checkpoint, kept on a store's versions.

    Args:
        source: what the engine was started from; copied.

    Memory: one model, and the records that are pending.
    """

    def __init__(self, source: WeightSource) -> None:
        super().__init__()
        for meta, bits in source.tensors():
            self.add(meta)[:] = bits
        self._pending: list[Record] = []
        self.moved: Moved | None = None

    @property
    def pending(self) -> Sequence[Record]:
        """What the copy has taken and the live weights have not: every place once, with their bits as old."""
        return tuple(self._pending)

    def follow(
        self, store: Store, version: int | None, *, repair: bool = False
    ) -> HeldVersion | None:
        """Bring the copy to a version of the store, by default its current one; see `Receiver.sync`.

        Returns what it holds then. What is pending is true after an error too.
        """
        self.moved = Receiver(store, self).sync(version, repair=repair).moved
        return self.held()

    def apply(self, records: Iterable[Record], held: HeldVersion) -> None:
        """Overwrite what the records list, and note it; see `Engine.apply`."""
        fresh: list[Record] = []
        super().apply(_noted(records, fresh), held)
        self._pending = composed(self._pending, fresh)

    def settle(self) -> None:
        """Forget what is pending: the live weights hold it now."""
        self._pending.clear()

    def before(self, name: str) -> Bits:
        """Return a tensor's bits without what is pending: those of the live weights."""
        bits: Bits = self.view(name).copy()
        for record in self._pending:
            if record.name == name:
                put(bits, record, record.old_bits)
        return bits


def put(bits: Bits, record: Record, values: Bits) -> None:
    """Put a record's old or new bits at its places in a whole tensor."""
    window = bits[record.start :]
    if record.offsets is None:
        window[: values.size] = values
    else:
        window[record.offsets] = values


def composed(earlier: Sequence[Record], later: Sequence[Record]) -> list[Record]:
    """Return records that do in one step what two lists of them do in turn.

    In each list a place comes once at most; so it does in the result. What ends as it began is left out.

    Cost: sorts the changes of those tensors that are in both lists.
    """
    both = {record.name for record in earlier} & {record.name for record in later}
    kept = [record for record in (*earlier, *later) if record.name not in both]
    for name in sorted(both):
        kept += _one_step([record for record in (*earlier, *later) if record.name == name])
    return kept


def _one_step(records: Sequence[Record]) -> Iterator[Record]:
    """Yield the records of one tensor as records with one entry for each place, window by window."""
    places = np.concatenate([_places(record) for record in records])
    order = np.argsort(places, kind="stable")
    places = places[order]
    is_first = np.diff(places, prepend=-1) != 0
    is_last = np.append(is_first[1:], True)
    old = np.concatenate([record.old_bits for record in records])[order][is_first]
    new = np.concatenate([record.new_bits for record in records])[order][is_last]
    differs = old != new
    places, old, new = places[is_first][differs], old[differs], new[differs]
    cuts = np.flatnonzero(np.diff(places // WINDOW_UNITS)) + 1
    for own, before, after in zip(
        np.split(places, cuts), np.split(old, cuts), np.split(new, cuts), strict=True
    ):
        if own.size:
            start = int(own[0]) // WINDOW_UNITS * WINDOW_UNITS
            offsets = (own - start).astype(np.uint32)
            yield Record(records[0].name, start, offsets, before, after)


def _places(record: Record) -> NDArray[np.int64]:
    if record.offsets is None:
        return np.arange(record.start, record.start + record.new_bits.size, dtype=np.int64)
    return record.start + record.offsets.astype(np.int64)


def _noted(records: Iterable[Record], into: list[Record]) -> Iterator[Record]:
    for record in records:
        # Either may be a view: of what is about to be overwritten, or of a payload.
        new_bits = np.array(record.new_bits)
        into.append(replace(record, old_bits=np.array(record.old_bits), new_bits=new_bits))
        yield record
