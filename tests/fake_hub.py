"""A stand-in for the bucket calls of `huggingface_hub.HfApi`, with their signatures, in memory.

Made after the source of huggingface_hub 2.4: a batch is not atomic, a folder is listed as an item of its own, and
paths that do not exist are left out of `get_bucket_paths_info`. `test_hub_store.py` holds the
signatures against the installed package.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Item:
    """A file or a folder, as the Hub lists it."""

    type: str
    path: str
    size: int = 0
    xet_hash: str = ""


class FakeHub:
    """One bucket; counts its calls."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.calls: list[str] = []
        self.error: Exception | None = None
        self._lock = threading.Lock()

    def list_bucket_tree(
        self,
        bucket_id: str,
        prefix: str | None = None,
        *,
        recursive: bool | None = None,
        token: str | bool | None = None,
    ) -> Iterator[Item]:
        found = self._called("list", bucket_id)
        start = "" if prefix is None else f"{prefix}/"
        folders = set()
        for path, content in sorted(found.items()):
            if path.startswith(start):
                parent = path.rpartition("/")[0]
                if parent and parent not in folders:
                    folders.add(parent)
                    yield Item("directory", parent)
                yield _file(path, content)

    def get_bucket_paths_info(
        self, bucket_id: str, paths: Iterable[str], *, token: str | bool | None = None
    ) -> Iterator[Item]:
        found = self._called("info", bucket_id)
        for path in paths:
            if path in found:
                yield _file(path, found[path])

    def batch_bucket_files(
        self,
        bucket_id: str,
        *,
        add: list[tuple[str | Path | bytes, str]] | None = None,
        copy: list[tuple[str, str, str, str]] | None = None,
        delete: list[str] | None = None,
        token: str | bool | None = None,
    ) -> None:
        self._called("batch", bucket_id)
        for source, path in add or []:
            content = source if isinstance(source, bytes) else Path(source).read_bytes()
            with self._lock:
                self.files[path] = content
        for _, _, xet_hash, path in copy or []:
            with self._lock:
                same = (old for old in self.files.values() if _hash(old) == xet_hash)
                self.files[path] = next(same)
        for path in delete or []:
            with self._lock:
                del self.files[path]

    def download_bucket_files(
        self,
        bucket_id: str,
        files: list[tuple[str | Item, str | Path]],
        *,
        raise_on_missing_files: bool = False,
        token: str | bool | None = None,
    ) -> None:
        found = self._called("download", bucket_id)
        for item, path in files:
            same = (old for old in found.values() if _hash(old) == item.xet_hash)
            Path(path).write_bytes(next(same))

    def _called(self, name: str, bucket_id: str) -> dict[str, bytes]:
        with self._lock:
            self.calls.append(name)
            if self.error is not None:
                raise self.error
            if bucket_id != "me/bucket":
                raise KeyError(bucket_id)
            return dict(self.files)


def _file(path: str, content: bytes) -> Item:
    return Item("file", path, len(content), _hash(content))


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
