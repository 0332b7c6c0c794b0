"""What one rank holds of a version: a copy of its own shards, and the changes to them in canonical terms."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from os import PathLike
from typing import Any

import numpy as np

from syncline import kernels
from syncline.arrays import as_bits
from syncline.errors import LayoutError
from syncline.layouts import Catalog, Layout, Placement, scatter
from syncline.layouts import fingerprint as fingerprint_of
from syncline.layouts.blocks import Block
from syncline.layouts.positions import Positions, map_positions
from syncline.layouts.proof import block_fingerprint
from syncline.layouts.values import to_canonical
from syncline.sources import CheckpointSource
from syncline.sync.checks import listed
from syncline.sync.phases import Phases
from syncline.sync.sharded.changes import Moved, RankChanges, change_fingerprint, joined
from syncline.sync.sharded.shares import Copy, HeldBlock, Shares
from syncline.sync.snapshot import Snapshot
from syncline.types import WINDOW_UNITS, Bits, Fingerprint, Record, TensorMeta


class Shard:
    """A copy of a rank's own shards at the last version, to compare the trainer's with.

    What `detect` finds is kept, as old bits, until `keep` or `undo`.

    Args:
        shares: what the rank does with its blocks.
        directory: keep the copy in memory-mapped files there; None: in memory.
    """

    def __init__(
        self,
        catalog: Catalog,
        placement: Placement,
        shares: Shares,
        directory: str | PathLike[str] | None,
    ) -> None:
        self._catalog = catalog
        self._placement = placement
        self._shares = shares
        self._copy = Snapshot(directory)
        self._undo: list[Record] = []
        self._is_new = False
        self._whole = _whole_tensors(catalog, shares)
        for tensor in placement.tensors:
            # Padding is nobody's weight: it begins as zeros, whatever the trainer has there.
            self._copy.add(TensorMeta(tensor.name, tensor.dtype, tensor.shape))[:] = 0

    def bits(self) -> dict[str, Bits]:
        """Return the copy's bits by local name; live, writable."""
        return {name: self._copy.bits(name) for name in self._copy.tensors()}

    def seed(self, base: CheckpointSource) -> None:
        """Fill the copy from the checkpoint that the engines have loaded; reads its own parts alone.

        Raises:
            LayoutError: the checkpoint has not exactly the tensors of the layout.
        """
        found = base.metas()
        faults = [f"{name}: not in {base.path}" for name in self._catalog if name not in found]
        faults += [f"{name}: not in the layout" for name in found if name not in self._catalog]
        if faults:
            raise LayoutError(f"base and layout are not of one model: {listed(faults)}")
        mine = Layout(self._catalog, (self._placement,))
        scatter(mine, base.tensors(), {self._placement.rank: self.bits()})

    def load(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Fill the copy from the trainer's own tensors, where there is no checkpoint to begin from."""
        for meta, bits in self._tensors(weights):
            self._copy.bits(meta.name)[:] = bits
        self._is_new = True

    def proof(self) -> dict[str, Fingerprint]:
        """Return by canonical name the fingerprint of what this rank answers for. Cost: one pass."""
        blocks = tuple(held.run.block for held in self._blocks() if held.is_answered)
        answers = Placement(self._placement.rank, self._placement.tensors, blocks)
        return fingerprint_of(self._catalog, answers, self.bits())

    def detect(self, weights: Iterable[tuple[str, Any]], phases: Phases) -> RankChanges:
        """Find what changed since the last version, take it over, and return it in canonical terms.

        Args:
            weights: the rank's tensors by local name, torch or numpy; a DTensor counts as its local part.

        Raises:
            LayoutError: a tensor is unknown, missing, repeated, or of another dtype or shape; or a
                transformed value is not exact in the canonical dtype.

        Cost: one pass over the shard and the copy. Memory: O(changes).
        """
        changes = RankChanges()
        for meta, bits in self._tensors(weights):
            mine = self._copy.bits(meta.name)
            held = self._shares.blocks[meta.name]
            for start in range(0, mine.size, WINDOW_UNITS):
                window = slice(start, start + WINDOW_UNITS)
                with phases("diff"):
                    found = kernels.diff(mine[window], bits[window], refresh=True)
                if found[0].size:
                    offsets, old_bits, new_bits = found
                    self._undo.append(Record(meta.name, start, offsets, old_bits, new_bits))
                    with phases("map"):
                        self._map(held, start + offsets.astype(np.int64), found[1:], changes)
        return changes

    def copies(self) -> RankChanges:
        """Return the fingerprints of all copies that this rank holds of what others hold too.

        Cost: one pass over these copies.
        """
        changes = RankChanges()
        for block in self._blocks():
            if block.copy is not None:
                name, local = block.run.block.name, block.run.block.local
                tensor, bits = self._catalog[name], self._copy.bits(local)
                changes.copies[block.copy] = block_fingerprint(block.run.block, tensor, bits)
        return changes

    def copy_changes(self, copy: Copy) -> Moved | None:
        """Return what `detect` found in one copy of a box, or all of it after `load`.

        None if this rank does not hold that copy.
        """
        held = next((block for block in self._blocks() if block.copy == copy), None)
        if held is None:
            return None
        local, meta = held.run.block.local, self._catalog[copy[0]].meta
        if self._is_new:
            bits = self._copy.bits(local)
            every = np.arange(bits.size, dtype=np.int64)
            return joined(meta, self._moved(held, every, (bits, bits)))
        found = (
            moved
            for record in self._undo
            if record.name == local and record.offsets is not None
            for moved in self._moved(
                held,
                record.start + record.offsets.astype(np.int64),
                (record.old_bits, record.new_bits),
            )
        )
        return joined(meta, found)

    def dense(self, name: str) -> Bits | None:
        """Return a view of a whole canonical tensor if this rank answers for it and holds it just so."""
        if name not in self._whole:
            return None
        local, start = self._whole[name]
        return self._copy.bits(local)[start : start + self._catalog[name].meta.count]

    def keep(self) -> None:
        """What was detected or loaded is published: forget the old bits."""
        self._undo.clear()
        self._is_new = False

    def undo(self) -> None:
        """What was detected is not published: put the old bits back."""
        for record in self._undo:
            if record.offsets is not None:
                kernels.scatter(
                    self._copy.bits(record.name)[record.start :], record.offsets, record.old_bits
                )
        self._undo.clear()

    def _blocks(self) -> Iterator[HeldBlock]:
        return (held for all_held in self._shares.blocks.values() for held in all_held)

    def _tensors(self, weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[TensorMeta, Bits]]:
        """Yield the rank's tensors, each once and all of them."""
        wanted = self._copy.tensors()
        seen: set[str] = set()
        for name, value in weights:
            local = value.to_local() if hasattr(value, "to_local") else value
            meta, bits = as_bits(name, local)
            if name in seen:
                raise LayoutError(f"{name} came twice; a rank gives every tensor once", tensor=name)
            if name not in wanted:
                raise LayoutError(
                    f"{name}: the layout has no such tensor on this rank", tensor=name
                )
            if meta != wanted[name]:
                raise LayoutError(
                    f"{name}: the layout has {wanted[name].dtype} {list(wanted[name].shape)}, found "
                    f"{meta.dtype} {list(meta.shape)}; give the shards in the dtype that the engines load",
                    tensor=name,
                )
            seen.add(name)
            yield meta, bits
        missing = sorted(wanted.keys() - seen)
        if missing:
            raise LayoutError(
                f"{len(missing)} tensors of this rank were not given: {listed(missing)}; give all of "
                "them, changed or not",
                tensor=missing[0],
            )

    def _map(
        self,
        held: tuple[HeldBlock, ...],
        positions: Positions,
        bits: tuple[Bits, Bits],
        changes: RankChanges,
    ) -> None:
        for block in held:
            if not block.is_answered and block.copy is None:
                continue
            name = block.run.block.name
            for moved in self._moved(block, positions, bits):
                change = change_fingerprint(moved, kernels.seeds(name))
                changes.add(name, moved, change, block)

    def _moved(
        self, held: HeldBlock, positions: Positions, bits: tuple[Bits, Bits]
    ) -> Iterator[Moved]:
        """Yield where changes of a local tensor belong, as far as they lie in a block."""
        block: Block = held.run.block
        meta = self._catalog[block.name].meta
        # What travels with the positions is which they are, since bits of two versions go with each.
        numbers = np.arange(positions.size, dtype=np.uint64)
        for _, places, which in map_positions([held.run], positions, numbers, to="canonical"):
            old, new = (to_canonical(side[which], block, meta) for side in bits)
            yield Moved(places, old, new)


def _whole_tensors(catalog: Catalog, shares: Shares) -> dict[str, tuple[str, int]]:
    """Return local tensor and place of the canonical tensors that a rank holds whole and in order."""
    return {
        held.run.block.name: (local, held.run.local)
        for local, all_held in shares.blocks.items()
        for held in all_held
        if held.is_answered
        and held.run.block.add == 0
        and held.run.block.count == catalog[held.run.block.name].meta.count
        and held.run.local_strides in ((), (1,))
        and held.run.canonical_strides in ((), (1,))
    }
