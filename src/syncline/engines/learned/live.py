"""The live weights of one worker, written and read through its placement."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from types import MappingProxyType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from syncline.abc import Base
from syncline.commit.overwrite import check, overwrite, record_all, restore
from syncline.commit.recorded import Recorded
from syncline.engines.learned.learning import Learned
from syncline.engines.learned.localised import Localiser, Permutation, ascending
from syncline.engines.learned.memories import Memory
from syncline.engines.torch_memory import TorchTarget
from syncline.layouts.blocks import Block, CanonicalTensor, Run, run_of
from syncline.layouts.proof import block_fingerprint
from syncline.types import ZERO, Bits, Fingerprint, Record, TensorMeta

_IN_MEMORY_BYTES = 1 << 26


class LiveWeights:
    """What one worker holds, in the memory that its engine computes with.

    Args:
        learned: where its loader puts what.
        memories: the memories that `learned` speaks of, by local name; those of tensors that are kept in
            no readable form are left out, and records of theirs are dropped.
        permutations: see `Localiser`.

    Attributes:
        memories: what it was given.
        metas: of the memories, flat, by local name.
        permuted: local names of memories whose elements were moved after loading.
    """

    def __init__(
        self,
        learned: Learned,
        memories: Mapping[str, Memory],
        permutations: Mapping[str, Permutation] = MappingProxyType({}),
    ) -> None:
        self.learned = learned
        self.memories = memories
        self._permutations = permutations
        self.permuted = frozenset(permutations)
        self._localiser = Localiser(learned, permutations)
        self._canonical = {name: t.meta for name, t in learned.layout.catalog.items()}
        self._counts = {t.name: prod(t.shape) for t in learned.placement.tensors}
        self.metas = {
            name: TensorMeta(name, memory.local.dtype, (int(memory.flat.numel()),))
            for name, memory in memories.items()
        }

    @property
    def aliases(self) -> Mapping[str, str]:
        """The names of tied tensors that share another's memory, and that other's name."""
        first = {
            (b.local, b.offset): b.name for b in self.learned.placement.blocks if not b.is_alias
        }
        return {
            b.name: first[b.local, b.offset] for b in self.learned.placement.blocks if b.is_alias
        }

    def localised(self, records: Iterable[Record]) -> Iterator[Record]:
        """Yield the changes of this worker's memories; every record is checked against its tensor."""
        for record in records:
            check(record, self._canonical)
            for found in self._localiser.localised(record):
                if found.name in self.memories:
                    yield found

    def update(self, records: Iterable[Record]) -> Update:
        """Return the records as an update that was checked against what stands there; nothing is written.

        Raises:
            LayoutError, CodecError: a record does not fit its tensor.
            VerifyError: the live weights are not those that the update was made for.
        """
        return self.update_of(self.localised(records))

    def update_of(self, localised: Iterable[Record]) -> Update:
        """Return records of live memory as an update; see `update`."""
        return Update(localised, self.metas, self.target())

    def shares(self, blocks: Iterable[Block] | None = None) -> dict[str, Fingerprint]:
        """Return by canonical name the fingerprint of what the worker holds, read from its live memory.

        Args:
            blocks: of those alone; all by default, tied names under each of their names.

        Cost: one pass over the elements. Tensors without readable memory are left out.
        """
        own = self.learned.placement.blocks if blocks is None else blocks
        found: dict[str, Fingerprint] = {}
        by_local: dict[str, list[Block]] = {}
        for block in own:
            by_local.setdefault(block.local, []).append(block)
        for local, of_local in by_local.items():
            if local not in self.memories:
                continue
            bits = self.memories[local].bits()
            if local in self._permutations:
                bits = bits[self._permutations[local][np.arange(self._counts[local])]]
            for block in of_local:
                value = block_fingerprint(block, self.learned.layout.catalog[block.name], bits)
                found[block.name] = found.get(block.name, ZERO) + value
        return found

    def differences(self, name: str, bits: Bits) -> Iterator[Record]:
        """Yield what makes live memory hold these bits of a whole tensor, as records of live memory.

        Cost: reads all elements that the worker holds of it.
        """
        tensor = self.learned.layout.catalog[name]
        for block in self.learned.placement.blocks:
            if block.name == name and block.local in self.memories and not block.is_alias:
                yield from self._differences(block, tensor, bits)

    def _differences(self, block: Block, tensor: CanonicalTensor, bits: Bits) -> Iterator[Record]:
        run = run_of(block, tensor.grid)
        live = self.memories[block.local].bits()
        canonical = np.arange(block.count, dtype=np.int64)
        places, wanted = _places(run, canonical)
        if block.local in self._permutations:
            places = self._permutations[block.local][places]
        old_bits, new_bits = live[places], bits[wanted]
        differs = old_bits != new_bits
        yield from ascending(block.local, places[differs], old_bits[differs], new_bits[differs])

    def check_values(self, base: Base, samples: int | None) -> dict[str, str]:
        """Compare what stands in live memory with the checkpoint that it was loaded from.

        Args:
            base: looks the checkpoint's bits up.
            samples: how many places of each tensor are looked at, spread evenly; None: all.

        Returns:
            by canonical name of a tensor whose values do not stand where they should: what was found.
        """
        faults: dict[str, str] = {}
        for name, blocks in _by_name(self.learned.placement.blocks).items():
            meta, bits = base(name)
            for block in blocks:
                wrong = self._wrong(block, meta, bits, samples)
                if wrong:
                    faults.setdefault(name, wrong)
        return faults

    def _wrong(self, block: Block, meta: TensorMeta, bits: Bits, samples: int | None) -> str:
        """Return how a block's elements differ from the checkpoint's; empty if they do not."""
        memory = self.memories.get(block.local)
        if memory is None:
            return ""
        run = run_of(block, self.learned.layout.catalog[block.name].grid)
        step = 1 if samples is None else max(1, block.count // samples)
        chosen = np.arange(0, block.count, step)
        local, canonical = _places(run, chosen)
        if block.local in self._permutations:
            local = self._permutations[block.local][local]
        expected, found = bits[canonical], memory.bits()[local]
        differ = np.count_nonzero(expected != found)
        return f"{differ} of {found.size} values that were looked at differ" if differ else ""

    def target(self) -> TorchTarget:
        """Return the memories as the target of records of theirs."""
        return TorchTarget({name: memory.flat for name, memory in self.memories.items()})


def _places(run: Run, chosen: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where elements of a block, counted through it, lie in memory and in the tensor."""
    local = np.full(chosen.shape, run.local)
    canonical = np.full(chosen.shape, run.canonical)
    axes = zip(run.counts, run.local_strides, run.canonical_strides, strict=True)
    for count, inner, outer in reversed(list(axes)):
        local += chosen % count * inner
        canonical += chosen % count * outer
        chosen = chosen // count
    return local, canonical


def _by_name(blocks: Iterable[Block]) -> dict[str, list[Block]]:
    found: dict[str, list[Block]] = {}
    for block in blocks:
        found.setdefault(block.name, []).append(block)
    return found


class Update:
    """Changes of live memory that are journalled: they can be written, and taken back, until it is closed."""

    def __init__(
        self, records: Iterable[Record], metas: Mapping[str, TensorMeta], target: TorchTarget
    ) -> None:
        self._target = target
        self._recorded = Recorded(_IN_MEMORY_BYTES)
        try:
            record_all(records, metas, target, self._recorded)
            self._journal = self._recorded.journal()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def locals_(self) -> set[str]:
        """The memories that it changes."""
        return {record.name for record in self._journal}

    def write(self) -> None:
        """Write every new bit and read all of them back; may be repeated.

        Raises:
            VerifyError: what was read back is not what was written.
        """
        overwrite(self._journal, self._target)

    def undo(self) -> None:
        """Write every old bit back and read all of them back; may be repeated.

        Raises:
            VerifyError: what was read back is not what was written.
        """
        restore(self._journal, self._target)

    def close(self) -> None:
        """Forget the journal."""
        self._recorded.__exit__()
