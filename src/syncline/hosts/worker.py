"""One engine's rank under a parameter server: reads its boxes, says what it has, and writes when all do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any

from syncline.abc import Channel, Engine, Observe, PeerMemory, ignore
from syncline.errors import (
    CommitError,
    ConfigError,
    FormatError,
    PeerLostError,
    SynclineError,
    TransportError,
    TransportTimeoutError,
)
from syncline.format import strict_json
from syncline.hosts import messages
from syncline.hosts.loading import Found, load_flat, load_placed
from syncline.hosts.messages import say
from syncline.hosts.offer import shared_with
from syncline.hosts.planning import Fleet, Receiver, plan_update
from syncline.hosts.roads import Roads
from syncline.hosts.sizing import Buckets
from syncline.hosts.sources import Sources, find_sources
from syncline.hosts.taking import Fellow, Taker
from syncline.hosts.wire import fellow_document, fellow_of
from syncline.peers.shared import machine
from syncline.peers.streams import Deadline
from syncline.sync.phases import Phases
from syncline.types import Step, check_seconds

STEPS = ("update.begun", "update.met", "update.prepared", "update.agreed", "update.committed")


def free_memory() -> int:
    """Return the bytes of host memory that are free."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class Worker:
    """Takes the updates of a `ParameterServer` into one engine, or one rank of an engine.

    Args:
        name: what messages call it; different for every worker.
        engine: holds the canonical tensors, or with `fleet.layout` the local tensors of its rank.
        memories: its transports, best first; the caller closes them.
        fleet: as at the server; number: `engine * ranks + rank`.
        free_bytes: asked for the memory that buckets may be cut from.
        patience_s: how long one sender may keep it waiting where another has the same.

    After any error but `TornUpdateError` the engine holds what it held before.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        memories: Sequence[PeerMemory],
        *,
        fleet: Fleet | None = None,
        number: int = 0,
        free_bytes: Callable[[], int] = free_memory,
        patience_s: float = 15.0,
        observe: Observe = ignore,
    ) -> None:
        self._name = name
        self._engine = engine
        self._memories = tuple(memories)
        self._fleet = Fleet() if fleet is None else fleet
        if not 0 <= number < self._fleet.engines * self._fleet.ranks:
            raise ConfigError(f"number: the fleet has no receiver {number}")
        self._number = number
        self._free_bytes = free_bytes
        self._patience_s = check_seconds("patience_s", patience_s)
        self._observe = observe

    def serve(self, channel: Channel) -> None:
        """Take updates until the server closes the channel; failed ones are reported there and leave no trace."""
        while True:
            with suppress(SynclineError):
                try:
                    self.take(channel, 3600.0)
                except PeerLostError:
                    return

    def take(self, channel: Channel, timeout_s: float) -> int:
        """Wait for one update, take it, and return the version.

        Raises:
            TransportTimeoutError: none came in `timeout_s` seconds, or it was not done by its own deadline.
            PeerLostError: the server has gone; before it said commit, nothing was written.
            CommitError: the server gave the update up, and says why.
            SynclineError: this side failed; the server knows.
        """
        update, fields = _first(channel, timeout_s)
        try:
            return self._take(channel, update, fields)
        except BaseException as error:
            with suppress(SynclineError):  # what happened here is what is to be raised
                say(channel, update, "failed", error=f"{type(error).__name__}: {error}")
            raise

    def _take(self, channel: Channel, update: str, fields: Mapping[str, Any]) -> int:
        phases = Phases()
        deadline = Deadline(messages.number(fields, "timeout_ms") / 1000)
        self._observe(Step("update.begun"))
        roads = Roads(self._memories, f"update.{self._name}.{update}")
        try:
            with phases("wire"):
                sources = find_sources(messages.blobs(fields, "offers"), roads, deadline)
            tell(
                channel,
                update,
                "ready",
                number=self._number,
                machine=shared_with(roads.ways(), machine()),
                free_bytes=self._free_bytes(),
                wanted_bytes=self._fleet.wanted_bytes(self._number % self._fleet.ranks, sources),
                hosts=[source.offer.host for source in sources.hosts],
            )
            with phases("wait"):
                taker = self._meet(channel, update, roads, sources, deadline, phases)
            self._observe(Step("update.met"))

            def vote(found: Found) -> None:
                tell(channel, update, "prepared", pieces=[one.hex() for one in found])
                self._observe(Step("update.prepared"))
                with phases("wait"):
                    hear(channel, update, "commit", deadline)
                self._observe(Step("update.agreed"))

            with closing(taker.buckets()) as buckets:
                if self._fleet.layout is None:
                    load_flat(self._engine, sources, buckets, phases, vote)
                else:
                    rank = self._number % self._fleet.ranks
                    layout, held = self._fleet.layout, sources.held
                    load_placed(self._engine, layout, rank, held, buckets, phases, vote)
            spent = messages.microseconds(phases.seconds())
            with suppress(TransportError):  # it is committed, whoever hears of it
                say(
                    channel,
                    update,
                    "committed",
                    lost=sorted(taker.lost),
                    wire_bytes=roads.read_bytes,
                    spent_us=spent,
                )
            self._observe(Step("update.committed"))
            return sources.held.version
        finally:
            roads.close()

    def _meet(
        self,
        channel: Channel,
        update: str,
        roads: Roads,
        sources: Sources,
        deadline: Deadline,
        phases: Phases,
    ) -> Taker:
        """Plan, make room, and learn of the other receivers."""
        size = hear(channel, update, "size", deadline)
        receivers = [_receiver(row) for row in messages.texts(size, "receivers")]
        staged = Buckets(messages.number(size, "nbytes"), messages.number(size, "count"))
        plan, assignment = plan_update(
            self._fleet, sources, receivers, staged.nbytes, relays=bool(size.get("relays"))
        )
        taker = Taker(
            sources,
            plan,
            assignment,
            self._number,
            roads,
            staged,
            deadline,
            patience_s=self._patience_s,
            observe=self._observe,
            phases=phases,
        )
        me = Fellow(self._name, machine(), roads.prefix, roads.ways())
        document = fellow_document(me, assignment.digest).decode()
        tell(channel, update, "met", fellow=document)
        said = messages.texts(hear(channel, update, "read", deadline), "fellows")
        met = {r.number: raw for r, raw in zip(receivers, said, strict=True)}
        nobody = Fellow("", "", "", ())
        taker.meet(
            [
                fellow_of(met[n].encode(), assignment.digest) if n in met else nobody
                for n in range(self._fleet.engines * self._fleet.ranks)
            ]
        )
        return taker


def tell(channel: Channel, update: str, word: str, **fields: Any) -> None:
    """Send a message that comes before anything is written; raise `PeerLostError` if the server is gone."""
    try:
        say(channel, update, word, **fields)
    except PeerLostError as error:
        raise PeerLostError(
            f"the parameter server went away before it heard {word!r}; nothing was written"
        ) from error


def hear(channel: Channel, update: str, word: str, deadline: Deadline) -> Mapping[str, Any]:
    """Return the fields of the next message of an update, which must say `word`.

    Raises:
        CommitError: the server gave the update up. TransportTimeoutError, PeerLostError: it is stuck or gone.
    """
    while True:
        try:
            raw = channel.receive(deadline.left_s())
        except TimeoutError as error:
            raise TransportTimeoutError(
                f"the parameter server did not say {word!r} in {deadline.timeout_s} s; nothing was written"
            ) from error
        except PeerLostError as error:
            raise PeerLostError(
                f"the parameter server went away before it said {word!r}; nothing was written"
            ) from error
        theirs, said, fields = messages.parse(raw)
        if theirs != update:
            continue  # of an update that ended
        if said == "abort":
            raise CommitError(f"the update was given up: {messages.text(fields, 'reason')}")
        if said != word:
            raise FormatError(f"message of an update: expected {word!r}, found {said!r:.40}")
        return fields


def _first(channel: Channel, timeout_s: float) -> tuple[str, Mapping[str, Any]]:
    """Return name and fields of the next update, past what is left of those that ended."""
    ends = time.monotonic() + check_seconds("timeout_s", timeout_s)
    while True:
        raw = channel.receive(max(0.0, ends - time.monotonic()))
        update, said, fields = messages.parse(raw)
        if said == "begin":
            return update, fields


def _receiver(raw: str) -> Receiver:
    where = "message of an update: receivers"
    value = strict_json.parse(raw.encode(), where, limit_bytes=1 << 16)
    row = strict_json.Fields(value, where, ("name", "number", "machine"))
    return Receiver(row.text("name"), row.integer("number"), row.text("machine"))
