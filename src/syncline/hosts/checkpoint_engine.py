"""Hands a version over to checkpoint-engine servers, for engines that keep those for the last hop.

Talks to the HTTP routes of `python -m checkpoint_engine --uds PATH`, release 0.4.2. What is proved here ends
where theirs begins: from there on an update is theirs, and not all or nothing. It does not even tell when an
engine fails on the last bucket of an update, which may be its only one.
"""

from __future__ import annotations

import http
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from syncline.engines import CheckpointDir
from syncline.engines.checkpoint_dir import read_state
from syncline.errors import (
    ConfigError,
    EndpointError,
    MovedOnError,
    TransportError,
    TransportTimeoutError,
)
from syncline.hosts.host import require_held
from syncline.hotload.exchange import UnixAddress, exchange
from syncline.types import check_seconds
from syncline.version import HeldVersion

_SHOWN = 300
_LIMIT_BYTES = 1 << 20
_META_BYTES = 1 << 10
_TAKE_BACK_S = 5.0
_UNDER_WAY_S = 2.0
_IN_PLACE = Path("/dev/shm")  # noqa: S108 - where checkpoint-engine takes files apart


@dataclass(frozen=True, slots=True)
class EngineCall:
    """How one engine is asked to take part in an update: once, by the server of its first rank.

    Attributes:
        url: where; vLLM's `http://HOST:PORT/collective_rpc`.
        ranks: the servers beside its workers, in order; empty: all that take part.
        uds: path of the Unix socket that it is asked through; None: TCP.
    """

    url: str
    ranks: tuple[int, ...] = ()
    uds: str | None = None


@dataclass(frozen=True, slots=True)
class HandOver:
    """What was handed over: the name that the servers know the version by, and the files of each."""

    name: str
    version: int
    files: Mapping[str, tuple[str, ...]]


class CheckpointEngine:
    """The servers of one checkpoint-engine job, all of them, by the paths of their Unix sockets in order of rank.

    One hand-over at a time, of whatever object: the servers keep what they gathered last, whoever asked for it.
    """

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
        engines: Sequence[EngineCall] = (),
        ranks: Sequence[int] = (),
    ) -> HandOver:
        """Register the version of a checkpoint directory with all servers and let them update their engines.

        The version is registered once under a name made of its digest, so that no version is ever taken for
        another; earlier ones stay until `forget`. After an error, and after Ctrl-C, nothing of it stays registered
        where a server still answers.

        Args:
            directory: of a `CheckpointDir` at a version.
            timeout_s: everything included, but for at most 5 s in which what was registered is taken back; after
                Ctrl-C up to 2 s before that, in which what is under way may end.
            engines: who the servers ask to take part; together they have every rank that does, each once. Empty:
                something else asks them meanwhile.
            ranks: empty: broadcast to all; else the ranks that read peer-to-peer, which needs Mooncake there.

        Raises:
            ConfigError: files under /dev/shm: checkpoint-engine deletes those that it pins. Ranks or engines that
                its servers would wait for, or update nothing by.
            MovedOnError: the directory changed while it was registered.
            EndpointError: a server answered with an error; names the server.
            TransportTimeoutError: a server did not answer, as when an engine died: restart it. PeerLostError:
                it is not there. TransportError: together they hold other tensors than the version.
        """
        deadline_s = _deadline(timeout_s)
        calls = _calls(engines, ranks, len(self._sockets))
        engine = CheckpointDir(directory)
        held = require_held(engine)
        folder = Path(directory).resolve()
        files = sorted(folder.glob("*.safetensors"))
        if not files or any(path.is_relative_to(_IN_PLACE) for path in files):
            raise ConfigError(
                f"{directory}: expected safetensors files outside of {_IN_PLACE}, where checkpoint-engine deletes "
                "what it pins"
            )
        tensors = sorted(engine.tensors())
        name, shares = f"syncline-{held.sha256[:32]}", _dealt(files, self._sockets)
        self._all("GET", "/v1/healthz", None, deadline_s)
        try:
            if name not in self._registered:
                self._register(name, shares, deadline_s)
                _require_still(folder, held)
            self._all("POST", f"/v1/checkpoints/{name}/gather-metas", None, deadline_s)
            self._require_gathered(tensors, deadline_s)
            self._update(name, calls, ranks, deadline_s)
            self._registered.add(name)
        except BaseException:  # Ctrl-C, too: nobody else knows what to take back
            self._take_back(name)
            raise
        return HandOver(name, held.version, shares)

    def forget(self, name: str, *, timeout_s: float) -> None:
        """Let all servers free a version, if they have it; raises as `hand_over`."""
        self._all("DELETE", f"/v1/checkpoints/{name}", None, _deadline(timeout_s))
        self._registered.discard(name)

    def _register(self, name: str, shares: Mapping[str, Sequence[str]], deadline_s: float) -> None:
        route = f"/v1/checkpoints/{name}"
        # Another object may have registered it, and what is registered twice is gone there.
        self._all("DELETE", route, None, deadline_s)
        self._all(
            "POST",
            f"{route}/files",
            lambda rank: {"files": shares[self._sockets[rank]]},
            deadline_s,
        )

    def _take_back(self, name: str) -> None:
        self._registered.discard(name)
        # What led here is what is told, and the time for it may be over.
        with suppress(TransportError):
            self.forget(name, timeout_s=_TAKE_BACK_S)

    def _require_gathered(self, expected: Sequence[str], deadline_s: float) -> None:
        """Raise unless the servers together have every tensor once: one that was restarted has none, and says nothing."""
        limit_bytes = _LIMIT_BYTES + sum(_META_BYTES + 6 * len(name) for name in expected)
        where = self._sockets[0]
        body = _ask(where, "GET", "/v1/metas", None, deadline_s, limit_bytes)
        try:
            found = sorted(
                meta["name"]
                for share in json.loads(body).values()
                for buffer in share["memory_buffer_metas_list"]
                for meta in buffer["metas"]
            )
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise TransportError(
                f"checkpoint-engine at {where}: GET /v1/metas: not what release 0.4.2 answers: {body[:_SHOWN]!r}"
            ) from error
        if found != list(expected):
            missing = sorted(set(expected) - set(found))
            raise TransportError(
                f"checkpoint-engine at {where}: expected the {len(expected)} tensors of the version, each once; found "
                f"{len(found)}, without {missing[:3]}; a server was restarted or another hands over too: hand over again"
            )

    def _update(
        self, name: str, calls: Mapping[int, EngineCall], ranks: Sequence[int], deadline_s: float
    ) -> None:
        def body(rank: int) -> Mapping[str, Any]:
            call = calls.get(rank)
            return {
                "ranks": list(ranks),
                "update_url": None if call is None else call.url,
                "inference_group_ranks": [] if call is None else list(call.ranks),
                "timeout": max(deadline_s - time.monotonic(), 0.0),
                "uds": None if call is None else call.uds,
            }

        self._all("POST", f"/v1/checkpoints/{name}/update", body, deadline_s)

    def _all(
        self,
        method: str,
        route: str,
        body: Callable[[int], Mapping[str, Any]] | None,
        deadline_s: float,
    ) -> None:
        """Ask all servers at the same time, as what they do together needs; raise the first error.

        Args:
            body: by rank.
        """
        begin, is_off = threading.Event(), threading.Event()

        def ask(rank: int, path: str) -> bytes:
            begin.wait()  # until all can be waited for
            if is_off.is_set():
                return b""
            return _ask(path, method, route, None if body is None else body(rank), deadline_s)

        asked: list[Future[bytes]] = []
        pool = ThreadPoolExecutor(len(self._sockets), thread_name_prefix="syncline-ce")
        try:
            asked = [pool.submit(ask, rank, path) for rank, path in enumerate(self._sockets)]
            begin.set()
            wait(asked)
        except BaseException:
            is_off.set()
            begin.set()
            # A server that is still at it may register what is taken back before it is done.
            wait(asked, _UNDER_WAY_S)
            raise
        finally:
            pool.shutdown(wait=False)
        for future in asked:
            future.result()


def _deadline(timeout_s: float) -> float:
    return time.monotonic() + check_seconds("timeout_s", timeout_s)


def _calls(
    engines: Sequence[EngineCall], ranks: Sequence[int], servers: int
) -> dict[int, EngineCall]:
    """Return which rank asks which engine; release 0.4.2 checks none of this, and waits for ever or updates nothing."""
    taking = tuple(ranks) or tuple(range(servers))
    if len(set(taking)) != len(taking) or not set(taking) <= set(range(servers)):
        raise ConfigError(f"ranks: expected some of 0 to {servers - 1}, each once; found {ranks}")
    calls = {}
    for engine in engines:
        split = urlsplit(engine.url)
        if split.scheme not in ("http", "https") or not split.netloc:
            raise ConfigError(f"engines: expected a whole http URL, found {engine.url!r}")
        own = engine.ranks or taking
        calls[own[0]] = EngineCall(engine.url, own, engine.uds)
    named = [rank for engine in engines for rank in engine.ranks or taking]
    if engines and sorted(named) != sorted(taking):
        raise ConfigError(
            f"engines: expected ranks {sorted(taking)} among them, each once; found {sorted(named)}"
        )
    return calls


def _require_still(folder: Path, held: HeldVersion) -> None:
    state = read_state(folder)
    if state is None or state.is_changing or state.held != held:
        raise MovedOnError(
            f"{folder}: expected version {held.version} until it is registered, found that it changed; hand over again",
            version=held.version,
        )


def _ask(
    path: str,
    method: str,
    route: str,
    body: Mapping[str, Any] | None,
    deadline_s: float,
    limit_bytes: int = _LIMIT_BYTES,
) -> bytes:
    where = f"checkpoint-engine at {path}: {method} {route}"
    try:
        answer = exchange(
            UnixAddress(path),
            where,
            method,
            route,
            None if body is None else json.dumps(body).encode(),
            {"Host": "localhost", "Content-Type": "application/json"},
            limit_bytes=limit_bytes,
            deadline_s=deadline_s,
        )
    except TransportTimeoutError as error:
        raise TransportTimeoutError(
            f"{error}; release 0.4.2 waits for ever where an engine died or refused: restart it and its engines"
        ) from error
    if answer.status != http.HTTPStatus.OK:
        said = answer.body[:_SHOWN].decode(errors="replace")
        raise EndpointError(f"{where}: status {answer.status}: {said}", status=answer.status)
    return answer.body


def _dealt(files: Sequence[Path], sockets: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the files of each server: the largest first, each to who has least."""
    shares: dict[str, list[str]] = {path: [] for path in sockets}
    load = dict.fromkeys(sockets, 0)
    for file in sorted(files, key=lambda one: (-one.stat().st_size, one)):
        least = min(sockets, key=lambda path: load[path])
        load[least] += file.stat().st_size
        shares[least].append(str(file))
    return {path: tuple(share) for path, share in shares.items()}
