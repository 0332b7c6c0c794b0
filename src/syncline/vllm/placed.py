"""Live weights that are changed in place, in O(changes), where the worker's own loader would have put them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from syncline.abc import Base
from syncline.engines.learned.live import LiveWeights, Update
from syncline.engines.learned.memories import Memories, key_of
from syncline.engines.tied import agreeing
from syncline.errors import LayoutError, SynclineError, TornUpdateError
from syncline.sources import CheckpointSource
from syncline.types import Fingerprint, Record
from syncline.vllm.copy import HostCopy
from syncline.vllm.forms import Forms
from syncline.vllm.placement import WorkerPlacement, learn_worker
from syncline.vllm.ranks import Workers
from syncline.vllm.shares import Shares
from syncline.vllm.whole import WholeTensors

SAMPLES = 64
"""Values of each tensor that must stand in live memory where they were learned to be, at the start."""

_log = logging.getLogger(__name__)


class PlacedWeights:
    """The weights of one worker of a vLLM; see `LiveWeights` of `syncline.vllm.live`.

    Args:
        model: the module that the worker runs.
        source: the checkpoint that it was loaded from.
        workers: who holds the rest. Collective: all of them make theirs at the same time.
        timeout_s: how long to wait for the others.
        samples: see `SAMPLES`; None: all values.

    Attributes:
        whole: by canonical name, tensors that are loaded again whole when they change, and why.

    Raises:
        LayoutError: the model holds something else than the checkpoint, or holds it in a way that cannot be
            followed; says which tensor, and what to do.
        VerifyError: its loader wrote out of sight; start the engine again.
    """

    def __init__(
        self,
        model: Any,
        source: CheckpointSource,
        workers: Workers,
        *,
        timeout_s: float = 120.0,
        samples: int | None = SAMPLES,
    ) -> None:
        self._model = model
        metas = source.metas()
        placement = learn_worker(model, metas.values(), rank=workers.rank)

        def base(name: str) -> Any:
            return metas[name], source.bits(name)

        self._live, faults = _checked(placement, base, samples)
        if faults:
            name, why = next(iter(faults.items()))
            raise LayoutError(
                f"{len(faults)} tensors of the checkpoint do not stand where vLLM loaded them, {name!r} among "
                f"them: {why}: vLLM changed their layout after loading, or was not started from {source.path}",
                tensor=name,
            )
        self.whole = placement.learned.unmapped
        self._whole = WholeTensors(model, Memories(_tensors(model)), self.whole, base)
        self._forms = Forms(placement)
        self._forms.check(base)
        self._shares = Shares(self._live, self._forms, workers, timeout_s)
        self._prepared: Update | None = None
        self._is_written = False
        self._report()

    def prepare(self, copy: HostCopy) -> None:
        """Journal the changes of live memory and pack what is kept packed, beside generation.

        Raises:
            LayoutError: a live tensor was replaced since this was made.
            VerifyError: something else changed the live weights.
        """
        self._prepare(self._records(copy), copy, {record.name for record in copy.pending})

    def write(self, copy: HostCopy, *, everything: bool = False) -> None:
        """Overwrite what changed, in O(changes); see `LiveWeights.write`."""
        if everything:
            self._prepare(self._differences(copy), copy, set(copy.tensors()))
        elif self._prepared is None:
            self.prepare(copy)
        if self._prepared is None:
            raise LayoutError("nothing was prepared")
        try:
            self._is_written = True
            self._prepared.write()
            self._forms.swap()
            self._whole.load()
            self._shares.change(copy, everything=everything)
        except BaseException as error:
            self._take_back(copy, error)
            raise

    def undo(self, copy: HostCopy) -> None:
        """Put the old bits back, in O(changes); see `LiveWeights.undo`."""
        if self._prepared is None or not self._is_written:
            return
        self._shares.forget()
        self._whole.undo()
        self._forms.swap_back()
        self._prepared.undo()
        self._is_written = False

    def fingerprint(self, copy: HostCopy) -> Fingerprint:
        """Return this worker's share of the model's fingerprint.

        All of it is read from live memory the first time; then what changed, whose places were read back.
        """
        return self._shares.total(copy)

    def settle(self) -> None:
        """Forget how to undo."""
        self._shares.settle()
        self._forms.settle()
        self._whole.settle()
        self._close()

    def fingerprint_in_full(self, copy: HostCopy) -> Fingerprint:
        """Return the same, all of it read again from live memory. Cost: one pass over it."""
        return self._shares.in_full(copy)

    def _prepare(self, records: Iterable[Record], copy: HostCopy, names: set[str]) -> None:
        self._close()
        self._check_memory()
        self._prepared = self._live.update_of(records)
        self._forms.prepare(names, copy.view)
        self._whole.prepare(names, copy.view)

    def _check_memory(self) -> None:
        now = _tensors(self._model)
        for name, memory in self._live.memories.items():
            if name not in now or key_of(now[name]) != key_of(memory.flat):
                raise LayoutError(
                    f"live tensor {name!r} was replaced: start the engine again, so that its placement is learned "
                    "anew",
                    tensor=name,
                )

    def _records(self, copy: HostCopy) -> Iterator[Record]:
        held = copy.held()
        mapped = (record for record in copy.pending if record.name not in self.whole)
        checked = mapped if held is None else agreeing(mapped, self._live.aliases, held)
        return self._live.localised(checked)

    def _differences(self, copy: HostCopy) -> Iterator[Record]:
        for name in self._live.learned.layout.catalog:
            yield from self._live.differences(name, copy.view(name))

    def _take_back(self, copy: HostCopy, error: BaseException) -> None:
        try:
            self.undo(copy)
        except Exception as second:
            raise TornUpdateError(
                f"the update failed ({type(error).__name__}: {error}), and undoing it failed too "
                f"({type(second).__name__}: {second}): the worker holds a mix of two versions"
            ) from second
        if not isinstance(error, SynclineError):
            _log.error("syncline: writing failed: %s: %s", type(error).__name__, error)

    def _close(self) -> None:
        if self._prepared is not None:
            self._prepared.close()
        self._prepared, self._is_written = None, False

    def _report(self) -> None:
        learned = self._live.learned
        _log.info("syncline: %s", str(learned).splitlines()[0])
        for name, why in self.whole.items():
            _log.warning("syncline: %s is loaded again whole when it changes: %s", name, why)


def _checked(
    placement: WorkerPlacement, base: Base, samples: int | None
) -> tuple[LiveWeights, Mapping[str, str]]:
    """Return the live weights, and which values do not stand in them where they should.

    Whether experts are packed is asked of the values: some kernels keep them as they were loaded.
    """
    orders = placement.orders
    live = LiveWeights(placement.learned, placement.memories, orders)
    faults = live.check_values(base, samples)
    wrong = {b.local for b in placement.learned.placement.blocks if b.name in faults}
    if not wrong & orders.keys():
        return live, faults
    orders = {name: order for name, order in orders.items() if name not in wrong}
    live = LiveWeights(placement.learned, placement.memories, orders)
    return live, live.check_values(base, samples)


def _tensors(model: Any) -> dict[str, Any]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
