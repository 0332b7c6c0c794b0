"""See every operation of torch that writes watched memory, before it runs.

A dispatch mode is told of each operation on its thread, with a schema that says which arguments are
written. Operations on lists of tensors (`_foreach_*`, `_fused_*`) treat each tensor by itself, so a list
too large for the bucket is handed on in parts, with the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from importlib import import_module
from typing import Any

from syncline.sources.watched_tensor import Extent, WatchedTensor, extent_of

_BY_LIST = ("aten::_foreach_", "aten::_fused_")


class Memory:
    """Finds watched tensors by the memory that an operation writes, views and aliases included."""

    def __init__(self, watched: Iterable[WatchedTensor]) -> None:
        self._by_storage: dict[int, list[tuple[Extent, WatchedTensor]]] = {}
        for one in watched:
            if one.tensor.numel():
                entry = extent_of(one.tensor), one
                self._by_storage.setdefault(_storage(one.tensor), []).append(entry)
        self._known: dict[tuple[int, int], list[WatchedTensor]] = {}

    def under(self, tensor: Any) -> list[WatchedTensor]:
        """Return the watched tensors some of whose bytes lie within a tensor's."""
        if not _has_memory(tensor) or not tensor.numel():
            return []
        here = self._by_storage.get(_storage(tensor))
        if here is None:
            return []
        start, stop = extent_of(tensor)
        if (start, stop) not in self._known:
            self._known[start, stop] = [
                one for (begin, end), one in here if begin < stop and start < end
            ]
        return self._known[start, stop]


class Bucket:
    """Copies of what stood in tensors before they were written, at most so many bytes of them.

    Args:
        limit_bytes: copies are compared, and given up, before they exceed it; one operation that
            writes more than this at once is the exception.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.peak_bytes = 0
        self._held: dict[WatchedTensor, Any] = {}
        self._bytes = 0

    def hold(self, tensors: Sequence[WatchedTensor]) -> None:
        """Keep a copy of these tensors, which are about to be written, until they are compared."""
        wanted = [one for one in dict.fromkeys(tensors) if one not in self._held]
        wanted_bytes = sum(one.meta.nbytes for one in wanted)
        for one in [one for one in self._held if one not in tensors]:
            if self._bytes + wanted_bytes <= self.limit_bytes:
                break
            self._compare(one)
        for one in wanted:
            self._held[one] = one.hold()
            self._bytes += one.meta.nbytes
        self.peak_bytes = max(self.peak_bytes, self._bytes)

    def flush(self) -> None:
        """Compare everything that is held."""
        for one in list(self._held):
            self._compare(one)

    def drop(self) -> None:
        """Give up everything that is held, uncompared; what has changed is not known any more."""
        self._held.clear()
        self._bytes = 0

    def _compare(self, one: WatchedTensor) -> None:
        one.compare(self._held[one])
        del self._held[one]
        self._bytes -= one.meta.nbytes


def seeing(memory: Memory, bucket: Bucket) -> AbstractContextManager[Any]:
    """Return a context in which the bucket holds what stood in watched memory before each operation."""
    mode: AbstractContextManager[Any] = _mode_class()(memory, bucket)
    return mode


@cache
def _mode_class() -> Any:
    base = import_module("torch.utils._python_dispatch").TorchDispatchMode

    class SeeWrites(base):  # type: ignore[misc, valid-type]
        def __init__(self, memory: Memory, bucket: Bucket) -> None:
            super().__init__()
            self._memory = memory
            self._bucket = bucket

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            named = {} if kwargs is None else kwargs
            if not func._schema.is_mutable:  # noqa: SLF001
                return func(*args, **named)
            return _run(self._memory, self._bucket, func, args, named)

    return SeeWrites


def _run(
    memory: Memory, bucket: Bucket, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Run an operation, after the bucket has taken a copy of what it is going to write."""
    if not _is_by_list(func, args, kwargs):
        bucket.hold(_written(memory, func, args, kwargs))
        return func(*args, **kwargs)
    for part in _parts(memory, bucket.limit_bytes, args[0]):
        cut = _cutter(part, len(args[0]))
        some, named = [cut(value) for value in args], {k: cut(v) for k, v in kwargs.items()}
        bucket.hold(_written(memory, func, some, named))
        func(*some, **named)
    return None


def _is_by_list(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether an operation does to each tensor of its first list the same, by itself."""
    if not func._schema.name.startswith(_BY_LIST) or not _is_list(args[0]):  # noqa: SLF001
        return False
    lists = [value for value in (*args, *kwargs.values()) if _is_list(value)]
    return all(len(value) in (0, len(args[0])) for value in lists)


def _written(
    memory: Memory, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[WatchedTensor]:
    found: list[WatchedTensor] = []
    for argument, value in _arguments(func, args, kwargs):
        if value is None or argument.alias_info is None or not argument.alias_info.is_write:
            continue
        for tensor in value if _is_list(value) else [value]:
            found += memory.under(tensor)
    return found


def _arguments(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Any, Any]]:
    declared = func._schema.arguments  # noqa: SLF001 - the only place where torch says what is written
    yield from zip(declared, args, strict=False)
    for argument in declared[len(args) :]:
        yield argument, kwargs.get(argument.name)


def _parts(memory: Memory, limit_bytes: int, tensors: Sequence[Any]) -> Iterator[slice]:
    """Yield consecutive parts of a list that write at most so many watched bytes each."""
    start, part_bytes = 0, 0
    for index, tensor in enumerate(tensors):
        nbytes = sum(one.meta.nbytes for one in memory.under(tensor))
        if part_bytes and part_bytes + nbytes > limit_bytes:
            yield slice(start, index)
            start, part_bytes = index, 0
        part_bytes += nbytes
    yield slice(start, len(tensors))


def _cutter(part: slice, count: int) -> Callable[[Any], Any]:
    def cut(value: Any) -> Any:
        # One scalar a tensor may also come as a tensor of scalars; no other argument is 1-d.
        is_one_each = _is_list(value) or getattr(value, "ndim", 0) == 1
        return value[part] if is_one_each and len(value) == count else value

    return cut


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)


def _has_memory(tensor: Any) -> bool:
    return str(tensor.layout) == "torch.strided" and not hasattr(tensor, "__tensor_flatten__")


def _storage(tensor: Any) -> int:
    address: int = tensor.untyped_storage().data_ptr()
    return address
