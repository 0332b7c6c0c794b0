"""One obstore store, each call tried again until a deadline, its errors turned into ours.

Everything that Syncline asks of a service goes through here. Nothing is conditional unless the caller says so.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import obstore
from obstore.exceptions import NotSupportedError

from syncline.abc import Buffer
from syncline.errors import ObjectNotFoundError, StoreError
from syncline.stores.obstore_errors import FROM_OBSTORE, is_passing, mapped, without_secrets
from syncline.stores.patience import Patience
from syncline.stores.pump import pumped
from syncline.stores.streams import CHUNK_BYTES, PIECE_BYTES
from syncline.types import ObjectInfo

T = TypeVar("T")

_LEAST_CHUNK_BYTES = 16 << 10

MARK = "syncline"
"""Attribute that names the one put that an object came from, so that a put whose answer was lost is known."""


class Service:
    """The calls of one obstore store.

    Args:
        store: from `obstore.store`.
        patience: how long one request is tried again.

    Every call raises what `obstore_errors.mapped` makes of obstore's errors.
    """

    def __init__(self, store: Any, patience: Patience) -> None:
        self._store = store
        self._patience = patience
        self._takes_marks = True

    def read(self, key: str) -> tuple[bytes, dict[str, str]] | None:
        """Return the object and the condition under which it is still this one; None if there is none."""

        def attempt() -> tuple[bytes, dict[str, str]]:
            found = obstore.get(self._store, key)
            return bytes(found.bytes()), _condition(found.meta)

        try:
            return self._call(f"get {key}", attempt)
        except ObjectNotFoundError:
            return None

    def get(self, key: str, start: int, stop: int | None) -> bytes:
        """Return bytes `start:stop`, clipped to the object's size. Cost: one request, mostly."""
        if stop is not None and stop <= start:
            self.size_bytes(key)  # raises if there is no such object
            return b""
        doing = f"get {key}"

        def attempt() -> bytes:
            if start == 0 and stop is None:
                return bytes(obstore.get(self._store, key).bytes())
            wanted: Any = {"offset": start} if stop is None else (start, stop)
            found = obstore.get(self._store, key, options={"range": wanted})
            return bytes(found.bytes())

        try:
            return self._call(doing, attempt)
        except ObjectNotFoundError:
            raise
        except StoreError:
            # Asked beyond its end, services answer with an error of their own kind each.
            if (start == 0 and stop is None) or start < self.size_bytes(key):
                raise
            return b""

    def stream(self, key: str, start: int, stop: int) -> Generator[bytes, None, None]:
        """Yield bytes `start:stop` as they come, clipped to the object's size. Cost: one request, mostly.

        Where the connection is cut the rest is asked for, as often as more comes.
        """
        chunk_bytes = min(CHUNK_BYTES, max(_LEAST_CHUNK_BYTES, (stop - start) // 32))

        def attempt() -> tuple[Iterator[bytes], bytes | None]:
            # No range where none is needed: servers and caches between answer that best.
            options: Any = {} if start == 0 else {"options": {"range": (start, stop)}}
            chunks = iter(obstore.get(self._store, key, **options).stream(chunk_bytes))
            return chunks, next(chunks, None)

        while start < stop:
            try:
                chunks, chunk = self._call(f"get {key}", attempt)
            except StoreError:
                if start == 0 or start < self.size_bytes(key):
                    raise
                return  # asked beyond its end, see `get`
            while chunk is not None and start < stop:
                yield chunk[: stop - start]
                start += len(chunk)
                try:
                    chunk = next(chunks, None)
                except FROM_OBSTORE:
                    break  # what does not pass is met again by the next attempt
            else:
                return

    def size_bytes(self, key: str) -> int:
        """Return the object's size."""
        return self._call(f"get {key}", lambda: int(obstore.head(self._store, key)["size"]))

    def has(self, key: str) -> bool:
        """Tell whether there is such an object."""
        try:
            self.size_bytes(key)
        except ObjectNotFoundError:
            return False
        return True

    def mark(self, key: str) -> str | None:
        """Return the mark that the object was put with; None if it has none, or there is no object."""
        try:
            found = self._call(
                f"get {key}",
                lambda: obstore.get(self._store, key, options={"head": True}).attributes,
            )
        except ObjectNotFoundError:
            return None
        return next((str(value) for name, value in found.items() if name.lower() == MARK), None)

    def list(self, parent: str | None) -> list[ObjectInfo]:
        """Return every object below a directory, in no order."""
        return self._call(
            f"list {'' if parent is None else parent!r}",
            lambda: [
                ObjectInfo(meta["path"], meta["size"])
                for batch in obstore.list(self._store, prefix=parent)
                for meta in batch
            ],
        )

    def put_if(self, key: str, content: Buffer, mode: Any, mark: str) -> dict[str, str]:
        """Put an object in one request under a condition; raises obstore's own errors, tries once.

        Returns the condition under which the object is still this one; empty if the service tells none.
        """
        attributes = {MARK: mark} if self._takes_marks else None
        try:
            return _condition(
                obstore.put(self._store, key, content, mode=mode, attributes=attributes)
            )
        except (NotImplementedError, NotSupportedError):
            if not self._takes_marks:
                raise
            self._takes_marks = False
            return self.put_if(key, content, mode, mark)

    def copy_if_free(self, source: str, key: str) -> None:
        """Let the service copy an object to a free key; raises obstore's own errors, tries once."""
        obstore.copy(self._store, source, key, overwrite=False)

    def write(self, key: str, content: Buffer) -> None:
        """Put an object whatever is there."""
        self._call(
            f"put {key}", lambda: obstore.put(self._store, key, content, use_multipart=False)
        )

    def copy(self, source: str, key: str) -> None:
        """Let the service copy an object whatever is there."""
        self._call(f"put {key}", lambda: obstore.copy(self._store, source, key))

    def put_pieces(self, key: str, chunks: Iterable[Buffer], *, streams: int, doing: str) -> None:
        """Put an object in pieces, `streams` of them at once; each is tried again by obstore itself.

        Memory: `streams` pieces and a few chunks of the caller.
        """

        def put(owned: Iterator[bytes]) -> None:
            with failing(doing):
                obstore.put(
                    self._store, key, owned, chunk_size=PIECE_BYTES, max_concurrency=streams
                )

        pumped(chunks, put)

    def remove(self, key: str) -> None:
        """Remove an object; harmless if there is none."""
        try:
            self._call(f"delete {key}", lambda: obstore.delete(self._store, key))
        except ObjectNotFoundError:
            return

    def conditionally(self, doing: str, attempt: Callable[[], T]) -> T:
        """Call what uses `put_if` or `copy_if_free` until it succeeds or the deadline is here."""
        return self._call(doing, attempt)

    def _call(self, doing: str, attempt: Callable[[], T]) -> T:
        with failing(doing):
            return self._patience.call(attempt, is_passing)


def _condition(meta: Any) -> dict[str, str]:
    """Return what tells one content of an object from another, as far as the service says it."""
    return {name: meta[name] for name in ("e_tag", "version") if meta[name] is not None}


@contextmanager
def failing(doing: str) -> Iterator[None]:
    """Turn obstore's errors into the store's."""
    try:
        yield
    except FROM_OBSTORE as error:
        has_secrets = without_secrets(str(error)) != str(error)
        raise mapped(doing, error) from (None if has_secrets else error)
