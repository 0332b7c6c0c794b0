"""Canonical changes as changes of live memory: only those that a worker holds, where it holds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from syncline.engines.learned.learning import Learned
from syncline.layouts.blocks import Run, run_of
from syncline.layouts.positions import map_positions
from syncline.types import Bits, Record


class Permutation(Protocol):
    """For units of a memory as its loader fills it, the units of the memory as the engine keeps it."""

    def __getitem__(self, units: NDArray[np.int64], /) -> NDArray[np.int64]:
        """Return where these units lie; an array of int64 is a permutation."""


_REACH = 1 << 32


class Localiser:
    """The blocks of one worker, ready to move records into its memories; made once, used every version.

    Args:
        learned: what the worker holds.
        permutations: by local name, of memories whose elements were moved after loading.
    """

    def __init__(
        self, learned: Learned, permutations: Mapping[str, Permutation] = MappingProxyType({})
    ) -> None:
        self._permutations = permutations
        self._runs: dict[str, list[Run]] = {}
        for block in learned.placement.blocks:
            if not block.is_alias:
                run = run_of(block, learned.layout.catalog[block.name].grid)
                self._runs.setdefault(block.name, []).append(run)

    def localised(self, record: Record) -> Iterator[Record]:
        """Yield what a record changes in this worker's memories, under their names.

        Elements of other workers, and tied names' second ones, are left out.

        Cost: O(units of the record); a block that is contiguous on both sides costs a search.
        Aliasing: the arrays may be those of the record.
        """
        if not record.new_bits.size:
            return
        for run in self._runs.get(record.name, ()):
            permutation = self._permutations.get(run.block.local)
            for found in _shifted(run, record) if _is_plain(run) else _mapped(run, record):
                yield from [found] if permutation is None else _permuted(found, permutation)


def _is_plain(run: Run) -> bool:
    return run.counts == () or (run.canonical_strides, run.local_strides) == ((1,), (1,))


def within(run: Run, record: Record) -> Iterator[Record]:
    """Yield the part of a canonical record that a block holds, still in canonical places.

    Aliasing: the arrays may be views of the record's.
    """
    if not _is_plain(run):
        which = np.arange(record.new_bits.size, dtype=np.uint32)
        for _, _, kept in map_positions([run], _units(record), which, to="local"):
            places = _units(record)[kept]
            yield from ascending(record.name, places, record.old_bits[kept], record.new_bits[kept])
        return
    first = run.canonical - record.start
    count = run.counts[0] if run.counts else 1
    offsets, start = record.offsets, record.start
    if offsets is None:
        low, high = max(0, first), min(record.new_bits.size, first + count)
        start += low
    else:
        low, high = map(int, np.searchsorted(offsets, (first, first + count)))
        offsets = offsets[low:high]
    if low < high:
        part = slice(low, high)
        yield Record(record.name, start, offsets, record.old_bits[part], record.new_bits[part])


def _shifted(run: Run, record: Record) -> Iterator[Record]:
    """Yield the part of a record that lies in a block of consecutive elements, where it lies there."""
    for part in within(run, record):
        start, offsets = part.start + run.local - run.canonical, part.offsets
        if start < 0 and offsets is not None:
            # The memory may begin behind the start of the record's window.
            start, offsets = 0, offsets - np.uint32(-start)
        yield Record(run.block.local, start, offsets, part.old_bits, part.new_bits)


def _mapped(run: Run, record: Record) -> Iterator[Record]:
    """Yield the part of a record that lies in any block."""
    which = np.arange(record.new_bits.size, dtype=np.uint32)
    for _, places, kept in map_positions([run], _units(record), which, to="local"):
        yield from ascending(run.block.local, places, record.old_bits[kept], record.new_bits[kept])


def _permuted(record: Record, permutation: Permutation) -> Iterator[Record]:
    places = permutation[_units(record)]
    yield from ascending(record.name, places, record.old_bits, record.new_bits)


def _units(record: Record) -> NDArray[np.int64]:
    """Return the unit index of everything that a record changes."""
    if record.offsets is None:
        return np.arange(record.start, record.start + record.new_bits.size, dtype=np.int64)
    return record.start + record.offsets.astype(np.int64)


def ascending(
    name: str, places: NDArray[np.int64], old_bits: Bits, new_bits: Bits
) -> Iterator[Record]:
    """Yield records of places in any order; each reaches over less than 2**32 units."""
    if places.size > 1 and not (places[1:] > places[:-1]).all():
        order = np.argsort(places)
        places, old_bits, new_bits = places[order], old_bits[order], new_bits[order]
    low = 0
    while low < places.size:
        start = int(places[low])
        high = int(np.searchsorted(places, start + _REACH))
        offsets = (places[low:high] - start).astype(np.uint32)
        yield Record(name, start, offsets, old_bits[low:high], new_bits[low:high])
        low = high
