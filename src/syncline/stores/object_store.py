"""A store in anything that obstore opens: S3, Google Cloud Storage, Azure, or its memory store.

Objects that fit in one request are put with the condition that the key is free. Larger ones go up in
pieces under a hidden key and are then copied by the service, on the same condition, so that no more than a
few pieces are in memory. Compare-and-swap is a put on condition of the entity tag that was read.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotSupportedError, PreconditionError

from syncline.abc import Buffer, Store
from syncline.errors import (
    ObjectExistsError,
    ObjectNotFoundError,
    StoreError,
    TransportError,
    TransportUnavailableError,
    VersionConflictError,
)
from syncline.stores import keys
from syncline.stores.incoming import Incoming
from syncline.types import ObjectInfo

_HIDDEN = ".syncline-"


class ObjectStore(Store):
    """A store in an object store; keys are below the prefix that the obstore store was made with.

    Args:
        store: made by `obstore.store.from_url` or one of its classes; it must support conditional puts
            (S3, GCS, Azure and memory do).
        one_request_bytes: the largest object that is put in one request, from memory. Above it the
            service must support copying to a free key; on S3 that is the configuration
            `copy_if_not_exists="multipart"`.

    Raises, besides what `Store` says:
        TransportUnavailableError: the service lacks a conditional operation; nothing was changed.

    A writer that is killed during a large put may leave pieces and a hidden `.syncline-*` object behind,
    which no reader sees; a lifecycle rule of the bucket is the place to expire both.
    """

    def __init__(self, store: Any, *, one_request_bytes: int = 32 << 20) -> None:
        self._store = store
        self._one_request_bytes = one_request_bytes

    def put(self, key: str, chunks: Iterable[Buffer]) -> None:
        """Create the object; see `Store.put`."""
        keys.split(key)
        source = iter(chunks)
        first: list[Buffer] = []
        first_bytes = 0
        for chunk in source:
            first.append(bytes(chunk))
            first_bytes += memoryview(chunk).nbytes
            if first_bytes > self._one_request_bytes:
                self._put_in_pieces(key, itertools.chain(first, source))
                return
        with self._failing(f"put {key}"):
            obstore.put(self._store, key, b"".join(first), mode="create")

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes `start:stop` of the object; see `Store.get`."""
        keys.split(key)
        with self._failing(f"get {key}"):
            if start == 0 and stop is None:
                return bytes(obstore.get(self._store, key).bytes())
            size_bytes = obstore.head(self._store, key)["size"]
            end = size_bytes if stop is None else min(stop, size_bytes)
            if start >= end:
                return b""
            return bytes(obstore.get_range(self._store, key, start=start, end=end))

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """Return the objects whose key begins with `prefix`; see `Store.list`."""
        keys.check_prefix(prefix)
        parent = prefix.rpartition("/")[0]
        with self._failing(f"list {prefix!r}"):
            found = [
                ObjectInfo(meta["path"], meta["size"])
                for batch in obstore.list(self._store, prefix=parent or None)
                for meta in batch
            ]
        return sorted(
            (info for info in found if info.key.startswith(prefix) and not _is_hidden(info.key)),
            key=lambda info: info.key,
        )

    def compare_and_swap(self, key: str, expected: bytes | None, new: bytes) -> None:
        """Replace the content `expected` by `new`; see `Store.compare_and_swap`.

        A swap whose answer was lost on the way may raise although it happened: read again.
        """
        keys.split(key)
        try:
            with self._failing(f"swap {key}"):
                mode: Any = "create" if expected is None else self._condition(key, expected)
                obstore.put(self._store, key, new, mode=mode)
        except (ObjectExistsError, ObjectNotFoundError) as error:
            raise _moved_on(f"swap {key}") from error

    def delete(self, key: str) -> None:
        """Remove the object; see `Store.delete`."""
        keys.split(key)
        self._remove(key)

    def _condition(self, key: str, expected: bytes) -> Any:
        found = obstore.get(self._store, key)
        if bytes(found.bytes()) != expected:
            raise _moved_on(f"swap {key}")
        tag, version = found.meta["e_tag"], found.meta["version"]
        condition = {"e_tag": tag, "version": version}
        if tag is None and version is None:
            raise TransportUnavailableError(
                f"swap {key}: this service tells no entity tag, so a swap cannot be made safe; "
                "use one that does (S3, GCS, Azure)"
            )
        return {name: value for name, value in condition.items() if value is not None}

    def _put_in_pieces(self, key: str, chunks: Iterable[Buffer]) -> None:
        *parents, _ = keys.split(key)
        hidden = "/".join([*parents, f"{_HIDDEN}{secrets.token_hex(8)}"])
        incoming = Incoming(chunks)
        try:
            with self._failing(f"put {key}", incoming):
                # Pieces are uploaded while the next are asked for, so each must own its bytes.
                obstore.put(self._store, hidden, (bytes(chunk) for chunk in incoming))
                obstore.copy(self._store, hidden, key, overwrite=False)
        finally:
            with suppress(StoreError):  # hidden, so harmless; the error before it is what matters
                self._remove(hidden)

    def _remove(self, key: str) -> None:
        with suppress(ObjectNotFoundError), self._failing(f"delete {key}"):
            obstore.delete(self._store, key)

    @contextmanager
    def _failing(self, doing: str, incoming: Incoming | None = None) -> Iterator[None]:
        """Turn obstore's errors into the store's; the caller's own pass."""
        try:
            yield
        except (BaseError, FileNotFoundError, NotImplementedError) as error:
            if incoming is not None and error is incoming.error:
                raise
            raise _mapped(doing, error) from error


def _mapped(doing: str, error: Exception) -> TransportError | VersionConflictError:
    # obstore adds many lines for its own developers; the first one is the message.
    reason = str(error).partition("\n")[0]
    if isinstance(error, FileNotFoundError):
        return ObjectNotFoundError(f"{doing}: nothing was found there: {reason}")
    if isinstance(error, AlreadyExistsError):
        return ObjectExistsError(f"{doing}: the key is taken; nothing was changed")
    if isinstance(error, PreconditionError):
        return _moved_on(doing)
    if isinstance(error, NotImplementedError | NotSupportedError):
        return TransportUnavailableError(
            f"{doing}: this object store lacks a conditional operation that Syncline needs; "
            f"configure it, or use another store: {reason}"
        )
    return StoreError(f"{doing}: {reason}")


def _moved_on(doing: str) -> VersionConflictError:
    return VersionConflictError(
        f"{doing}: the object is not what it was when it was read; another writer got there first; "
        "read it again"
    )


def _is_hidden(key: str) -> bool:
    return any(segment.startswith(".") for segment in key.split("/"))
