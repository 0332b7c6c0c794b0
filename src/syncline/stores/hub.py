"""A bucket of the Hugging Face Hub, through huggingface_hub.

The Hub has no conditional writes, so writers take turns by a lease (`syncline.stores.lease` says what that
guarantees). This code has met only a local stand-in of the calls that it makes, never the Hub itself.
"""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from syncline.abc import Buffer
from syncline.errors import (
    ConfigError,
    ObjectNotFoundError,
    StoreError,
    SynclineError,
    TransportUnavailableError,
)
from syncline.format.part import temporary_file
from syncline.stores.incoming import Incoming
from syncline.stores.obstore_errors import without_secrets
from syncline.stores.remote import RemoteStore
from syncline.stores.streams import PIECE_BYTES
from syncline.stores.writes import Leased, lease_on
from syncline.types import ObjectInfo

_SCHEME = "hf://buckets/"
_ONE_REQUEST_BYTES = 8 << 20


class HubStore(RemoteStore):
    """A store in a bucket of the Hub, below a prefix.

    Args:
        bucket: `owner/name`.
        prefix: directory in the bucket; empty for all of it.
        api: what makes the calls: a `huggingface_hub.HfApi`, by default one with the token that
            `hf auth login` or `HF_TOKEN` gave.
        lasts_s, settle_s: of the lease, see `syncline.stores.lease.Lease`.

    Raises, besides what `Store` says:
        TransportUnavailableError: huggingface_hub is not installed, or too old to know buckets.

    An object is downloaded whole to a temporary file when a part of it is first asked for, and kept, without
    a name, until another one is. Memory: a few MiB. Disk: one object.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        api: Any = None,
        lasts_s: float = 60.0,
        settle_s: float = 2.0,
    ) -> None:
        service = _Bucket(_api() if api is None else api, bucket, prefix)
        name = f"{_SCHEME}{bucket}/{prefix}".rstrip("/")
        lease = lease_on(service, lasts_s=lasts_s, settle_s=settle_s)
        super().__init__(
            service,
            name=name,
            one_request_bytes=_ONE_REQUEST_BYTES,
            decide=lambda: Leased(service, lease),
        )

    @classmethod
    def from_url(cls, url: str) -> HubStore:
        """Return the store at `hf://buckets/owner/name/prefix`.

        Raises:
            ConfigError: it is no such URL.
        """
        parts = url.removeprefix(_SCHEME).strip("/").split("/")
        if not url.startswith(_SCHEME) or len(parts) < 2 or not all(parts):
            raise ConfigError(
                "an hf:// store: expected hf://buckets/owner/name or hf://buckets/owner/name/prefix, found "
                f"{without_secrets(url)!r:.200}; model and data set repositories are no stores"
            )
        return cls("/".join(parts[:2]), "/".join(parts[2:]))


class _Bucket:
    """The calls that a store makes of huggingface_hub."""

    def __init__(self, api: Any, bucket: str, prefix: str) -> None:
        self._api = api
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._kept: tuple[str, int] | None = None
        self._let_go: Callable[[], object] = _nothing
        self._one_at_a_time = threading.Lock()

    def read(self, key: str) -> tuple[bytes, dict[str, str]] | None:
        try:
            found = self._info(key)
        except ObjectNotFoundError:
            return None
        return self._part(key, found, 0, found.size), {"e_tag": found.xet_hash}

    def get(self, key: str, start: int, stop: int | None) -> bytes:
        found = self._info(key)
        end = found.size if stop is None else min(stop, found.size)
        return b"" if start >= end else self._part(key, found, start, end)

    def stream(self, key: str, start: int, stop: int) -> Iterator[bytes]:
        for at in range(start, stop, PIECE_BYTES):
            yield self.get(key, at, min(at + PIECE_BYTES, stop))

    def size_bytes(self, key: str) -> int:
        return int(self._info(key).size)

    def has(self, key: str) -> bool:
        try:
            self._info(key)
        except ObjectNotFoundError:
            return False
        return True

    def list(self, parent: str | None) -> list[ObjectInfo]:
        directory = f"{self._prefix}{'' if parent is None else parent}".rstrip("/")
        with _failing(f"list {parent!r}"):
            try:
                items = list(
                    self._api.list_bucket_tree(
                        self._bucket, prefix=directory or None, recursive=True
                    )
                )
            except _not_found():
                return []
        return [
            ObjectInfo(item.path[len(self._prefix) :], item.size)
            for item in items
            if item.type == "file" and item.path.startswith(self._prefix)
        ]

    def write(self, key: str, content: Buffer) -> None:
        self._batch(f"put {key}", add=[(bytes(content), self._prefix + key)])

    def put_pieces(self, key: str, chunks: Iterable[Buffer], *, streams: int, doing: str) -> None:
        incoming = Incoming(chunks)
        with tempfile.NamedTemporaryFile(prefix="syncline-hub-") as file:
            for chunk in incoming:
                with temporary_file():
                    file.write(chunk)
            with temporary_file():
                file.flush()
            self._batch(doing, add=[(Path(file.name), self._prefix + key)])

    def copy(self, source: str, key: str) -> None:
        found = self._info(source)
        self._batch(
            f"put {key}", copy=[("bucket", self._bucket, found.xet_hash, self._prefix + key)]
        )

    def remove(self, key: str) -> None:
        if self.has(key):
            self._batch(f"delete {key}", delete=[self._prefix + key])

    def _batch(self, doing: str, **operations: Any) -> None:
        with _failing(doing):
            self._api.batch_bucket_files(self._bucket, **operations)

    def _info(self, key: str) -> Any:
        with _failing(f"get {key}"):
            found = list(self._api.get_bucket_paths_info(self._bucket, [self._prefix + key]))
        if not found:
            raise ObjectNotFoundError(
                f"get {key}: there is no such object in {_SCHEME}{self._bucket}/{self._prefix}"
            )
        return found[0]

    def _part(self, key: str, found: Any, start: int, end: int) -> bytes:
        if found.size == 0:
            return b""
        with self._one_at_a_time:
            if self._kept is None or self._kept[0] != found.xet_hash:
                self._kept = None
                self._let_go()
                descriptor = self._downloaded(key, found)
                self._let_go = weakref.finalize(self, os.close, descriptor)
                self._kept = found.xet_hash, descriptor
            return os.pread(self._kept[1], end - start, start)

    def _downloaded(self, key: str, found: Any) -> int:
        """Return an object as an open file without a name, which goes with this process."""
        with (
            _failing(f"get {key}"),
            tempfile.TemporaryDirectory(prefix="syncline-hub-") as folder,
        ):
            path = Path(folder) / "object"
            self._api.download_bucket_files(self._bucket, [(found, path)])
            if path.stat().st_size != found.size:
                raise StoreError(
                    f"get {key}: expected {found.size} bytes, the Hub gave {path.stat().st_size}; try again"
                )
            return os.open(path, os.O_RDONLY)


def _nothing() -> None:
    """Let nothing go: no object was downloaded yet."""


def _api() -> Any:
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise TransportUnavailableError(
            "an hf:// store needs huggingface_hub: pip install 'syncline[hub]'"
        ) from error
    if not hasattr(HfApi, "batch_bucket_files"):
        raise TransportUnavailableError(
            "an hf:// store needs a huggingface_hub that knows buckets: pip install 'syncline[hub]'"
        )
    return HfApi(library_name="syncline")


def _not_found() -> type[Exception]:
    from huggingface_hub.errors import EntryNotFoundError

    return EntryNotFoundError


@contextmanager
def _failing(doing: str) -> Iterator[None]:
    """Turn what huggingface_hub, its HTTP client and its uploader raise into the store's errors."""
    try:
        yield
    except SynclineError:
        raise
    except Exception as error:  # noqa: BLE001 - three packages raise here, each its own kinds
        reason = without_secrets(str(error).strip().partition("\n")[0])
        raise StoreError(f"{doing}: the Hub failed: {reason}") from None
