"""What a web server shows, to be read: a run that was mirrored to one, or a bucket that is public."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from syncline.abc import Buffer, Store
from syncline.errors import StoreError, TransportUnavailableError
from syncline.stores.object_store import DEADLINE_S, ObjectStore
from syncline.types import ObjectInfo


class HttpStore(Store):
    """A store behind plain HTTP, without listing and without writing.

    The server must answer ranges (RFC 9110, section 14). A receiver needs no listing: it asks for each object that a
    manifest names. What looks for objects by itself (`fsck`, foreign layouts) is refused.

    Args:
        store: an `obstore.store.HTTPStore`.
        name: what messages call it; no secret may be in it.
        deadline_s: as for `ObjectStore`.

    Raises, besides what `Store` says:
        StoreError: anything that writes.
        TransportUnavailableError: anything that lists.
    """

    is_remote = True

    def __init__(self, store: Any, *, name: str, deadline_s: float = DEADLINE_S) -> None:
        self._name = name
        self._objects = ObjectStore(store, name=name, deadline_s=deadline_s)

    def __str__(self) -> str:
        return self._name

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes `start:stop` of the object; see `Store.get`."""
        return self._objects.get(key, start, stop)

    def pieces(self, key: str, size_bytes: int) -> Iterator[bytes]:
        """Yield the object in order, several ranges at once; see `Store.pieces`."""
        return self._objects.pieces(key, size_bytes)

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """Raise: plain HTTP has no listing."""
        raise TransportUnavailableError(
            f"list {prefix!r}: {self._name} is a plain web server, which lists nothing; expected a store that "
            "can list, such as s3://bucket/prefix"
        )

    def put(self, key: str, chunks: Iterable[Buffer]) -> None:
        """Raise: it is read only."""
        self._refuse(f"put {key}")

    def compare_and_swap(self, key: str, expected: bytes | None, new: bytes) -> None:
        """Raise: it is read only."""
        self._refuse(f"swap {key}")

    def delete(self, key: str) -> None:
        """Raise: it is read only."""
        self._refuse(f"delete {key}")

    def _refuse(self, doing: str) -> NoReturn:
        raise StoreError(
            f"{doing}: {self._name} is a plain web server, which is read only; publish into the store behind it"
        )
