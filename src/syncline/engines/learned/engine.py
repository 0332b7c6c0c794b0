"""An engine over live memory whose layout was learned: `LearnedEngine`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NoReturn, Protocol

import numpy as np

from syncline.abc import Base, Engine
from syncline.commit.overwrite import Target, apply_in_memory
from syncline.engines.learned.learning import Learned
from syncline.engines.learned.live import LiveWeights
from syncline.engines.learned.localised import Permutation
from syncline.engines.learned.memories import Memories
from syncline.engines.memory import ArrayTarget
from syncline.engines.tied import Tied, agreeing
from syncline.engines.torch_memory import TorchTarget
from syncline.errors import LayoutError, TornUpdateError
from syncline.layouts.blocks import run_of
from syncline.types import Bits, Fingerprint, Record, Span, TensorMeta
from syncline.version import HeldVersion

_LIVE = "live memory: "
_SAMPLES = 64


class Reload(Protocol):
    """Loads tensors that have no place of their own: the model's loader, or its repacking."""

    def __call__(self, names: Collection[str], view: Any) -> None:
        """Make the live weights hold what `view` returns for each of these canonical names.

        Raises:
            SynclineError: it cannot, or what it made does not hold it.
        """


class LearnedEngine(Engine):
    """The weights of one worker, changed where its own loader would have put them.

    Args:
        learned: what `learn` returned for this worker.
        live: the tensors that it was learned of, or their memories.
        base: looks the checkpoint up that the worker was loaded from, whole.
        reload: loads tensors that are not mapped. None: such tensors are refused here.
        permutations: by local name, of memories whose elements were moved after loading.
        samples: values of each tensor that must stand in live memory at the start; None: all.

    A tensor that the worker holds whole, in order, in host memory is viewed where it lies. Of every other
    one a copy of all its bits is kept on the host: deltas are decoded against whole tensors. `copied_bytes`
    says how much that is, `learned.unmapped` what is loaded again whole whenever it changes, and why.

    Raises:
        LayoutError: values of the checkpoint do not stand where they were learned to be and there is no
            `reload`, or the checkpoint is not the one that was learned.
    """

    def __init__(
        self,
        learned: Learned,
        live: Mapping[str, Any] | Memories,
        base: Base,
        *,
        reload: Reload | None = None,
        permutations: Mapping[str, Permutation] = MappingProxyType({}),
        samples: int | None = _SAMPLES,
    ) -> None:
        memories = live if isinstance(live, Memories) else Memories(live)
        self._memories = memories
        self._by_name = {memory.name: memory for memory in memories if not memory.is_meta}
        self.live = LiveWeights(learned, self._by_name, permutations)
        self._reload = reload
        self.dense = {**learned.unmapped, **self.live.check_values(base, samples)}
        if self.dense and reload is None:
            name, why = next(iter(self.dense.items()))
            raise LayoutError(
                f"{len(self.dense)} tensors have no place of their own in live memory, {name!r} among them: "
                f"{why}; give a `reload` for them, or serve a full checkpoint",
                tensor=name,
            )
        names = [*learned.layout.catalog, *learned.unmapped]
        self._metas = {name: base(name)[0] for name in names}
        whole = self._whole()
        self._views = {name: view for name, view in whole.items() if name not in self.dense}
        self._copies = {name: np.array(base(name)[1]) for name in names if name not in self._views}
        self._held: HeldVersion | None = None

    @property
    def copied_bytes(self) -> int:
        """Bytes of the host's copies."""
        return sum(bits.nbytes for bits in self._copies.values())

    def tensors(self) -> Tied:
        """Return all tensors of the checkpoint, whatever share of them this worker holds."""
        return Tied(MappingProxyType(self._metas), self._aliases())

    def held(self) -> HeldVersion | None:
        """Return the committed version; None if a live tensor was replaced since. See `Engine.held`."""
        return None if self._memories.replaced() else self._held

    def view(self, name: str) -> Bits:
        """Return the bits of a whole tensor: of live memory, or of the host's copy; see `Engine.view`."""
        bits = self._copies.get(name)
        if bits is None:
            bits = self._views[name]
        view = bits.view()
        view.flags.writeable = False
        return view

    def shares(self) -> dict[str, Fingerprint]:
        """Return by canonical name the fingerprint of what this worker holds, read from live memory."""
        return self.live.shares()

    def apply(self, records: Iterable[Record], held: HeldVersion) -> None:
        """Overwrite what the records list, in O(changes) where tensors are mapped; see `Engine.apply`.

        Raises:
            LayoutError: the version has other bits for a name than for one that is tied to it here, or a
                live tensor was replaced.
        """
        replaced = self._memories.replaced()
        if replaced:
            raise LayoutError(
                f"live tensor {replaced[0]!r} was replaced; nothing was written: learn the placement again",
                tensor=replaced[0],
            )
        before = self._held
        changed: dict[str, None] = {}
        try:
            apply_in_memory(
                self._everywhere(agreeing(records, self._aliases(), held), changed),
                self._targets_metas(),
                _Both(ArrayTarget(self._copies), self.live.target()),
                lambda: self._commit(changed, held),
                lambda: self._commit(changed, before),
            )
        except TornUpdateError:
            self._held = None
            raise

    def create(
        self,
        held: HeldVersion,
        spans: Iterable[tuple[TensorMeta, Iterable[Span]]],
        files: Mapping[str, bytes],
    ) -> NoReturn:
        """Refuse: a worker has the tensors that its engine made.

        Raises:
            LayoutError: always.
        """
        raise LayoutError(
            f"version {held.version} cannot be created in a worker that has no tensors to take it",
            version=held.version,
        )

    def _commit(self, changed: Collection[str], held: HeldVersion | None) -> None:
        names = [name for name in changed if name in self.dense]
        if names and self._reload is not None:
            self._reload(names, self.view)
        self._held = held

    def _everywhere(self, records: Iterable[Record], changed: dict[str, None]) -> Iterator[Record]:
        """Yield what the records change in the host's copies and in live memory."""
        for record in records:
            changed[record.name] = None
            if record.name in self._copies:
                yield record
            if record.name not in self.dense:
                for found in self.live.localised([record]):
                    yield Record(
                        _LIVE + found.name,
                        found.start,
                        found.offsets,
                        found.old_bits,
                        found.new_bits,
                    )

    def _targets_metas(self) -> dict[str, TensorMeta]:
        metas = {name: self._metas[name] for name in self._copies}
        return metas | {_LIVE + name: meta for name, meta in self.live.metas.items()}

    def _aliases(self) -> Mapping[str, str]:
        return {
            name: first
            for name, first in self.live.aliases.items()
            if name not in self.dense and first not in self.dense
        }

    def _whole(self) -> dict[str, Bits]:
        """Return views of the tensors that lie whole and in order in host memory."""
        found: dict[str, Bits] = {}
        for block in self.live.learned.placement.blocks:
            tensor = self.live.learned.layout.catalog[block.name]
            memory = self._by_name.get(block.local)
            run = run_of(block, tensor.grid)
            is_plain = run.counts == () or run.local_strides == run.canonical_strides == (1,)
            if (
                memory is not None
                and block.count == tensor.meta.count
                and is_plain
                and memory.flat.device.type == "cpu"
                and block.local not in self.live.permuted
            ):
                found[block.name] = memory.bits()[block.offset : block.offset + block.count]
        return found


class _Both:
    """The host's copies and live memory as one target."""

    def __init__(self, copies: ArrayTarget, live: TorchTarget) -> None:
        self._copies = copies
        self._live = live
        self.is_concurrent = copies.is_concurrent and live.is_concurrent

    def first_difference(self, record: Record, bits: Bits) -> int | None:
        """Return the index of the first of the record's places where other bits than these stand."""
        target, own = self._of(record)
        return target.first_difference(own, bits)

    def read(self, record: Record) -> Bits:
        """Return the bits at the record's places."""
        target, own = self._of(record)
        return target.read(own)

    def write(self, record: Record, bits: Bits) -> None:
        """Put bits at the record's places."""
        target, own = self._of(record)
        target.write(own, bits)

    def flush(self) -> None:
        """Wait for the devices."""
        self._live.flush()

    def _of(self, record: Record) -> tuple[Target, Record]:
        if not record.name.startswith(_LIVE):
            return self._copies, record
        name = record.name.removeprefix(_LIVE)
        own = Record(name, record.start, record.offsets, record.old_bits, record.new_bits)
        return self._live, own
