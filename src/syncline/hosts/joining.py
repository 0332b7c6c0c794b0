"""An engine joins: it takes the version that others have from their memory; they go on undisturbed.

What was read is proved against the manifest's fingerprints before the engine's first bit is written, and the
engine then holds that very version, so that the next delta fits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

from syncline.abc import Engine, Observe, PeerMemory, ignore
from syncline.errors import ConfigError
from syncline.format import strict_json
from syncline.hosts.loading import load_flat
from syncline.hosts.offer import shared_with
from syncline.hosts.planning import host_nodes
from syncline.hosts.roads import Roads
from syncline.hosts.sizing import size_buckets
from syncline.hosts.sources import Sources, find_sources, flat_plan
from syncline.hosts.taking import Fellow, Taker
from syncline.hosts.wire import fellow_document, fellow_of
from syncline.peers.shared import machine
from syncline.peers.streams import Deadline
from syncline.plan import Node, assign
from syncline.sync.accounting import Moved
from syncline.sync.checks import check_layout
from syncline.sync.phases import Phases
from syncline.types import Step, check_seconds

STEPS = ("join.found", "join.met", "join.committed")

_PATIENCE_S = 15.0

Exchange = Callable[[bytes], Sequence[bytes]]
"""Hands this side's bytes to all who join together, and returns everyone's, in the same order everywhere."""


@dataclass(frozen=True, slots=True)
class JoinReport:
    """What a join did.

    Attributes:
        version: the engine's, now. nbytes: weights that were read; seconds: all of it.
        moved: bytes from all peers, and seconds by phase.
        lost: hosts and receivers that were given up on, and why.
    """

    version: int
    nbytes: int
    seconds: float
    lost: tuple[tuple[str, str], ...]
    moved: Moved


def join(
    engine: Engine,
    offers: Sequence[bytes],
    memories: Sequence[PeerMemory],
    *,
    timeout_s: float,
    name: str = "joiner",
    exchange: Exchange | None = None,
    bucket_bytes: int = 64 << 20,
    patience_s: float = _PATIENCE_S,
    observe: Observe = ignore,
) -> JoinReport:
    """Bring an engine to the version that hosts offer; it then holds that version, or what it held before.

    Args:
        engine: empty, or with the same tensors at any version.
        offers: of the hosts, `Offer.dump()`, all of one version.
        memories: this side's transports, best first; the caller closes them.
        timeout_s: everything included.
        exchange: given if several engines join together: receivers then pass pieces on to each other, and
            the hosts send the model once. See `meet_in_directory`.
        bucket_bytes: two of these are staged, and never more than the checkpoint.
        patience_s: how long one sender may keep this side waiting where another has the same.

    Raises:
        TransportError: no host is left who has a piece; names them. The engine is as it was.
        VerifyError: what was read is not what the manifest names. The engine is as it was.
        LayoutError: the engine has other tensors.

    Collective: with `exchange`; without, no.
    """
    phases = Phases()
    deadline = Deadline(timeout_s)
    check_seconds("patience_s", patience_s)
    roads = Roads(memories, f"join.{name}.{time.monotonic_ns()}")
    try:
        with phases("wire"):
            sources = find_sources(offers, roads, deadline)
        observe(Step("join.found"))
        manifest = sources.held.manifest
        if engine.tensors():
            check_layout(engine.tensors(), manifest)
        taker = _taker(
            sources, roads, deadline, name, exchange, bucket_bytes, patience_s, observe, phases
        )
        observe(Step("join.met"))
        with closing(taker.buckets()) as buckets:
            load_flat(engine, sources, buckets, phases)
        observe(Step("join.committed"))
        taker.linger()
    finally:
        roads.close()
    spent = phases.seconds()
    moved = Moved.of("peers", "full", 1, roads.read_bytes, manifest.model_bytes, spent)
    return JoinReport(
        manifest.version,
        manifest.model_bytes,
        spent["total"],
        tuple(sorted(taker.lost.items())),
        moved,
    )


def _taker(
    sources: Sources,
    roads: Roads,
    deadline: Deadline,
    name: str,
    exchange: Exchange | None,
    bucket_bytes: int,
    patience_s: float,
    observe: Observe,
    phases: Phases,
) -> Taker:
    """Return this side's part of the reads, agreed on with those who join together."""
    # All who join plan alike, so what they plan from is exchanged: the hosts that each could read.
    hosts = [source.offer.host for source in sources.hosts]
    here = shared_with(roads.ways(), machine())
    said = strict_json.dump({"name": name, "machine": here, "hosts": hosts})
    everyone = [_member(raw) for raw in ([said] if exchange is None else exchange(said))]
    names = [member for member, _, _ in everyone]
    if len(set(names)) != len(names) or name not in names:
        raise ConfigError(f"exchange: expected different names, {name!r} among them, found {names}")
    common = [host for host in hosts if all(host in theirs for _, _, theirs in everyone)]
    if exchange is not None and common != hosts:
        raise ConfigError(
            f"exchange: those who join read different hosts; {common} in common; join again"
        )
    largest = sources.held.manifest.model_bytes
    staged = size_buckets([2 * bucket_bytes], largest, share=1.0, limit_bytes=bucket_bytes)
    plan = flat_plan(sources, len(everyone), staged.nbytes)
    targets = [Node(member, where) for member, where, _ in everyone]
    assignment = assign(plan, host_nodes(sources), targets, relays=len(everyone) > 1)
    taker = Taker(
        sources,
        plan,
        assignment,
        names.index(name),
        roads,
        staged,
        deadline,
        patience_s=patience_s,
        observe=observe,
        phases=phases,
    )
    me = Fellow(name, machine(), roads.prefix, roads.ways())
    if exchange is None:
        taker.meet([me])
    else:
        met = [
            fellow_of(raw, assignment.digest)
            for raw in exchange(fellow_document(me, assignment.digest))
        ]
        taker.meet(met)
    return taker


def _member(raw: bytes) -> tuple[str, str, list[object]]:
    where = "member of a group that joins"
    value = strict_json.parse(raw, where, limit_bytes=1 << 20)
    fields = strict_json.Fields(value, where, ("name", "machine", "hosts"))
    return fields.text("name"), fields.text("machine"), fields.items("hosts")
