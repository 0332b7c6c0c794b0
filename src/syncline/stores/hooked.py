"""A store on a mount that shows writes to other hosts only when it is told to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from syncline.abc import Buffer, Store
from syncline.stores.passing import PassingStore
from syncline.types import ObjectInfo

Hook = Callable[[str], None]


class HookedStore(PassingStore):
    """Another store, with calls of yours around what it does.

    Args:
        store: where the objects are.
        post_write: called with the key after every object that was put, swapped or deleted, before
            the write counts as done: commit the volume here.
        pre_read: called with the key before an object is read from its beginning, with the prefix before a
            listing, and with the key before a swap compares: reload the volume here.

    An error out of a hook passes. After one out of `post_write` the object may or may not be seen by others; the
    publisher takes the put for failed, and its version is not committed.

    Example:
        >>> from syncline.stores import MemoryStore
        >>> store = HookedStore(MemoryStore(), post_write=print)
        >>> store.put("v1/part", [b"x"])
        v1/part
    """

    def __init__(
        self, store: Store, *, post_write: Hook | None = None, pre_read: Hook | None = None
    ) -> None:
        super().__init__(store)
        self._post_write = _nothing if post_write is None else post_write
        self._pre_read = _nothing if pre_read is None else pre_read

    def put(self, key: str, chunks: Iterable[Buffer]) -> None:
        """Create the object, then call `post_write`; see `Store.put`."""
        self._store.put(key, chunks)
        self._post_write(key)

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Call `pre_read` if this begins the object, then return its bytes; see `Store.get`."""
        if start == 0:
            self._pre_read(key)
        return self._store.get(key, start, stop)

    def pieces(self, key: str, size_bytes: int) -> Iterator[bytes]:
        """Call `pre_read`, then yield the object in order; see `Store.pieces`."""
        self._pre_read(key)
        return self._store.pieces(key, size_bytes)

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """Call `pre_read`, then list; see `Store.list`."""
        self._pre_read(prefix)
        return self._store.list(prefix)

    def compare_and_swap(self, key: str, expected: bytes | None, new: bytes) -> None:
        """Call `pre_read`, swap, and call `post_write`; see `Store.compare_and_swap`."""
        self._pre_read(key)
        self._store.compare_and_swap(key, expected, new)
        self._post_write(key)

    def delete(self, key: str) -> None:
        """Remove the object, then call `post_write`; see `Store.delete`."""
        self._store.delete(key)
        self._post_write(key)


def _nothing(key: str) -> None:
    """Do nothing."""
