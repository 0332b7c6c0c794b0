"""Objects in the memory of this process: for tests, examples, and both sides in one process."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from syncline.abc import Buffer, Store
from syncline.errors import ObjectExistsError, ObjectNotFoundError, VersionConflictError
from syncline.stores import keys
from syncline.types import ObjectInfo


class MemoryStore(Store):
    """A store in memory, shared by everyone who holds this object; safe to use from many threads.

    Example:
        >>> store = MemoryStore()
        >>> store.put("a/b", [b"12", b"3"])
        >>> store.get("a/b", 1), store.list()
        (b'23', [ObjectInfo(key='a/b', size_bytes=3)])
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: dict[str, bytes] = {}

    def __str__(self) -> str:
        return "a memory store"

    def put(self, key: str, chunks: Iterable[Buffer]) -> None:
        """Create the object; see `Store.put`. Cost: one copy of the bytes."""
        keys.split(key)
        content = b"".join(bytes(chunk) for chunk in chunks)
        with self._lock:
            if key in self._objects:
                raise ObjectExistsError(f"put {key}: the key is taken; nothing was changed")
            self._objects[key] = content

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes `start:stop`; see `Store.get`."""
        keys.split(key)
        with self._lock:
            content = self._objects.get(key)
        if content is None:
            raise ObjectNotFoundError(f"get {key}: no object in this memory store has this key")
        return content[start:stop]

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """Return the objects whose key begins with `prefix`; see `Store.list`."""
        keys.check_prefix(prefix)
        with self._lock:
            found = [(key, len(content)) for key, content in self._objects.items()]
        return [ObjectInfo(key, nbytes) for key, nbytes in sorted(found) if key.startswith(prefix)]

    def compare_and_swap(self, key: str, expected: bytes | None, new: bytes) -> None:
        """Replace the content `expected` by `new`; see `Store.compare_and_swap`."""
        keys.split(key)
        with self._lock:
            if self._objects.get(key) != expected:
                raise VersionConflictError(
                    f"swap {key}: the object is not what it was when it was read; read it again"
                )
            self._objects[key] = bytes(new)

    def delete(self, key: str) -> None:
        """Remove the object; see `Store.delete`."""
        keys.split(key)
        with self._lock:
            self._objects.pop(key, None)
