"""What a model's own loader copies where, noted while it runs over tensors without memory.

A loader is handed tensors that have a checkpoint's names, dtypes and shapes and no storage. Everything
that only moves elements is followed (`following`); every copy into live memory is noted and not carried
out. Whatever else reaches live memory is kept from it, and costs the tensors concerned their mapping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from syncline.arrays import NUMPY_NAMES
from syncline.engines.learned.followed import Followed
from syncline.engines.learned.memories import Memories
from syncline.engines.learned.notes import Notes, Recording
from syncline.engines.learned.tracked import Tracked, Watch
from syncline.errors import LayoutError, VerifyError
from syncline.types import TensorMeta

Load = Callable[[Iterator[tuple[str, Any]]], object]
"""A model's `load_weights`: draws (name, tensor) pairs and writes them where they belong."""

_DTYPES = {canonical: getattr(torch, name) for name, canonical in NUMPY_NAMES.items()}


def record(load: Load, metas: Iterable[TensorMeta], memories: Memories) -> Recording:
    """Run a loader over tensors without memory and return what it copied where; nothing is written.

    Args:
        load: run in this thread; may use threads of its own. It is run again without a tensor that it
            fails on. It must not keep what it is handed.
        metas: every tensor of the checkpoint.
        memories: where the loader writes; other memory does not count as the model's.

    Raises:
        LayoutError: the loader fails before it draws a tensor, or replaced live tensors.
        VerifyError: the loader changed live memory out of sight of torch, or in a thread of its own; the
            model must be loaded again.

    Cost: what the loader does beside copying; live memory is read twice, to see that nothing changed.
    """
    noted = Notes(memories)
    waiting = {meta.name: meta for meta in metas}
    before = {memory.name: memory.fingerprint() for memory in memories if not memory.is_meta}
    while waiting:
        failed = _pass(load, waiting, noted)
        if failed is None:
            break
        done = {region.name for region in noted.regions} | noted.reasons.keys()
        left = {name: meta for name, meta in waiting.items() if name not in done}
        if len(left) == len(waiting):
            noted.lose(left, f"its loader fails on {failed!r} each time")
            break
        waiting = left
    replaced = memories.replaced()
    if replaced:
        raise LayoutError(
            f"the loader replaced {len(replaced)} live tensors, {replaced[0]!r} among them, instead of "
            "writing into them: load the model again, and its weights whole",
            tensor=replaced[0],
        )
    for memory in memories:
        if not memory.is_meta and memory.fingerprint() != before[memory.name]:
            raise VerifyError(
                f"{memory.name!r} changed while the loader ran over tensors without memory: it writes "
                "out of sight of torch; load the model again, and its weights whole",
                tensor=memory.name,
            )
    return noted.recording()


def _pass(load: Load, waiting: Mapping[str, TensorMeta], noted: Notes) -> str | None:
    """Run the loader once; return the name of the tensor on which it failed."""
    current: list[str] = []

    def handed() -> Iterator[tuple[str, Any]]:
        for name, meta in waiting.items():
            current[:] = [name]
            if meta.dtype in _DTYPES:
                yield name, handed_tensor(meta, noted)
            else:
                noted.lose((name,), f"torch has no dtype {meta.dtype}")

    noted.refused = ()
    try:
        with torch.no_grad(), Watch(noted):
            load(handed())
    except Exception as error:
        names = noted.refused or tuple(current)
        if not names:
            raise LayoutError(
                f"the model's loader failed before its first tensor: {type(error).__name__}: {error}"
            ) from error
        noted.lose(names, f"its loader raised {type(error).__name__}: {str(error)[:200]}")
        return names[0]
    return None


def handed_tensor(meta: TensorMeta, notes: Notes) -> Tracked:
    """Return the tensor without storage that stands for a checkpoint tensor."""
    shadow = torch.empty(meta.shape, dtype=_DTYPES[meta.dtype], device="meta")
    return Tracked(
        shadow,
        Followed.whole(meta.name, meta.shape),
        (meta.name,),
        notes,
        torch.device("cpu"),
    )
