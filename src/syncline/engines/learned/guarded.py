"""Writes of torch to live memory, with what stood there kept: they can be taken back."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from syncline.engines.learned.memories import Memories, Memory
from syncline.engines.learned.tracked import written


class Guarded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, copies a live memory before this thread first writes to it.

    Memory: as much as is written.
    """

    def __init__(self, memories: Memories) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memories = memories
        self._kept: dict[str, tuple[Memory, Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        given = {} if kwargs is None else kwargs
        for tensor in written(func, args, given):
            memory = self._memories.of(tensor)
            if memory is not None and memory.name not in self._kept:
                self._kept[memory.name] = (memory, memory.flat.clone())
        return func(*args, **given)

    def changed(self) -> list[str]:
        """Return the names of the memories that hold other bits than before."""
        return [
            name
            for name, (memory, kept) in self._kept.items()
            if not torch.equal(memory.flat, kept)
        ]

    def restore(self) -> None:
        """Put back what stood there; may be repeated."""
        for memory, kept in self._kept.values():
            memory.flat.copy_(kept)
