"""An engine joins: it takes the version that others have from their memory; they go on undisturbed.

What was read is proved against the manifest's fingerprints before the engine's first bit is written, and the
engine then holds that very version, so that the next delta fits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial

from syncline import kernels, threads
from syncline.abc import Engine, Observe, PeerMemory, ignore
from syncline.errors import ConfigError, VerifyError
from syncline.format import strict_json
from syncline.hosts.offer import Way, machine, shared_with
from syncline.hosts.roads import Roads
from syncline.hosts.sizing import size_buckets
from syncline.hosts.sources import Sources, find_sources, flat_plan
from syncline.hosts.taking import Bucket, Fellow, Taker
from syncline.hosts.wire import fellow_document, fellow_of
from syncline.peers.streams import Deadline
from syncline.plan import Node, Piece, assign
from syncline.sync.checks import check_layout
from syncline.sync.decode import to_record
from syncline.types import WINDOW_UNITS, ZERO, Bits, Fingerprint, Record, Span, Step, TensorMeta
from syncline.version import HeldVersion

STEPS = ("join.found", "join.met", "join.committed")

_PATIENCE_S = 15.0

Exchange = Callable[[bytes], Sequence[bytes]]
"""Hands this side's bytes to all who join together, and returns everyone's, in the same order everywhere."""


@dataclass(frozen=True, slots=True)
class JoinReport:
    """What a join did.

    Attributes:
        version: the engine's, now. nbytes: weights that were read; seconds: all of it.
        lost: hosts and receivers that were given up on, and why.
    """

    version: int
    nbytes: int
    seconds: float
    lost: tuple[tuple[str, str], ...]


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
            the hosts send the model once. See `meet_in_store`.
        bucket_bytes: two of these are staged, and never more than the checkpoint.
        patience_s: how long one sender may keep this side waiting where another has the same.

    Raises:
        TransportError: no host is left who has a piece; names them. The engine is as it was.
        VerifyError: what was read is not what the manifest names. The engine is as it was.
        LayoutError: the engine has other tensors.

    Collective: with `exchange`; without, no.
    """
    started_s = time.perf_counter()
    deadline = Deadline(timeout_s)
    roads = Roads(memories, f"join.{name}.{time.monotonic_ns()}")
    try:
        sources = find_sources(offers, roads, deadline)
        observe(Step("join.found"))
        manifest = sources.held.manifest
        if engine.tensors():
            check_layout(engine.tensors(), manifest)
        taker = _taker(sources, roads, deadline, name, exchange, bucket_bytes, patience_s, observe)
        observe(Step("join.met"))
        with closing(taker.buckets()) as buckets:
            if engine.tensors():
                with closing(_records(engine, sources.held, buckets)) as records:
                    engine.apply(records, sources.held)
            else:
                files = {n: c for host in sources.hosts for n, c in host.catalog.files.items()}
                engine.create(sources.held, _tensors(sources.held, buckets), files)
        observe(Step("join.committed"))
        taker.linger()
    finally:
        roads.close()
    seconds = time.perf_counter() - started_s
    return JoinReport(
        manifest.version, manifest.model_bytes, seconds, tuple(sorted(taker.lost.items()))
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
    nodes = [
        Node(
            s.offer.host,
            shared_with(s.offer.ways, s.offer.machine),
            tuple(f"nic{number}" for number in range(_nics(s.offer.ways))),
        )
        for s in sources.hosts
    ]
    targets = [Node(member, where) for member, where, _ in everyone]
    assignment = assign(plan, nodes, targets, relays=len(everyone) > 1)
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


def _nics(ways: Sequence[Way]) -> int:
    """Return how many descriptions a host gives of the transport of which it gives most."""
    return max([1, *(sum(way.kind == kind for way in ways) for kind in {w.kind for w in ways})])


def _member(raw: bytes) -> tuple[str, str, list[object]]:
    where = "member of a group that joins"
    value = strict_json.parse(raw, where, limit_bytes=1 << 20)
    fields = strict_json.Fields(value, where, ("name", "machine", "hosts"))
    return fields.text("name"), fields.text("machine"), fields.items("hosts")


def _windows(bucket: Bucket) -> Iterator[tuple[Piece, int, Bits]]:
    """Yield the pieces of a bucket in windows: piece, first unit in the tensor, bits."""
    for piece, bits in bucket:
        for at in range(0, max(1, bits.size), WINDOW_UNITS):
            yield piece, piece.start[0] + at, bits[at : at + WINDOW_UNITS]


def _records(
    engine: Engine, held: HeldVersion, buckets: Iterable[Bucket]
) -> Generator[Record, None, None]:
    """Yield what differs from the engine's bits; raise before the end if the whole is not the version."""
    entries = held.manifest.by_name
    views = {name: engine.view(name) for name in entries}

    def job(piece: Piece, start: int, bits: Bits) -> tuple[str, Record, Fingerprint]:
        record = to_record(entries[piece.name].meta, Span(start, bits), views[piece.name])
        found = kernels.fingerprint(bits, start, kernels.seeds(piece.name))
        return piece.name, record, found

    totals = dict.fromkeys(entries, ZERO)
    for bucket in buckets:
        jobs = (partial(job, *window) for window in _windows(bucket))
        with closing(threads.in_order(jobs)) as results:
            for name, record, found in results:
                totals[name] += found
                if record.new_bits.size:
                    yield record
    for name, total in totals.items():
        require(held, name, total)


def _tensors(
    held: HeldVersion, buckets: Iterable[Bucket]
) -> Iterator[tuple[TensorMeta, Iterator[Span]]]:
    """Yield every tensor with its spans, each proved at their end."""
    windows = (window for bucket in buckets for window in _windows(bucket))
    following = next(windows, None)
    for entry in held.manifest.tensors:

        def spans(name: str = entry.meta.name) -> Iterator[Span]:
            nonlocal following
            total = ZERO
            while following is not None and following[0].name == name:
                _, start, bits = following
                if bits.size:
                    total += kernels.fingerprint(bits, start, kernels.seeds(name))
                    yield Span(start, bits)
                following = next(windows, None)
            require(held, name, total)

        yield entry.meta, spans()


def require(held: HeldVersion, name: str, found: Fingerprint) -> None:
    """Raise `VerifyError` if a tensor's fingerprint is not the manifest's."""
    expected = held.manifest.by_name[name].fingerprint
    if found != expected:
        raise VerifyError(
            f"tensor {name!r}: expected fingerprint {expected.hex()} in version {held.version}, read "
            f"{found.hex()}; nothing of it is used; join again, from other hosts if this repeats",
            tensor=name,
            version=held.version,
        )
