"""What a model's own loader copies where, noted while it runs over tensors without memory.

A loader is handed tensors that have a checkpoint's names, dtypes and shapes and no storage. Everything
that only moves elements is followed (`following`); every copy into live memory is noted and not carried
out. Whatever else reaches live memory is kept from it, and costs the tensors concerned their mapping.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from syncline.arrays import NUMPY_NAMES
from syncline.engines.learned.followed import Followed
from syncline.engines.learned.following import FOLLOWED
from syncline.engines.learned.memories import Memories, Memory
from syncline.errors import LayoutError, VerifyError
from syncline.types import TensorMeta

Load = Callable[[Iterator[tuple[str, Any]]], object]
"""A model's `load_weights`: draws (name, tensor) pairs and writes them where they belong."""

_DTYPES = {canonical: getattr(torch, name) for name, canonical in NUMPY_NAMES.items()}


@dataclass(frozen=True, slots=True)
class Region:
    """A copy that the loader made: elements of a checkpoint tensor to units of a live memory.

    Element `offset + sum(i[k] * strides[k])` of the checkpoint tensor `name` goes to unit
    `place + sum(i[k] * steps[k])` of the memory `local`.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]
    local: str
    place: int
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Overwritten:
    """Units of a memory, from `first` to `last`, that got something else than copies, and what wrote them."""

    local: str
    first: int
    last: int
    by: str


@dataclass(frozen=True, slots=True)
class Recording:
    """What a loader did with every tensor of a checkpoint.

    Attributes:
        regions: the copies, in order.
        reasons: by name of a tensor whose copies say nothing: why.
        overwritten: what else the loader did to live memory.
    """

    regions: tuple[Region, ...]
    reasons: Mapping[str, str]
    overwritten: tuple[Overwritten, ...]


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
        with torch.no_grad(), _Watch(noted):
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


class Notes:
    """What is known so far; written from any thread.

    Attributes:
        refused: names of the tensors whose operation just raised.
    """

    def __init__(self, memories: Memories) -> None:
        self.memories = memories
        self.regions: list[Region] = []
        self.reasons: dict[str, str] = {}
        self.overwritten: list[Overwritten] = []
        self.refused: tuple[str, ...] = ()
        self._lock = threading.Lock()

    def lose(self, names: Iterable[str], reason: str) -> None:
        """Note why tensors cannot be mapped; the first reason stays."""
        with self._lock:
            for name in names:
                self.reasons.setdefault(name, reason)

    def overwrite(self, target: Any, by: str) -> bool:
        """Note that live memory would get something that is no copy; return whether it is live."""
        memory = self.memories.of(target)
        if memory is None or not target.numel():
            return memory is not None
        first = int(target.storage_offset())
        sides = zip(target.shape, target.stride(), strict=True)
        last = first + sum((side - 1) * step for side, step in sides)
        scale = target.element_size() / memory.unit_bytes
        with self._lock:
            self.overwritten.append(
                Overwritten(memory.name, int(first * scale), int((last + 1) * scale), by)
            )
        return True

    def copy(self, target: Any, source: Tracked) -> None:
        """Note a copy of a followed tensor into memory."""
        names = source.names
        if not target.numel():
            return
        memory = self.memories.of(target)
        if memory is None:
            self.lose(names, "its loader copies it to memory that is not the model's")
            return
        if isinstance(source.content, str):
            self.lose(names, source.content)
            return
        if target.dtype != source.dtype:
            self.lose(names, f"its loader converts {source.dtype} to {target.dtype}")
            return
        if target.element_size() != memory.unit_bytes:
            self.lose(names, "its memory is shared by tensors of several widths")
            return
        try:
            content = source.content.expanded(tuple(target.shape))
        except LayoutError as error:
            self.lose(names, str(error))
            return
        found = [_region(piece, target, memory) for piece in content.pieces]
        with self._lock:
            self.regions.extend(found)

    def recording(self) -> Recording:
        """Return what was noted."""
        return Recording(tuple(self.regions), dict(self.reasons), tuple(self.overwritten))


def _region(piece: Any, target: Any, memory: Memory) -> Region:
    steps = target.stride()
    place = target.storage_offset() + sum(
        a * step for a, step in zip(piece.start, steps, strict=True)
    )
    return Region(
        piece.name, piece.shape, piece.offset, piece.strides, memory.name, place, tuple(steps)
    )


class Tracked(torch.Tensor):
    """A tensor without storage, whose operations are followed wherever it goes, in every thread.

    Attributes:
        names: the checkpoint tensors that it was made of.
        content: which of their elements it holds; a string says why that is not known.
        shadow: a meta tensor of the same dtype, shape and strides.
    """

    content: Followed | str
    names: tuple[str, ...]
    shadow: torch.Tensor
    notes: Notes

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # noqa: SLF001 - torch's documented way

    def __new__(
        cls,
        shadow: torch.Tensor,
        content: Followed | str,
        names: tuple[str, ...],
        notes: Notes,
        device: torch.device,
    ) -> Self:
        """Return a tensor that looks like `shadow` on `device`."""
        made: Self = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001 - torch's documented way
            cls,
            shadow.shape,
            strides=shadow.stride(),
            storage_offset=shadow.storage_offset(),
            dtype=shadow.dtype,
            device=device,
            requires_grad=False,
        )
        made.shadow, made.content, made.names, made.notes = shadow, content, names, notes
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Tracked({self.names}, {tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        """Follow an operation."""
        given = {} if kwargs is None else kwargs
        notes = next(one.notes for one in _tracked(args, given))
        return _follow(notes, func, args, given)


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


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps everything else that this thread does from writing to live memory."""

    def __init__(self, notes: Notes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._notes = notes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        given = {} if kwargs is None else kwargs
        if _tracked(args, given):
            return _follow(self._notes, func, args, given)
        for tensor in written(func, args, given):
            if self._notes.overwrite(tensor, str(func)):
                return tensor
        return func(*args, **given)


def _follow(notes: Notes, func: Any, args: Any, kwargs: Any) -> object:
    """Carry an operation on tracked tensors out on what they stand for."""
    name = func._schema.name  # noqa: SLF001 - no other way to ask what an operator writes
    targets = written(func, args, kwargs)
    if targets:
        return _write(notes, name, targets, args, kwargs)
    tracked = _tracked(args, kwargs)
    names = tuple(dict.fromkeys(n for one in tracked for n in one.names))
    device = kwargs.get("device") or tracked[0].device
    try:
        result = func(*_shadows(args), **_on_meta(_shadows(kwargs)))
    except Exception:
        notes.refused = names
        raise
    content = _content(name, tracked, args, kwargs)

    def wrapped(shadow: torch.Tensor, held: Followed | str) -> Tracked:
        fault = None if isinstance(held, str) else _misfit(shadow, held, tracked, name)
        return Tracked(shadow, held if fault is None else fault, names, notes, device)

    if isinstance(result, torch.Tensor):
        return wrapped(result, str(content) if isinstance(content, list) else content)
    if isinstance(result, (list, tuple)) and all(isinstance(r, torch.Tensor) for r in result):
        lost = content if isinstance(content, str) else f"its loader computes with it ({name})"
        each: list[Followed | str] = (
            [*content] if isinstance(content, list) else [lost] * len(result)
        )
        return [wrapped(*pair) for pair in zip(result, each, strict=True)]
    notes.refused = names
    raise LayoutError(f"its loader looks at its values ({name})", tensor=names[0])


def _write(notes: Notes, name: str, targets: list[Any], args: Any, kwargs: Any) -> object:
    """Note an operation that writes; nothing is written."""
    (target, *_) = targets
    tracked = _tracked(args, kwargs)
    if name == "aten::copy_" and not isinstance(target, Tracked):
        notes.copy(target, args[1])
        return target
    notes.lose((n for one in tracked for n in one.names), f"its loader writes with {name}")
    if not isinstance(target, Tracked):
        notes.overwrite(target, name)
    return target


def _content(
    name: str, tracked: list[Tracked], args: Any, kwargs: Any
) -> Followed | list[Followed] | str:
    """Return what the result holds, or why that is not known."""
    for one in tracked:
        if isinstance(one.content, str):
            return one.content
    if name not in FOLLOWED:
        return f"its loader computes with it ({name})"
    try:
        return FOLLOWED[name](*_contents(args), **_contents(kwargs))
    except LayoutError as error:
        return str(error)
    except (TypeError, AttributeError):  # a followed tensor among others, or an unknown overload
        return f"its loader computes with it ({name})"


def _misfit(shadow: torch.Tensor, held: Followed, sources: list[Tracked], name: str) -> str | None:
    """Return why a result is not what was followed: the last word is torch's."""
    for source in sources:
        if shadow.dtype != source.dtype:
            return f"its loader makes {shadow.dtype} of {source.dtype} ({name})"
    if tuple(shadow.shape) != held.shape:
        return f"its loader computes with it ({name})"
    return None


def _tracked(args: Any, kwargs: Any) -> list[Tracked]:
    return [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tracked)]


def written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the tensors that an operator writes."""
    found: list[Any] = []
    for at, argument in enumerate(func._schema.arguments):  # noqa: SLF001 - as above
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[at] if at < len(args) else kwargs.get(argument.name)
            found += [one for one in tree_flatten(value)[0] if isinstance(one, torch.Tensor)]
    return found


def _shadows(values: Any) -> Any:
    def shadow(one: torch.Tensor) -> torch.Tensor:
        return one.shadow if isinstance(one, Tracked) else one.to("meta")

    return tree_map_only(torch.Tensor, shadow, values)


def _contents(values: Any) -> Any:
    return tree_map_only(Tracked, lambda one: one.content, values)


def _on_meta(kwargs: Any) -> Any:
    moved = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    return {**moved, "device": "meta"} if "device" in moved else moved
