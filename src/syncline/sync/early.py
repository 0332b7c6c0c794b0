"""The first part of the version that probably comes next, asked for before it is known that there is one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Self

from syncline import config
from syncline.abc import Store
from syncline.errors import TransportError
from syncline.format import names
from syncline.stores.passing import PassingStore
from syncline.version import HeldVersion, Manifest

_MOST_BYTES = 32 << 20
_MORE_BYTES = 1 << 20


class EarlyPart(PassingStore):
    """Another store, with one object on its way already; a context manager, whose end stops that.

    Saves a round trip where a delta follows a delta; costs a request where nothing follows. What comes is believed
    no more than anything else that a store returns: it is proved by the manifest's digest.

    Args:
        held: version from which somebody goes on; None: nothing is asked for.

    Memory: twice the first part of `held` and 1 MiB, at most 65 MiB. A part that is larger than this comes from the
    store in pieces, from its start.
    """

    def __init__(self, store: Store, held: HeldVersion | None) -> None:
        super().__init__(store)
        self._key: str | None = None
        self._limit_bytes = 0
        if held is not None and _is_worth_it(store, held):
            parts = held.manifest.parts
            self._key = names.key(held.version + 1, names.part_name(0, len(parts)))
            self._limit_bytes = 2 * parts[0].size_bytes + _MORE_BYTES
        self._changed = threading.Condition()
        self._chunks: deque[bytes] = deque()
        self._is_over = False
        self._is_wanted = self._key is not None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._key is not None:
            self._thread = threading.Thread(target=self._run, args=(self._key,), daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        if self._thread is not None:
            self._thread.join()

    def stop(self) -> None:
        """Ask for no more of it; the store is asked itself from here on."""
        self._is_wanted = False

    def keep_for(self, manifest: Manifest | None) -> None:
        """Stop unless it is the first part of this version."""
        if (
            manifest is None
            or not manifest.parts
            or self._key != names.key(manifest.version, manifest.parts[0].path)
        ):
            self.stop()

    def pieces(self, key: str, size_bytes: int) -> Iterator[bytes]:
        """Yield the object in order; see `Store.pieces`. The early one is there once."""
        start = 0
        if key == self._key and size_bytes > self._limit_bytes:
            self.stop()  # its rest may be gigabytes, and would come at once
        if key == self._key and self._is_wanted:
            for chunk in self._came():
                yield chunk[: size_bytes - start]
                start = min(size_bytes, start + len(chunk))
            self.stop()
        if start == 0:
            yield from self._store.pieces(key, size_bytes)
        elif start < size_bytes:
            yield self._store.get(key, start, size_bytes)

    def _came(self) -> Iterator[bytes]:
        """Yield what comes until no more does."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_over or self._chunks)
                if not self._chunks:
                    return
                chunk = self._chunks.popleft()
            yield chunk

    def _run(self, key: str) -> None:
        try:
            for chunk in self._store.pieces(key, self._limit_bytes):
                with self._changed:
                    self._chunks.append(chunk)
                    self._changed.notify_all()
                if not self._is_wanted:
                    return
        except TransportError:
            return  # who needs it asks the store, and meets the error then
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()


def _is_worth_it(store: Store, held: HeldVersion) -> bool:
    """Tell whether a round trip costs something, and how the next first part is called is known."""
    manifest = held.manifest
    return (
        store.is_remote
        and store.visible_within_s == 0  # or it would be waited for, though it may never come
        and config.threads() > 1
        and manifest.kind == "delta"
        and bool(manifest.parts)
        and manifest.parts[0].size_bytes <= _MOST_BYTES
    )
