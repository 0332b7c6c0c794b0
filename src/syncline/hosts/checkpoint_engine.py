"""Hands a version over to checkpoint-engine servers, for engines that keep those for the last hop.

Talks to the HTTP routes of `python -m checkpoint_engine --uds PATH`, release 0.4.2. What is proved here ends
where theirs begins: from there on an update is theirs, and not all or nothing.
"""

from __future__ import annotations

import http
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from syncline.engines import CheckpointDir
from syncline.errors import (
    ConfigError,
    EndpointError,
    TransportError,
    TransportTimeoutError,
)
from syncline.hosts.host import require_held
from syncline.hotload.exchange import UnixAddress, exchange
from syncline.types import check_seconds

_SHOWN = 300
_LIMIT_BYTES = 1 << 20
_TAKE_BACK_S = 5.0
_IN_PLACE = Path("/dev/shm")  # noqa: S108 - where checkpoint-engine takes files apart


@dataclass(frozen=True, slots=True)
class HandOver:
    """What was handed over: the name that the servers know the version by, and the files of each."""

    name: str
    version: int
    files: Mapping[str, tuple[str, ...]]


class CheckpointEngine:
    """The servers of one checkpoint-engine job, by the paths of their Unix sockets, in order of rank."""

    def __init__(self, sockets: Sequence[str]) -> None:
        if not sockets or len(set(sockets)) != len(sockets):
            raise ConfigError(
                f"sockets: expected the path of every server, once; found {list(sockets)}"
            )
        self._sockets = tuple(sockets)
        self._registered: set[str] = set()

    def hand_over(
        self,
        directory: str | PathLike[str],
        *,
        timeout_s: float,
        update_url: str | None = None,
        engine_uds: str | None = None,
        ranks: Sequence[int] = (),
    ) -> HandOver:
        """Register the version of a checkpoint directory with all servers and let them update their engines.

        The version is registered once under a name made of its digest, so that no version is ever taken for
        another; earlier ones stay until `forget`. The directory must not change meanwhile.

        Args:
            directory: of a `CheckpointDir` at a version.
            timeout_s: everything included, but for at most 5 s in which what was registered is taken back.
            update_url: where each server asks for its engines to take part (vLLM's `/collective_rpc`), and
                `engine_uds`: the Unix socket that it asks through.
            ranks: empty: broadcast to all; else the ranks that read peer-to-peer.

        Raises:
            ConfigError: files under /dev/shm: checkpoint-engine deletes those that it pins.
            EndpointError: a server answered with an error; names the server. What was registered is taken back.
            TransportTimeoutError: a server did not answer, as when an engine died: restart it. PeerLostError:
                it is not there.
        """
        deadline_s = _deadline(timeout_s)
        held = require_held(CheckpointDir(directory))
        files = sorted(Path(directory).resolve().glob("*.safetensors"))
        if not files or any(path.is_relative_to(_IN_PLACE) for path in files):
            raise ConfigError(
                f"{directory}: expected safetensors files outside of {_IN_PLACE}, where checkpoint-engine deletes "
                "what it pins"
            )
        name = f"syncline-{held.sha256[:32]}"
        shares = _dealt(files, self._sockets)
        self._all("GET", "/v1/healthz", None, deadline_s)
        if name not in self._registered:
            self._register(name, shares, deadline_s)
        route = f"/v1/checkpoints/{name}"
        self._all("POST", f"{route}/gather-metas", None, deadline_s)
        body = {
            "ranks": list(ranks),
            "update_url": update_url,
            "timeout": max(deadline_s - time.monotonic(), 0.0),
            "uds": engine_uds,
        }
        self._all("POST", f"{route}/update", lambda _: body, deadline_s)
        return HandOver(name, held.version, shares)

    def forget(self, name: str, *, timeout_s: float) -> None:
        """Let all servers free a version; raises as `hand_over`."""
        self._all("DELETE", f"/v1/checkpoints/{name}", None, _deadline(timeout_s))
        self._registered.discard(name)

    def _register(self, name: str, shares: Mapping[str, Sequence[str]], deadline_s: float) -> None:
        route = f"/v1/checkpoints/{name}"
        done: list[str] = []
        try:
            self._all(
                "POST",
                f"{route}/files",
                lambda path: {"files": list(shares[path])},
                deadline_s,
                done=done,
            )
        except TransportError:
            # What led here is what is told, and the time for it may be over.
            with suppress(TransportError):
                self._all("DELETE", route, None, time.monotonic() + _TAKE_BACK_S, paths=done)
            raise
        self._registered.add(name)

    def _all(
        self,
        method: str,
        route: str,
        body: Callable[[str], Mapping[str, Any]] | None,
        deadline_s: float,
        *,
        paths: Sequence[str] | None = None,
        done: list[str] | None = None,
    ) -> None:
        """Ask all servers at the same time, as what they do together needs; raise the first error.

        Args:
            paths: which of them; None: all.
            done: takes the servers that answered well.
        """
        pool = ThreadPoolExecutor(len(self._sockets), thread_name_prefix="syncline-ce")
        try:
            asked: dict[Future[None], str] = {
                pool.submit(
                    _ask, path, method, route, None if body is None else body(path), deadline_s
                ): path
                for path in (self._sockets if paths is None else paths)
            }
            wait(asked)
            errors = [(asked[future], future.exception()) for future in asked]
            if done is not None:
                done.extend(path for path, error in errors if error is None)
            for _, error in errors:
                if error is not None:
                    raise error
        finally:
            pool.shutdown(wait=False)


def _deadline(timeout_s: float) -> float:
    return time.monotonic() + check_seconds("timeout_s", timeout_s)


def _ask(
    path: str, method: str, route: str, body: Mapping[str, Any] | None, deadline_s: float
) -> None:
    where = f"checkpoint-engine at {path}: {method} {route}"
    try:
        answer = exchange(
            UnixAddress(path),
            where,
            method,
            route,
            None if body is None else json.dumps(body).encode(),
            {"Host": "localhost", "Content-Type": "application/json"},
            limit_bytes=_LIMIT_BYTES,
            deadline_s=deadline_s,
        )
    except TransportTimeoutError as error:
        raise TransportTimeoutError(
            f"{error}; release 0.4.2 waits for ever where an engine died or refused: restart it and its engines"
        ) from error
    if answer.status != http.HTTPStatus.OK:
        said = answer.body[:_SHOWN].decode(errors="replace")
        raise EndpointError(f"{where}: status {answer.status}: {said}", status=answer.status)


def _dealt(files: Sequence[Path], sockets: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the files of each server: the largest first, each to who has least."""
    shares: dict[str, list[str]] = {path: [] for path in sockets}
    load = dict.fromkeys(sockets, 0)
    for file in sorted(files, key=lambda one: (-one.stat().st_size, one)):
        least = min(sockets, key=lambda path: load[path])
        load[least] += file.stat().st_size
        shares[least].append(str(file))
    return {path: tuple(share) for path, share in shares.items()}
