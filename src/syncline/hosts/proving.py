"""What the ranks of an engine have read, together, is held against the manifest before one of them writes."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import starmap

from syncline.abc import ignore
from syncline.errors import VerifyError
from syncline.hosts.loading import piece_fingerprint, require
from syncline.hosts.roads import Roads
from syncline.hosts.sizing import Buckets
from syncline.hosts.sources import Sources
from syncline.hosts.taking import Taker
from syncline.layouts import CanonicalTensor
from syncline.peers.streams import Deadline
from syncline.plan import Assignment, Fetch, Plan, Transfer
from syncline.sync.phases import Phases
from syncline.types import ZERO, Fingerprint

Totals = dict[str, Fingerprint]

_HEX = re.compile(r"[0-9a-f]{32}")
_SERVER = -1


def read_rest(
    sources: Sources,
    plan: Plan,
    assignment: Assignment,
    numbers: Collection[int],
    catalog: Mapping[str, CanonicalTensor],
    roads: Roads,
    deadline: Deadline,
) -> Totals:
    """Return what the pieces that no receiver takes add to the fingerprints of tensors of which one takes others.

    Nothing where all ranks of an engine take part; else only a whole tensor can be proved, so its rest is read here.

    Raises:
        TransportError: nobody has a piece any more, or the deadline has passed.
    """
    rest = list(_packed(_untaken(plan, assignment, numbers), plan.limit_bytes))
    if not rest:
        return {}
    reads = Assignment(tuple(tuple(starmap(_read, enumerate(b))) for b in rest), assignment.digest)
    staged = Buckets(max(sum(t.piece.nbytes for t in bucket) for bucket in rest), 1)
    taker = Taker(
        sources,
        replace(plan, buckets=tuple(map(tuple, rest))),
        reads,
        _SERVER,
        roads,
        staged,
        deadline,
        patience_s=deadline.timeout_s,
        observe=ignore,
        phases=Phases(),
    )
    totals: Totals = {}
    with closing(taker.buckets()) as buckets:
        for bucket in buckets:
            for piece, bits in bucket:
                found = piece_fingerprint(piece, catalog[piece.name].meta, bits)
                totals[piece.name] = totals.get(piece.name, ZERO) + found
    return totals


def prove(
    sources: Sources,
    plan: Plan,
    assignment: Assignment,
    receivers: Mapping[int, str],
    prepared: Mapping[str, Sequence[str]],
    rest: Totals,
) -> None:
    """Check that all copies of every piece agree, and that the pieces add up to the manifest's tensors.

    Args:
        receivers: names of those that take part, by number; `prepared`: what each says that its pieces are.
        rest: from `read_rest`.

    Raises:
        VerifyError: they do not.
    """
    said = {name: iter(pieces) for name, pieces in prepared.items()}
    totals = dict(rest)
    for bucket, fetches in zip(plan.buckets, assignment.buckets, strict=True):
        copies: dict[int, dict[str, str]] = {}
        for target in sorted(receivers):
            for index in sorted(f.piece for f in fetches if f.target == target):
                copies.setdefault(index, {})[receivers[target]] = next(said[receivers[target]], "")
        for index, by_name in copies.items():
            piece = bucket[index].piece
            found = set(by_name.values())
            if len(found) != 1 or _HEX.fullmatch(text := found.pop()) is None:
                raise VerifyError(f"{piece}: workers read different bits: {by_name}")
            totals[piece.name] = totals.get(piece.name, ZERO) + Fingerprint.from_hex(text)
    for name, total in totals.items():
        require(sources.held, name, total)


def _untaken(plan: Plan, assignment: Assignment, numbers: Collection[int]) -> list[Transfer]:
    taken = [{f.piece for f in fetches if f.target in numbers} for fetches in assignment.buckets]
    pairs = list(zip(plan.buckets, taken, strict=True))
    names = {bucket[index].piece.name for bucket, indices in pairs for index in indices}
    return [
        transfer
        for bucket, indices in pairs
        for index, transfer in enumerate(bucket)
        if index not in indices and transfer.piece.name in names
    ]


def _packed(transfers: Iterable[Transfer], limit_bytes: int) -> Iterable[list[Transfer]]:
    bucket: list[Transfer] = []
    for transfer in transfers:
        if bucket and sum(t.piece.nbytes for t in (*bucket, transfer)) > limit_bytes:
            yield bucket
            bucket = []
        bucket.append(transfer)
    if bucket:
        yield bucket


def _read(index: int, transfer: Transfer) -> Fetch:
    return Fetch(_SERVER, index, is_relay=False, sender=transfer.piece.sources[0], nic=0)
