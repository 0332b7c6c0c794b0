"""A store that passes everything on: the base of those that do something on the way."""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager

from syncline.abc import Buffer, Store
from syncline.types import ObjectInfo


class PassingStore(Store):
    """Another store, unchanged.

    Args:
        store: where the objects are.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.visible_within_s = store.visible_within_s
        self.is_remote = store.is_remote

    def __str__(self) -> str:
        return str(self._store)

    @property
    def puts_at_once(self) -> int:
        """As of the store."""
        return self._store.puts_at_once

    def turn(self) -> AbstractContextManager[None]:
        """Hold the store's; see `Store.turn`."""
        return self._store.turn()

    def put(self, key: str, chunks: Iterable[Buffer]) -> None:
        """Create the object; see `Store.put`."""
        self._store.put(key, chunks)

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes of the object; see `Store.get`."""
        return self._store.get(key, start, stop)

    def pieces(self, key: str, size_bytes: int) -> Iterator[bytes]:
        """Yield the object in order; see `Store.pieces`."""
        return self._store.pieces(key, size_bytes)

    def list(self, prefix: str = "") -> builtins.list[ObjectInfo]:
        """Return what is there; see `Store.list`."""
        return self._store.list(prefix)

    def compare_and_swap(self, key: str, expected: bytes | None, new: bytes) -> None:
        """Replace the content `expected` by `new`; see `Store.compare_and_swap`."""
        self._store.compare_and_swap(key, expected, new)

    def delete(self, key: str) -> None:
        """Remove the object; see `Store.delete`."""
        self._store.delete(key)
