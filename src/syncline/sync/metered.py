"""A store that counts the bytes that go in and out, and charges reads to the phase `fetch`."""

from __future__ import annotations

import builtins
import threading
from collections.abc import Iterable, Iterator

from syncline.abc import Buffer, Store
from syncline.stores.passing import PassingStore
from syncline.sync.phases import Phases
from syncline.types import ObjectInfo


class MeteredStore(PassingStore):
    """Another store, counted.

    Args:
        phases: of the operation that reads; None: reads are not timed.

    Attributes:
        wire_bytes: of objects put and got and of swaps, so far; listings are not counted.
    """

    def __init__(self, store: Store, phases: Phases | None = None) -> None:
        super().__init__(store)
        self._phases = Phases() if phases is None else phases
        self._counting = threading.Lock()
        self.wire_bytes = 0

    def put(self, key: str, chunks: Iterable[Buffer]) -> None:
        """Create the object; see `Store.put`."""
        super().put(key, self._counted(chunks))

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes of the object; see `Store.get`."""
        with self._phases("fetch"):
            data = super().get(key, start, stop)
        self._count(len(data))
        return data

    def pieces(self, key: str, size_bytes: int) -> Iterator[bytes]:
        """Yield the object in order; see `Store.pieces`. Timed by who asks."""
        for piece in super().pieces(key, size_bytes):
            self._count(len(piece))
            yield piece

    def list(self, prefix: str = "") -> builtins.list[ObjectInfo]:
        """List; see `Store.list`."""
        with self._phases("fetch"):
            return super().list(prefix)

    def compare_and_swap(self, key: str, expected: bytes | None, new: bytes) -> None:
        """Swap; see `Store.compare_and_swap`."""
        super().compare_and_swap(key, expected, new)
        self._count(len(new))

    def _counted(self, chunks: Iterable[Buffer]) -> Iterator[Buffer]:
        for chunk in chunks:
            yield chunk
            self._count(memoryview(chunk).nbytes)

    def _count(self, nbytes: int) -> None:
        with self._counting:
            self.wire_bytes += nbytes
