"""A copy of the weights in the host's memory, which goes ahead of the live ones.

Deltas are decoded against it and proved on it while the engine generates. What it has taken and the live
weights have not is kept as records: they say what to overwrite there, and what to put back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from syncline.abc import Store, WeightSource
from syncline.engines import MemoryEngine
from syncline.sync import Receiver
from syncline.types import Bits, Record
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

    @property
    def pending(self) -> Sequence[Record]:
        """What the copy has taken and the live weights have not, in order; a later record wins."""
        return tuple(self._pending)

    def follow(self, store: Store, version: int | None, *, repair: bool = False) -> HeldVersion:
        """Bring the copy to a version of the store, by default its current one; see `Receiver.sync`."""
        applied = Receiver(store, self).sync(version, repair=repair)
        held = self.held()
        if held is None or held.sha256 != applied.manifest_sha256:
            raise RuntimeError(f"the copy does not hold version {applied.version}")
        return held

    def apply(self, records: Iterable[Record], held: HeldVersion) -> None:
        """Overwrite what the records list, and note it; see `Engine.apply`."""
        fresh: list[Record] = []
        super().apply(_noted(records, fresh), held)
        self._pending += fresh

    def settle(self) -> None:
        """Forget what is pending: the live weights hold it now."""
        self._pending.clear()

    def before(self, name: str) -> Bits:
        """Return a tensor's bits without what is pending: those of the live weights."""
        bits: Bits = self.view(name).copy()
        for record in reversed(self._pending):
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


def _noted(records: Iterable[Record], into: list[Record]) -> Iterator[Record]:
    for record in records:
        # The old bits may be a view of what is about to be overwritten.
        into.append(replace(record, old_bits=np.array(record.old_bits)))
        yield record
