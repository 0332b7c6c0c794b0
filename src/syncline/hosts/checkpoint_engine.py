"""Hands a version over to checkpoint-engine servers, for engines that keep those for the last hop.

Talks to the HTTP routes of `python -m checkpoint_engine --uds PATH`, release 0.4.2. What is proved here ends
where theirs begins: from there on an update is theirs, and not all or nothing.
"""

from __future__ import annotations

import http.client
import json
import socket
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
    PeerLostError,
    TransportError,
    TransportTimeoutError,
)
from syncline.hosts.host import require_held
from syncline.peers.streams import Deadline

_SHOWN = 300
_TAKE_BACK_S = 10.0
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
            timeout_s: everything included.
            update_url: where each server asks for its engines to take part (vLLM's `/collective_rpc`), and
                `engine_uds`: the Unix socket that it asks through.
            ranks: empty: broadcast to all; else the ranks that read peer-to-peer.

        Raises:
            ConfigError: files under /dev/shm: checkpoint-engine deletes those that it pins.
            EndpointError: a server answered with an error; names the server. What was registered is taken back.
            TransportTimeoutError: a server did not answer, as when an engine died: restart it. PeerLostError:
                it is not there.
        """
        deadline = Deadline(timeout_s)
        held = require_held(CheckpointDir(directory))
        files = sorted(Path(directory).resolve().glob("*.safetensors"))
        if not files or any(path.is_relative_to(_IN_PLACE) for path in files):
            raise ConfigError(
                f"{directory}: expected safetensors files outside of {_IN_PLACE}, where checkpoint-engine deletes "
                "what it pins"
            )
        name = f"syncline-{held.sha256[:32]}"
        shares = _dealt(files, self._sockets)
        self._all("GET", lambda _: "/v1/healthz", None, deadline)
        if name not in self._registered:
            self._register(name, shares, deadline)
        route = f"/v1/checkpoints/{name}"
        self._all("POST", lambda _: f"{route}/gather-metas", None, deadline)

        def body(_: str) -> Mapping[str, Any]:
            return {
                "ranks": list(ranks),
                "update_url": update_url,
                "timeout": deadline.left_s(),
                "uds": engine_uds,
            }

        self._all("POST", lambda _: f"{route}/update", body, deadline)
        return HandOver(name, held.version, shares)

    def forget(self, name: str, *, timeout_s: float) -> None:
        """Let all servers free a version; raises as `hand_over`."""
        self._all("DELETE", lambda _: f"/v1/checkpoints/{name}", None, Deadline(timeout_s))
        self._registered.discard(name)

    def _register(self, name: str, shares: Mapping[str, Sequence[str]], deadline: Deadline) -> None:
        route = f"/v1/checkpoints/{name}"
        done: list[str] = []
        try:
            self._all(
                "POST",
                lambda _: f"{route}/files",
                lambda path: {"files": list(shares[path])},
                deadline,
                done,
            )
        except TransportError:
            for path in done:
                with suppress(TransportError):  # why it was not registered is what is to be said
                    _ask(path, "DELETE", route, None, Deadline(_TAKE_BACK_S))
            raise
        self._registered.add(name)

    def _all(
        self,
        method: str,
        route: Callable[[str], str],
        body: Callable[[str], Mapping[str, Any]] | None,
        deadline: Deadline,
        done: list[str] | None = None,
    ) -> None:
        """Ask all servers at the same time, as what they do together needs; raise the first error.

        Args:
            done: takes the servers that answered well.
        """
        pool = ThreadPoolExecutor(len(self._sockets), thread_name_prefix="syncline-ce")
        try:
            asked: dict[Future[None], str] = {
                pool.submit(_ask, path, method, route(path), body, deadline): path
                for path in self._sockets
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


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _ask(
    path: str,
    method: str,
    route: str,
    body: Callable[[str], Mapping[str, Any]] | None,
    deadline: Deadline,
) -> None:
    where = f"checkpoint-engine at {path}: {method} {route}"
    try:
        connection = _UnixConnection(path, deadline.left_s())
        try:
            headers = {"Content-Type": "application/json"}
            raw = None if body is None else json.dumps(body(path))
            connection.request(method, route, raw, headers)
            answer = connection.getresponse()
            said = answer.read(_SHOWN).decode(errors="replace")
        finally:
            connection.close()
    except TimeoutError as error:
        raise TransportTimeoutError(
            f"{where}: no answer in {deadline.timeout_s} s; release 0.4.2 waits for ever where an engine died "
            "or refused: restart it and its engines"
        ) from error
    except (OSError, http.client.HTTPException) as error:
        raise PeerLostError(f"{where}: {error!r}") from error
    if answer.status != http.HTTPStatus.OK:
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
