"""Tensors without storage that carry along which elements of a checkpoint they hold."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from syncline.engines.learned.followed import Followed
from syncline.engines.learned.following import FOLLOWED
from syncline.engines.learned.notes import Notes
from syncline.errors import LayoutError


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


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
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
        source = args[1]
        notes.copy(target, source.names, source.content, source.dtype)
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
