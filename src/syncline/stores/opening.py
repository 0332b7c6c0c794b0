"""From a path or URL to the store that lies there."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from os import PathLike, fspath
from typing import Any
from urllib.parse import unquote, urlsplit

import obstore.exceptions
import obstore.store

from syncline import config
from syncline.abc import Store
from syncline.errors import ConfigError
from syncline.stores.filesystem import FilesystemStore
from syncline.stores.http import HttpStore
from syncline.stores.hub import HubStore
from syncline.stores.lagging import LaggingStore
from syncline.stores.memory import MemoryStore
from syncline.stores.object_store import ObjectStore
from syncline.stores.obstore_errors import without_secrets

_R2 = "r2.cloudflarestorage.com"
_CLOUDS = (_R2, ".amazonaws.com", ".blob.core.windows.net", ".dfs.core.windows.net")
_S3_COPY = {"copy_if_not_exists": "multipart"}
_R2_COPY = {"copy_if_not_exists": "header:cf-copy-destination-if-none-match:*"}
_STALLED_S = 30
_ONE_SLASH = re.compile(r"[a-z][a-z0-9]+:/(?!/)", re.IGNORECASE)
_BACK_OFF = {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=5)}


def open_store(where: str | PathLike[str]) -> Store:
    """Return the store at a path or URL; nothing is read or written yet.

    Args:
        where: a path or `file://` URL; `memory://` for a new store in this process; `s3://bucket/prefix`,
            `gs://bucket/prefix`, `az://container/prefix` (its account comes from the environment);
            `https://host/path` to read what a plain web server shows; `hf://buckets/owner/name/prefix`.
            Credentials come from the environment, as for the services' own tools, never from here.

    The environment also says how long requests are tried again and how long writes may take to be seen; see
    `docs/reference/settings.md`.

    Raises:
        ConfigError: it is no path and no URL of a kind that is known.
        TransportUnavailableError: the kind needs a package that is not installed.

    Example:
        >>> open_store("memory://").list()
        []
    """
    if not isinstance(where, str | PathLike) or not fspath(where):
        raise ConfigError(f"a store: expected a path or URL, found {where!r}")
    store = _opened(fspath(where))
    within_s = config.store_visible_within_s()
    return LaggingStore(store, within_s) if within_s > 0 else store


def _opened(text: str) -> Store:
    scheme, separator, rest = text.partition("://")
    if not separator:
        if _ONE_SLASH.match(text):
            raise ConfigError(
                f"{text}: expected a path, or a URL with two slashes, {text.replace(':/', '://', 1)}; a "
                f"directory of such a name is ./{text}"
            )
        return FilesystemStore(text)
    if scheme == "file":
        return FilesystemStore(_local_path(text, rest))
    if scheme == "memory":
        return MemoryStore()
    if scheme == "hf":
        return HubStore.from_url(text)
    name = without_secrets(text).rstrip("/")
    deadline_s = config.store_deadline_s()
    host = urlsplit(text).hostname or ""
    if scheme in ("http", "https") and not host.endswith(_CLOUDS):
        service = _made(obstore.store.HTTPStore, text, deadline_s, allow_http=scheme == "http")
        return HttpStore(service, name=name, deadline_s=deadline_s)
    options: dict[str, Any] = {}
    if scheme in ("s3", "s3a") or host.endswith(_CLOUDS[:2]):
        options["config"] = _R2_COPY if host.endswith(_R2) else _S3_COPY
    service = _made(obstore.store.from_url, text, deadline_s, **options)
    return ObjectStore(service, name=name, deadline_s=deadline_s)


def _made(
    make: Callable[..., Any],
    url: str,
    deadline_s: float,
    *,
    allow_http: bool = False,
    **options: Any,
) -> Any:
    client: dict[str, Any] = {
        "timeout": timedelta(seconds=max(deadline_s, _STALLED_S)),
        "read_timeout": timedelta(seconds=_STALLED_S),
    }
    if allow_http or config.is_plain_http_allowed():
        client["allow_http"] = True
    retry = {
        "retry_timeout": timedelta(seconds=deadline_s),
        "backoff": _BACK_OFF,
        "max_retries": 10,
    }
    try:
        return make(url, client_options=client, retry_config=retry, **options)
    except (obstore.exceptions.BaseError, ValueError):
        # The URL may hold a password, and so may obstore's error: only the scheme is shown.
        raise ConfigError(
            f"a store at {url.partition('://')[0]}://... cannot be opened: expected a path, memory://, or a URL "
            "such as s3://bucket/prefix, gs://bucket/prefix, az://container/prefix (with "
            "AZURE_STORAGE_ACCOUNT_NAME set), https://host/path or hf://buckets/owner/name"
        ) from None


def _local_path(url: str, rest: str) -> str:
    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not slash:
        raise ConfigError(f"{url}: expected an absolute local path, as in file:///shared/run")
    return unquote(slash + path)
