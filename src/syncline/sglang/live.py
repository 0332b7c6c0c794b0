"""One rank's live weights: changes in checkpoint coordinates go straight into SGLang's fused parameters.

Where they lie is learned from the model's own `load_weights`. Only parameters in the layout that the loader
writes are overwritten in place; everything else is loaded whole, and said.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from syncline import kernels
from syncline.arrays import torch_module
from syncline.commit.overwrite import attempt, check, overwrite, record_all, restore
from syncline.commit.recorded import Recorded
from syncline.engines.checkpoint_files import CheckpointFiles
from syncline.engines.learned import Learned, learn
from syncline.engines.learned.memories import Memories
from syncline.engines.torch_memory import TorchTarget
from syncline.errors import CommitError, LayoutError
from syncline.layouts.positions import PositionMap
from syncline.sglang.buckets import torch_dtype
from syncline.sglang.groups import with_partners
from syncline.sglang.staged import Answer
from syncline.types import Bits, Fingerprint, Record, TensorMeta

Records = Iterable[Record]

Prints = Mapping[str, tuple[Fingerprint, Fingerprint]]

_BEFORE, _AFTER = 0, 1
_IN_MEMORY_BYTES = 1 << 26
_MOST_OFFSET = (1 << 32) - 1


class RankWeights:
    """The weights of one rank, and where a checkpoint's elements lie in them.

    Args:
        model: SGLang's module.
        checkpoint: with every tensor of the model, as it is to be.

    Raises:
        LayoutError: its layers are packed for AMX.

    Attributes:
        is_applied: changes were written that `undo` can take back.

    Cost: one run of the model's loader over tensors without memory, and two readings of live memory.
    """

    is_applied = False
    _has_loaded = False

    def __init__(self, model: Any, checkpoint: CheckpointFiles) -> None:
        self.checkpoint = checkpoint
        _check_unpacked(model)
        self._model = model
        self._metas = checkpoint.metas()
        self._memories = Memories(_live(model))
        self.learned: Learned = learn(model.load_weights, self._metas.values(), self._memories)
        layout = self.learned.layout
        self._map = PositionMap(layout.catalog, self.learned.placement)
        self._locals = {
            memory.name: TensorMeta(memory.local.name, memory.local.dtype, memory.local.shape)
            for memory in self._memories
        }
        self._target = TorchTarget({memory.name: memory.flat for memory in self._memories})

    def is_of(self, metas: Mapping[str, TensorMeta]) -> bool:
        """Tell whether this is still true: the same checkpoint tensors, and the same live memory.

        Weights that a session unpacked have other memory.
        """
        return metas == self._metas and not self._memories.replaced() and self._is_complete()

    def check(self, order: str, rank: int, journals: Sequence[Records]) -> Answer:
        """Check that the changes fit, and that the live weights are those they were made for.

        Raises:
            LayoutError, CodecError, VerifyError: they do not; nothing was written.
        """
        self.is_applied = False
        names: dict[str, None] = {}
        for at, journal in enumerate(journals):
            for record in journal:
                check(record, self._metas)
                names[record.name] = None
            if at == 0:  # what a later one replaces is not there yet
                record_all(self._local(journal), self._locals, self._target, _Dropped())
        return Answer(
            order,
            rank,
            dense={name: why for name, why in self.learned.unmapped.items() if name in names},
            held={name: self._held(name) for name in names if name in self.learned.layout.catalog},
        )

    def apply(self, journals: Sequence[Records], prints: Prints) -> int:
        """Write the changes; return how many units were written in place.

        Args:
            prints: of every tensor that is loaded whole: fingerprint before the changes, and after them.

        Memory: what this rank holds of a journal, up to 64 MiB of it, and all of it in a temporary file above that.

        Raises:
            TornUpdateError: it failed, and so did putting the old bits back.
            SynclineError: it failed; every bit is as it was.
        """
        if self.is_applied:
            raise CommitError(
                "other changes were applied, and neither undone nor followed by a check"
            )
        written = 0
        begun: list[Records] = []

        def do() -> None:
            nonlocal written
            for journal in journals:
                with Recorded(_IN_MEMORY_BYTES) as recorded:
                    written += self._write(journal, recorded, begun)
            after = ((name, self.checkpoint.view(name)) for name in self._dense(journals))
            proved = {name: _proved(name, bits, prints, _AFTER) for name, bits in after}
            self._has_loaded = True
            self._load(proved)

        with torch_module().no_grad():
            self._has_loaded = False
            self.is_applied = True  # should undoing fail, it can be asked for again
            attempt(do, lambda: self._restore(begun, prints))
        return written

    def _write(self, journal: Records, recorded: Recorded, begun: list[Records]) -> int:
        """Write one journal, which is mapped once for that; return how many units it has here."""
        are_apart = record_all(self._local(journal), self._locals, self._target, recorded)
        local = recorded.journal()
        begun.append(journal)
        overwrite(local, self._target, are_apart=are_apart)
        return sum(record.new_bits.size for record in local)

    def undo(self, journals: Sequence[Records], prints: Prints) -> int:
        """Put back what stood there before, or see that it still does.

        Raises:
            VerifyError: nothing is known to have been applied, and other bits stand there.
        """
        with torch_module().no_grad():
            if self.is_applied:
                self._restore(journals, prints)
            elif journals:  # what a later one replaces was not there
                record_all(self._local(journals[0]), self._locals, self._target, _Dropped())
        return 0

    def _restore(self, journals: Sequence[Records], prints: Prints) -> None:
        for journal in reversed(journals):
            restore(_Mapped(self, journal), self._target)
        names = self._dense(journals) if self._has_loaded else []
        before = ((name, self._before(name, journals)) for name in names)
        self._load({name: _proved(name, bits, prints, _BEFORE) for name, bits in before})
        self.is_applied = False

    def _local(self, journal: Records) -> Iterator[Record]:
        """Yield what this rank holds of the changes, in places of its memories."""
        catalog = self.learned.layout.catalog
        for record in journal:
            if record.name not in catalog:
                continue  # loaded whole
            count = record.new_bits.size
            offsets = np.arange(count) if record.offsets is None else record.offsets
            positions = offsets.astype(np.int64) + record.start
            order = np.arange(count, dtype=np.uint32)
            for local, (places, moved) in self._map.to_local(record.name, positions, order).items():
                yield from _records(local, places, record.old_bits[moved], record.new_bits[moved])

    def _dense(self, journals: Sequence[Records]) -> list[str]:
        """Return the changed tensors that must be loaded whole, and those they cannot be loaded without."""
        changed = {record.name for journal in journals for record in journal}
        lost = [name for name in self.learned.unmapped if name in changed]
        return with_partners(lost, self._metas)

    def _before(self, name: str, journals: Sequence[Records]) -> Bits:
        bits: Bits = np.array(self.checkpoint.view(name))
        for journal in reversed(journals):
            for record in [record for record in journal if record.name == name]:
                window = bits[record.start :]
                where = slice(record.old_bits.size) if record.offsets is None else record.offsets
                window[where] = record.old_bits
        return bits

    def _load(self, tensors: Mapping[str, Bits]) -> None:
        """Load tensors whole, then let the model make what it derives from its weights."""
        if tensors:
            named = [(name, _tensor(self._metas[name], bits)) for name, bits in tensors.items()]
            self._model.load_weights(named)
        if hasattr(self._model, "post_load_weights"):
            self._model.post_load_weights()

    def _held(self, name: str) -> tuple[tuple[int, ...], tuple[Any, ...]]:
        blocks = [block for block in self.learned.placement.blocks if block.name == name]
        return self.learned.layout.catalog[name].grid, tuple(block.box for block in blocks)

    def _is_complete(self) -> bool:
        now = _live(self._model)
        known = {name for memory in self._memories for name in memory.names}
        return all(self._memories.of(now[name]) is not None for name in known if name in now) and (
            known <= now.keys()
        )


class _Mapped:
    """A journal in places of one rank's memories; may be gone through again and again."""

    def __init__(self, weights: RankWeights, journal: Records) -> None:
        self._weights = weights
        self._journal = journal

    def __iter__(self) -> Iterator[Record]:
        return self._weights._local(self._journal)  # noqa: SLF001 - a part of it


class _Dropped:
    """Keeps no record: the journal is on disk already."""

    def add(self, record: Record) -> None:
        """Drop it."""


def _proved(name: str, bits: Bits, prints: Prints, which: int) -> Bits:
    """Return a copy of a tensor's bits that is proved.

    Raises:
        CommitError: the checkpoint does not hold what it should.
    """
    copy = bits.copy()
    if (
        name not in prints
        or kernels.fingerprint(copy, 0, kernels.seeds(name)) != prints[name][which]
    ):
        raise CommitError(
            f"tensor {name!r} is loaded whole, and the checkpoint does not hold the bits that are to be loaded; "
            "nobody else may write there",
            tensor=name,
        )
    return copy


def _live(model: Any) -> dict[str, Any]:
    """Return the parameters and buffers that a loader writes as they are.

    A module whose `quant_method` is not one for plain weights may keep them in another layout.
    """
    not_plain = set()
    for prefix, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None and not type(method).__name__.startswith("Unquantized"):
            own = dict(module.named_parameters(recurse=False)) | dict(
                module.named_buffers(recurse=False)
            )
            not_plain |= {f"{prefix}.{name}" if prefix else name for name in own}
    every = dict(model.named_parameters(remove_duplicate=False))
    every |= dict(model.named_buffers(remove_duplicate=False))
    return {name: tensor for name, tensor in every.items() if name not in not_plain}


def _check_unpacked(model: Any) -> None:
    """Check that no layer was packed for the AMX units of a CPU: SGLang packs again what it packed, at every update."""
    for prefix, module in model.named_modules():
        if getattr(module, "use_intel_amx_backend", False):
            raise LayoutError(
                f"layer {prefix!r} is packed for AMX, and SGLang cannot update packed layers; nothing was written",
                tensor=prefix,
            )


def _records(local: str, places: Any, old: Bits, new: Bits) -> Iterator[Record]:
    """Yield records of places that are so far apart that no offset reaches over all of them."""
    first = 0
    while first < places.size:
        start = int(places[first])
        stop = int(np.searchsorted(places, start + _MOST_OFFSET, side="right"))
        offsets = (places[first:stop] - start).astype(np.uint32)
        yield Record(local, start, offsets, old[first:stop], new[first:stop])
        first = stop


def _tensor(meta: TensorMeta, bits: Bits) -> Any:
    torch = torch_module()
    raw = torch.frombuffer(bytearray(bits.tobytes()), dtype=torch.uint8)
    return raw.view(torch_dtype(meta)).reshape(meta.shape)
