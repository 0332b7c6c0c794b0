"""Tell deployments of a new version; whether they listen never decides over the publish."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from syncline.errors import ConfigError
from syncline.format import names
from syncline.format.rules import INTERCHANGE_ENCODINGS
from syncline.hotload import HotLoadClient
from syncline.sync.reports import Notice
from syncline.version import Manifest

Deployments = str | HotLoadClient | Sequence[str | HotLoadClient]


def clients(deployments: Deployments, token_env: str | None) -> tuple[HotLoadClient, ...]:
    """Return a client for each deployment: URLs, alone or with commas between them, or clients.

    Raises:
        ConfigError: a URL, or the token that the environment variable holds, cannot be used.
    """
    listed = [deployments] if isinstance(deployments, str | HotLoadClient) else list(deployments)
    found: list[HotLoadClient] = []
    for deployment in listed:
        if isinstance(deployment, HotLoadClient):
            found.append(deployment)
            continue
        urls = [url.strip() for url in deployment.split(",")]
        found += [HotLoadClient(url, token_env=token_env) for url in urls]
    if len({client.url for client in found}) < len(found):
        raise ConfigError(f"notify: {[client.url for client in found]} names one deployment twice")
    return tuple(found)


def notify(
    told: Sequence[HotLoadClient],
    manifest: Manifest,
    timeout_s: float,
    *,
    checksum: str,
) -> tuple[Notice, ...]:
    """Tell every deployment of a committed version, all at once; return what became of it.

    Args:
        told: at least one.
        checksum: what an `xor` or `overwrite` delta carries for each tensor.

    Cost: at most about `timeout_s`, however many do not answer.
    """
    with ThreadPoolExecutor(max_workers=len(told), thread_name_prefix="syncline-notify") as pool:
        return tuple(pool.map(lambda client: _tell(client, manifest, timeout_s, checksum), told))


def _tell(client: HotLoadClient, manifest: Manifest, timeout_s: float, checksum: str) -> Notice:
    identity = names.version_dir(manifest.version)
    base = manifest.base_version if manifest.kind == "delta" else None
    is_interchange = manifest.encoding in INTERCHANGE_ENCODINGS
    try:
        client.tell(
            identity,
            previous=None if base is None else names.version_dir(base),
            checksum_format=checksum if is_interchange else "none",
            timeout_s=timeout_s,
        )
    except Exception as error:  # noqa: BLE001 - the version is committed, whatever it is
        return Notice(client.url, identity, f"{type(error).__name__}: {error}")
    return Notice(client.url, identity)
