"""Tensors that have no place of their own in live memory: vLLM's own loader loads them again, whole."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any

from syncline.abc import Base
from syncline.arrays import NUMPY_NAMES
from syncline.engines.learned.memories import Memories
from syncline.errors import LayoutError
from syncline.types import Bits, TensorMeta
from syncline.vllm.forms import View


class WholeTensors:
    """Loads tensors through the model's `load_weights`, and takes that back bit for bit.

    Args:
        model: the module that the worker runs.
        memories: all live memory.
        why: by canonical name of each such tensor, why it is not mapped.
        base: the checkpoint that the model was loaded from.

    Raises:
        LayoutError: loading them again, unchanged, changes live memory: the loader cannot be used. It is
            as it was.
    """

    def __init__(self, model: Any, memories: Memories, why: Mapping[str, str], base: Base) -> None:
        self._model = model
        self._memories = memories
        self._why = why
        self._metas = {name: base(name)[0] for name in why}
        self._waiting: dict[str, Bits] = {}
        self._guards: list[Any] = []
        if why:
            self._prove(base)

    def prepare(self, names: Collection[str], view: View) -> None:
        """Note which tensors are to be loaded, and their new bits."""
        self._waiting = {name: view(name) for name in self._why if name in names}

    def load(self) -> None:
        """Load what was prepared."""
        if self._waiting:
            self._load(self._waiting)

    def undo(self) -> None:
        """Put back what stood in live memory before; may be repeated."""
        for guard in reversed(self._guards):
            guard.restore()

    def settle(self) -> None:
        """Forget how to undo."""
        self._waiting = {}
        self._guards.clear()

    def _load(self, tensors: Mapping[str, Bits]) -> Any:
        guard = import_module("syncline.engines.learned.guarded").Guarded(self._memories)
        self._guards.append(guard)
        with guard:
            self._model.load_weights(self._torch(tensors.items()))
        return guard

    def _prove(self, base: Base) -> None:
        guard = self._load({name: base(name)[1] for name in self._why})
        changed = guard.changed()
        guard.restore()
        self.settle()
        if changed:
            name, why = next(iter(self._why.items()))
            raise LayoutError(
                f"{len(self._why)} tensors cannot be followed in place, {name!r} among them ({why}), and vLLM's "
                f"loader, given the same values again, changes {changed[0]!r}: its layout was changed after "
                "loading; serve full checkpoints",
                tensor=name,
            )

    def _torch(self, tensors: Iterable[tuple[str, Bits]]) -> Iterator[tuple[str, Any]]:
        import torch  # noqa: PLC0415

        names = {canonical: name for name, canonical in NUMPY_NAMES.items()}
        for name, bits in tensors:
            meta: TensorMeta = self._metas[name]
            raw = torch.from_numpy(bits.copy().view("u1"))
            yield name, raw.view(getattr(torch, names[meta.dtype])).reshape(meta.shape)
