"""`map_positions`: move changed positions through blocks, in O(changes); and fingerprints of shards.

Positions are flat element indices, strictly ascending, 64-bit. Nothing here looks at an element that did
not change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from syncline import kernels
from syncline.errors import LayoutError
from syncline.layouts.blocks import Catalog, Placement, Run, run_of
from syncline.layouts.values import to_canonical, to_local
from syncline.types import Bits

Positions = NDArray[np.int64]
_FIRST = 4096
Side = Literal["canonical", "local"]


class PositionMap:
    """The blocks of one rank, ready to map positions both ways; made once, used every step.

    Args:
        catalog: canonical tensors of the layout.
        placement: what the rank holds.
    """

    def __init__(self, catalog: Catalog, placement: Placement) -> None:
        self._catalog = catalog
        self._by_local: dict[str, list[Run]] = {tensor.name: [] for tensor in placement.tensors}
        self._by_canonical: dict[str, list[Run]] = {}
        for block in placement.blocks:
            run = run_of(block, catalog[block.name].grid)
            self._by_local[block.local].append(run)
            self._by_canonical.setdefault(block.name, []).append(run)

    def to_canonical(
        self, local: str, positions: Positions, bits: Bits
    ) -> dict[str, tuple[Positions, Bits]]:
        """Return by canonical name where changes in a local tensor belong, ascending, with their bits.

        Changes in padding are dropped: they belong nowhere.

        Args:
            positions: (k,) flat indices in the local tensor, strictly ascending.
            bits: (k,) the new local bits.

        Raises:
            LayoutError: the rank has no such tensor, or a transformed value is not exact.

        Cost: O(k) for each block that the changes' range touches.
        """
        return self._map(self._find(self._by_local, local), positions, bits, "canonical")

    def to_local(
        self, name: str, positions: Positions, bits: Bits
    ) -> dict[str, tuple[Positions, Bits]]:
        """Return by local name where this rank holds changes of a canonical tensor, with their bits.

        Changes that other ranks hold are dropped. A stored copy of another tensor changes nothing: the
        tensor that it is a copy of changes the same memory.

        Args and cost: as `to_canonical`.
        """
        runs = [run for run in self._by_canonical.get(name, ()) if not run.block.is_alias]
        if name not in self._catalog:
            raise LayoutError(f"{name}: not in the layout's catalog", tensor=name)
        return self._map(runs, positions, bits, "local")

    @staticmethod
    def _find(runs: Mapping[str, list[Run]], name: str) -> list[Run]:
        try:
            return runs[name]
        except KeyError as error:
            raise LayoutError(f"{name}: the rank has no such tensor", tensor=name) from error

    def _map(
        self, runs: Sequence[Run], positions: Positions, bits: Bits, to: Side
    ) -> dict[str, tuple[Positions, Bits]]:
        found: dict[str, list[tuple[Positions, Bits]]] = {}
        for run, mapped, moved in map_positions(runs, positions, bits, to=to):
            block = run.block
            meta = self._catalog[block.name].meta
            if to == "canonical":
                found.setdefault(block.name, []).append((mapped, to_canonical(moved, block, meta)))
            else:
                found.setdefault(block.local, []).append((mapped, to_local(moved, block, meta)))
        return {name: _merged(pieces) for name, pieces in found.items()}


def map_positions(
    runs: Sequence[Run], positions: Positions, bits: Bits, *, to: Side
) -> Iterator[tuple[Run, Positions, Bits]]:
    """Yield for each run that holds some of the positions where these are on the other side.

    Args:
        runs: blocks on flat memory.
        positions: (k,) strictly ascending flat indices on the side that `to` is not.
        bits: (k,) bits that belong to them.

    Returns:
        per run with at least one: the mapped positions, in the order of the ones given, and their bits.

    Cost: O(positions in the run's range).
    """
    for run in runs:
        first, steps, other, other_steps = _sides(run, to)
        last = first + sum((n - 1) * s for n, s in zip(run.counts, steps, strict=True))
        low, high = np.searchsorted(positions, (first, last + 1))
        if low == high:
            continue
        axes = sorted(zip(steps, run.counts, other_steps, strict=True), reverse=True)
        mapped, moved = kernels.map_positions(
            positions[low:high], bits[low:high], axes, first, other
        )
        if mapped.size:
            yield run, mapped, moved


def _sides(run: Run, to: Side) -> tuple[int, Sequence[int], int, Sequence[int]]:
    if to == "canonical":
        return run.local, run.local_strides, run.canonical, run.canonical_strides
    return run.canonical, run.canonical_strides, run.local, run.local_strides


def _merged(pieces: Sequence[tuple[Positions, Bits]]) -> tuple[Positions, Bits]:
    """Return positions of several runs as one ascending list."""
    if len(pieces) == 1 and _rises(pieces[0][0]):
        return pieces[0]
    positions = np.concatenate([piece[0] for piece in pieces])
    bits = np.concatenate([piece[1] for piece in pieces])
    if _rises(positions):
        return positions, bits
    room = 64 - 8 * bits.itemsize
    if room == 0 or int(positions.max()) >> room:
        order = np.argsort(positions)
        return positions[order], bits[order]
    # Sorting the pairs as one word each is several times faster than sorting indices. In place: memory is
    # what the rest costs.
    width = np.uint64(8 * bits.itemsize)
    pairs = positions.view(np.uint64)
    pairs <<= width
    pairs |= bits
    pairs.sort()
    bits = pairs.astype(bits.dtype)
    pairs >>= width
    return positions, bits


def _rises(positions: Positions) -> bool:
    # Transposed positions fall early; most calls need not look at the rest.
    return all(
        bool((part[1:] > part[:-1]).all()) for part in (positions[:_FIRST], positions[_FIRST - 1 :])
    )
