"""Where versions lie: objects by key, create-only, with compare-and-swap on one small object.

A store never changes an object that is there, except through compare-and-swap, and never shows a part
of one. `open_store` chooses the kind by path or URL.
"""

from __future__ import annotations

from os import PathLike, fspath
from urllib.parse import unquote

import obstore.exceptions
import obstore.store

from syncline.abc import Store
from syncline.errors import ConfigError
from syncline.stores.filesystem import FilesystemStore
from syncline.stores.memory import MemoryStore
from syncline.stores.object_store import ObjectStore

__all__ = ["FilesystemStore", "MemoryStore", "ObjectStore", "open_store"]


def open_store(where: str | PathLike[str]) -> Store:
    """Return the store at a path or URL; nothing is read or written yet.

    Args:
        where: a path or `file://` URL; `memory://` for a new store in this process; or any URL that
            obstore knows: `s3://bucket/prefix`, `gs://...`, `az://...`. Credentials come from the
            environment, as for the services' own tools.

    Raises:
        ConfigError: the URL is of no kind that is known.

    Example:
        >>> open_store("memory://").list()
        []
    """
    text = fspath(where)
    scheme, separator, rest = text.partition("://")
    if not separator:
        return FilesystemStore(text)
    if scheme == "file":
        return FilesystemStore(_local_path(text, rest))
    if scheme == "memory":
        return MemoryStore()
    try:
        return ObjectStore(obstore.store.from_url(text))
    except (obstore.exceptions.BaseError, ValueError) as error:
        # The URL may hold a password, so only its scheme is shown.
        raise ConfigError(
            f"a store at {scheme}://... cannot be opened: expected a path, memory://, or a URL of a "
            "kind that obstore knows, such as s3://bucket/prefix"
        ) from error


def _local_path(url: str, rest: str) -> str:
    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not slash:
        raise ConfigError(f"{url}: expected an absolute local path, as in file:///shared/run")
    return unquote(slash + path)
