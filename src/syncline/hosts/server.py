"""The parameter server: brings workers from the hosts' memory to one version, all of them or none.

Every worker reads and proves its boxes while it goes on serving; only when the last one has does the server say
commit. Whoever dies, hangs or fails before that, and whatever the caller's own request does, the
others end by the deadline with what they held, and the error names who it was.
"""

from __future__ import annotations

import base64
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from syncline.abc import Channel, PeerMemory
from syncline.errors import (
    CommitError,
    ConfigError,
    FormatError,
    PeerLostError,
    SynclineError,
    TransportTimeoutError,
)
from syncline.format import strict_json
from syncline.hosts import messages
from syncline.hosts.planning import Fleet, Receiver, plan_update
from syncline.hosts.proving import prove, read_rest
from syncline.hosts.roads import Roads
from syncline.hosts.sizing import Buckets, size_buckets
from syncline.hosts.sources import Sources, find_sources
from syncline.hosts.wire import fellow_of
from syncline.peers.streams import Deadline
from syncline.sync.accounting import Moved

T = TypeVar("T")

_POLL_S = 0.01
_LAST_WORD_S = 1.0


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """What an update did.

    Attributes:
        version: that all `workers` hold now. seconds: all of it; wanted_bytes: what each worker got.
        buckets: how they staged. lost: hosts and workers that somebody gave up on while reading.
        moved: bytes from all peers to all workers, and seconds by phase, over all workers; waiting is nobody's.
    """

    version: int
    workers: tuple[str, ...]
    seconds: float
    wanted_bytes: Mapping[str, int]
    buckets: Buckets
    lost: tuple[str, ...]
    moved: Moved


class ParameterServer:
    """Drives updates of workers.

    Args:
        memories: transports to read catalogs over; the caller closes them.
        fleet: the engines, as every `Worker` was told.
        limit_bytes: the largest bucket; share: of the workers' free memory that buckets may take.
    """

    def __init__(
        self,
        memories: Sequence[PeerMemory],
        fleet: Fleet | None = None,
        *,
        limit_bytes: int = 1 << 30,
        share: float = 0.5,
    ) -> None:
        self._memories = tuple(memories)
        self._fleet = Fleet() if fleet is None else fleet
        self._limit_bytes = limit_bytes
        self._share = share

    def broadcast(
        self,
        offers: Sequence[bytes],
        workers: Mapping[str, Channel],
        *,
        timeout_s: float,
        request: Callable[[], None] | None = None,
    ) -> UpdateReport:
        """Bring all workers of the fleet to the hosts' version; they pass on to each other what several want.

        Raises:
            ConfigError: a worker of the fleet is missing. Else as `p2p`.
        """
        count = self._fleet.engines * self._fleet.ranks
        if len(workers) != count:
            raise ConfigError(
                f"workers: the fleet has {count}, given {sorted(workers)}; p2p() takes some"
            )
        return self._update(offers, workers, timeout_s, request, relays=True)

    def p2p(
        self,
        offers: Sequence[bytes],
        workers: Mapping[str, Channel],
        *,
        timeout_s: float,
        request: Callable[[], None] | None = None,
    ) -> UpdateReport:
        """Bring some workers to the hosts' version, each straight from the hosts; nobody else takes part.

        Args:
            offers: of hosts that have the version, or shares of it.
            workers: a channel to each, by name.
            timeout_s: until the last one has committed.
            request: called on a thread of its own, for whatever makes the engines take part; if it raises, the
                update is given up at once.

        Raises:
            PeerLostError, TransportTimeoutError: a worker died or did not answer; names it. CommitError: a worker,
                or `request`, failed; says who and why. VerifyError: what they read is not the version.
                After these all workers hold what they held, unless the message names some that committed.
        """
        return self._update(offers, workers, timeout_s, request, relays=False)

    def _update(
        self,
        offers: Sequence[bytes],
        workers: Mapping[str, Channel],
        timeout_s: float,
        request: Callable[[], None] | None,
        *,
        relays: bool,
    ) -> UpdateReport:
        if not workers:
            raise ConfigError("workers: expected at least one")
        started_s = time.perf_counter()
        deadline = Deadline(timeout_s)
        update = _Update(secrets.token_hex(8), workers, deadline, request)
        roads = Roads(self._memories, f"server.{update.name}")
        try:
            sources = find_sources(offers, roads, deadline)
            encoded = [base64.b64encode(raw).decode() for raw in offers]
            update.tell("begin", offers=encoded, timeout_ms=int(timeout_s * 1000))
            update.start()
            ready = update.hear_all("ready")
            receivers = _receivers(ready, sources, self._fleet.engines * self._fleet.ranks)
            wanted = {w: _said(w, messages.number, s, "wanted_bytes") for w, s in ready.items()}
            staged = size_buckets(
                [_said(w, messages.number, s, "free_bytes") for w, s in ready.items()],
                max(wanted.values()),
                share=self._share,
                limit_bytes=self._limit_bytes,
            )
            plan, assignment = plan_update(
                self._fleet, sources, receivers, staged.nbytes, relays=relays
            )
            rows = [
                strict_json.dump(
                    {"name": r.name, "number": r.number, "machine": r.machine}
                ).decode()
                for r in receivers
            ]
            update.tell(
                "size", nbytes=staged.nbytes, count=staged.count, relays=relays, receivers=rows
            )
            met = update.hear_all("met")
            fellows = [_said(r.name, messages.text, met[r.name], "fellow") for r in receivers]
            for receiver, fellow in zip(receivers, fellows, strict=True):
                try:
                    fellow_of(fellow.encode(), assignment.digest)
                except FormatError as error:
                    raise CommitError(f"worker {receiver.name}: {error}") from error
            update.tell("read", fellows=fellows)
            names = {receiver.number: receiver.name for receiver in receivers}
            layout = self._fleet.layout
            rest = {}
            if layout is not None:
                rest = read_rest(sources, plan, assignment, names, layout.catalog, roads, deadline)
            prepared = update.hear_all("prepared")
            if layout is not None:
                pieces = {w: _said(w, messages.texts, s, "pieces") for w, s in prepared.items()}
                prove(sources, plan, assignment, names, pieces, rest)
            update.commit(sources.held.version)
        except BaseException as error:
            update.abort(error)
            raise
        finally:
            roads.close()
        lost = {name for name, _ in sources.lost}.union(
            *(messages.texts(said, "lost") for said in update.committed.values())
        )
        seconds = time.perf_counter() - started_s
        return UpdateReport(
            sources.held.version,
            tuple(sorted(workers)),
            seconds,
            wanted,
            staged,
            tuple(sorted(lost)),
            messages.moved(update.committed.values(), sources.held, roads.read_bytes, seconds),
        )


class _Update:
    """The server's side of the talk with all workers of one update."""

    def __init__(
        self,
        name: str,
        workers: Mapping[str, Channel],
        deadline: Deadline,
        request: Callable[[], None] | None,
    ) -> None:
        self.name = name
        self._workers = workers
        self._deadline = deadline
        self._request = request
        self._failure: list[Exception] = []
        self._untold: dict[str, Channel] | None = None  # once it is decided
        self.committed: dict[str, Mapping[str, Any]] = {}

    def start(self) -> None:
        """Start the caller's request, if there is one."""
        if self._request is not None:
            threading.Thread(target=self._ask, name="syncline-request", daemon=True).start()

    def tell(self, word: str, **fields: Any) -> None:
        """Say the same to every worker.

        Raises:
            PeerLostError, TransportTimeoutError: one is gone, or takes nothing; names it.
        """
        for worker, channel in self._workers.items():
            try:
                left_s = self._deadline.left_s()
                messages.say(channel, self.name, word, timeout_s=left_s, **fields)
            except TimeoutError as error:
                raise TransportTimeoutError(
                    f"worker {worker} did not take {word!r} in {self._deadline.timeout_s} s"
                ) from error
            except (PeerLostError, ConfigError) as error:
                raise PeerLostError(f"worker {worker} is gone: {error}") from error

    def hear_all(self, word: str) -> dict[str, Mapping[str, Any]]:
        """Return what every worker says next; the first that dies or fails ends it.

        Raises:
            PeerLostError, CommitError, TransportTimeoutError: name the worker, or the request.
        """
        heard: dict[str, Mapping[str, Any]] = {}
        while len(heard) < len(self._workers):
            if self._failure:
                error = self._failure[0]
                raise CommitError(
                    f"the request to the engines failed: {type(error).__name__}: {error}"
                ) from error
            missing = [worker for worker in self._workers if worker not in heard]
            for worker in missing:
                said = self._hear(worker, word)
                if said is not None:
                    heard[worker] = said
            try:
                self._deadline.left_s()
            except TimeoutError as error:
                late = [worker for worker in self._workers if worker not in heard]
                raise TransportTimeoutError(
                    f"workers {late} did not say {word!r} in {self._deadline.timeout_s} s"
                ) from error
        return heard

    def commit(self, version: int) -> None:
        """Let all write; afterwards some may have, so what fails says who holds what.

        Raises:
            PeerLostError, CommitError: a worker died or failed since it was prepared; nobody was told to write.
            CommitError: some may have written; says who.
        """
        for worker in self._workers:
            self._hear(worker, "nothing")
        self._untold = dict(self._workers)
        lost = self._tell_to_commit()
        while waiting := [w for w in self._workers if w not in self.committed and w not in lost]:
            for worker in waiting:
                try:
                    said = self._hear(worker, "committed")
                    if said is not None:
                        self.committed[worker] = said
                    self._deadline.left_s()
                except TimeoutError:
                    lost.setdefault(worker, "did not answer before the deadline")
                except SynclineError as error:
                    lost[worker] = str(error)
        if lost:
            raise CommitError(
                f"version {version}: committed by {sorted(self.committed)}; not known of "
                + "; ".join(f"{worker}: {reason}" for worker, reason in sorted(lost.items()))
                + "; the fleet may hold two versions: update again before it serves",
                version=version,
            )

    def abort(self, error: BaseException) -> None:
        """Tell every worker that can hear it to give the update up; once it is decided, to commit it."""
        if self._untold is not None:
            self._tell_to_commit()
            return
        reason = f"{type(error).__name__}: {error}"
        for channel in self._workers.values():
            with suppress(SynclineError):
                messages.say(channel, self.name, "abort", timeout_s=_LAST_WORD_S, reason=reason)

    def _tell_to_commit(self) -> dict[str, str]:
        """Let all write that were not told yet; return those that could not be told."""
        lost = {}
        while self._untold:
            worker = next(iter(self._untold))
            try:
                messages.say(self._workers[worker], self.name, "commit", timeout_s=_LAST_WORD_S)
            except SynclineError as error:
                lost[worker] = str(error)
            del self._untold[
                worker
            ]  # after it was said: an interrupt may have it said twice, never not at all
        return lost

    def _hear(self, worker: str, word: str) -> Mapping[str, Any] | None:
        """Return what a worker says, None if it says nothing yet."""
        try:
            raw = self._workers[worker].receive(_POLL_S)
        except TransportTimeoutError:
            return None
        except PeerLostError as error:
            raise PeerLostError(f"worker {worker} died: {error}") from error
        try:
            update, said, fields = messages.parse(raw)
        except FormatError as error:
            raise CommitError(f"worker {worker}: {error}") from error
        if update != self.name:
            return None  # of an update that ended
        if said == "failed":
            raise CommitError(f"worker {worker} failed: {messages.text(fields, 'error')}")
        if said != word:
            raise CommitError(f"worker {worker}: expected {word!r}, found {said!r:.40}")
        return fields

    def _ask(self) -> None:
        try:
            if self._request is not None:
                self._request()
        except Exception as error:  # noqa: BLE001 - whatever the caller's function raises ends the update
            self._failure.append(error)


def _said(
    worker: str, read: Callable[[Mapping[str, Any], str], T], fields: Mapping[str, Any], key: str
) -> T:
    """Return a field of what a worker said; an error names the worker."""
    try:
        return read(fields, key)
    except FormatError as error:
        raise CommitError(f"worker {worker}: {error}") from error


def _receivers(
    ready: Mapping[str, Mapping[str, Any]], sources: Sources, count: int
) -> list[Receiver]:
    """Return the workers by number; all must have found the hosts that the server found."""
    hosts = [source.offer.host for source in sources.hosts]
    for worker, said in ready.items():
        found_hosts = _said(worker, messages.texts, said, "hosts")
        if found_hosts != hosts:
            raise PeerLostError(
                f"worker {worker} can read hosts {found_hosts} of {hosts}; leave the others out"
            )
    found = [
        Receiver(
            worker,
            _said(worker, messages.number, said, "number"),
            _said(worker, messages.text, said, "machine"),
        )
        for worker, said in ready.items()
    ]
    for receiver in found:
        if receiver.number >= count:
            raise ConfigError(
                f"worker {receiver.name}: its number is {receiver.number}, the fleet has {count} receivers"
            )
    if len({receiver.number for receiver in found}) != len(found):
        raise ConfigError(f"workers: two have the same number: {found}")
    return sorted(found, key=lambda receiver: receiver.number)
