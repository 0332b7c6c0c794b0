"""A plan: who sends which piece to whom, in which bucket, agreed on by a digest before a byte moves."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from syncline.errors import ConfigError, PlanDisagreementError, PlanError
from syncline.layouts import Layout
from syncline.plan.pieces import Piece, intersect

BUNDLES = (r".*\.experts\.\d+\.", r".*\.(?=(?:q_a_proj|kv_a_proj_with_mqa)\.)")
"""Canonical tensors whose names begin with the same match of one of these are never in two buckets:
the matrices of one expert, and what engines fuse only when both halves come together."""


_OPEN = 32


@dataclass(frozen=True, slots=True)
class Transfer:
    """A piece, and for every engine and target rank the source rank that sends it.

    Attributes:
        senders: by engine, then in the order of `piece.targets`; length engines x targets.
    """

    piece: Piece
    senders: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that must move from a trainer to a fleet of equal engines.

    Attributes:
        engines: how many engines have the target layout. Rank r of engine e has number
            `e * engine_ranks + r`.
        buckets: transfers that are staged together; no rank stages more than `limit_bytes` in one.
        digest: SHA-256 over all of it; equal on both sides, or nothing moves.
    """

    engines: int
    source_ranks: int
    engine_ranks: int
    limit_bytes: int
    buckets: tuple[tuple[Transfer, ...], ...]
    digest: str

    def agree(self, theirs: str) -> None:
        """Accept the digest of the other side's plan.

        Raises:
            PlanDisagreementError: it is another plan.
        """
        if theirs != self.digest:
            raise PlanDisagreementError(
                f"the sides planned differently: digest {self.digest} here, {theirs} there; compare the "
                "config, the meshes and the versions of Syncline on both sides"
            )


def make_plan(
    source: Layout,
    target: Layout,
    *,
    engines: int = 1,
    limit_bytes: int = 1 << 30,
    unused: Collection[str] = (),
) -> Plan:
    """Return the plan that moves every tensor of the target from the source to all engines.

    Each piece is sent by the ranks that hold it in turn, those with least to send first. Buckets hold
    whole bundles, and pieces of all source ranks side by side, so that all of them work in each.

    Args:
        engines: engines that each have the target layout.
        limit_bytes: what a rank may stage at a time, sending or receiving.

    Raises:
        CoverageError: as `intersect`.
        PlanError: a bundle does not fit into a bucket.

    Deterministic: equal arguments give equal plans, on any machine.
    """
    if engines < 1 or limit_bytes < 1:
        raise ConfigError(f"need engines >= 1 and limit_bytes >= 1: {engines}, {limit_bytes}")
    pieces = intersect(source, target, unused)
    bundles = _in_turn(_bundled(small for piece in pieces for small in _split(piece, limit_bytes)))
    load: dict[int, int] = dict.fromkeys(range(len(source.placements)), 0)
    buckets = tuple(
        tuple(_transfer(piece, engines, load) for piece in bucket)
        for bucket in _packed(bundles, limit_bytes)
    )
    plan = Plan(engines, len(source.placements), len(target.placements), limit_bytes, buckets, "")
    return replace(plan, digest=_digest(plan))


def _split(piece: Piece, limit_bytes: int) -> Iterable[Piece]:
    """Return a piece that does not fit into a bucket in parts that do, cut along its longest axis."""
    if piece.nbytes <= limit_bytes:
        return [piece]
    axis = max(range(len(piece.shape)), key=lambda k: piece.shape[k], default=None)
    if axis is None or piece.shape[axis] == 1:
        raise PlanError(
            f"{piece}: one element is larger than {limit_bytes} bytes", tensor=piece.name
        )
    half = piece.shape[axis] // 2
    halves: list[Piece] = []
    for first, side in ((0, half), (half, piece.shape[axis] - half)):
        start, shape = list(piece.start), list(piece.shape)
        start[axis] += first
        shape[axis] = side
        nbytes = piece.nbytes // piece.shape[axis] * side
        part = replace(piece, start=tuple(start), shape=tuple(shape), nbytes=nbytes)
        halves.extend(_split(part, limit_bytes))
    return halves


def _bundled(pieces: Iterable[Piece]) -> list[list[Piece]]:
    """Return pieces that must not be parted, together; every other piece alone."""
    patterns = [re.compile(pattern) for pattern in BUNDLES]
    bundles: dict[object, list[Piece]] = {}
    for piece in pieces:
        matches = (pattern.match(piece.name) for pattern in patterns)
        key = next((m.group() for m in matches if m), None)
        bundles.setdefault(key or (piece.name, piece.start), []).append(piece)
    return list(bundles.values())


def _in_turn(bundles: Sequence[list[Piece]]) -> list[list[Piece]]:
    """Return the bundles such that those of different source ranks alternate."""
    turn: dict[int, int] = {}
    keyed = []
    for number, bundle in enumerate(bundles):
        owner = bundle[0].sources[0]
        turn[owner] = turn.get(owner, -1) + 1
        keyed.append((turn[owner], number))
    return [bundles[number] for _, number in sorted(keyed)]


def _packed(bundles: Iterable[list[Piece]], limit_bytes: int) -> Iterator[list[Piece]]:
    """Yield buckets in which no rank stages more than the limit; a bundle goes where it first fits."""
    open_buckets: list[tuple[list[Piece], Counter[int]]] = []
    for bundle in bundles:
        added = _staged(bundle)
        if max(added.values()) > limit_bytes:
            raise PlanError(
                f"{bundle[0].name}: its bundle of {len(bundle)} pieces needs "
                f"{max(added.values())} bytes on one rank, the bucket limit is {limit_bytes}"
            )
        fits = (
            (bucket, staged)
            for bucket, staged in open_buckets
            if all(staged[key] + n <= limit_bytes for key, n in added.items())
        )
        first = next(fits, None)
        if first is None:
            first = ([], Counter())
            open_buckets.append(first)
        first[0].extend(bundle)
        first[1].update(added)
        if len(open_buckets) > _OPEN:
            yield open_buckets.pop(0)[0]
    for bucket, _ in open_buckets:
        yield bucket


def _staged(bundle: Iterable[Piece]) -> Counter[int]:
    """Return what a bundle makes each rank stage: source ranks as they are, target ranks as ~rank."""
    staged: Counter[int] = Counter()
    for piece in bundle:
        # Which holder will send is not known yet, so that each is counted.
        for rank in piece.sources:
            staged[rank] += piece.nbytes
        for rank in piece.targets:
            staged[~rank] += piece.nbytes
    return staged


def _transfer(piece: Piece, engines: int, load: dict[int, int]) -> Transfer:
    """Choose who sends: holders in turn, the least loaded first; adds to their load."""
    order = sorted(dict.fromkeys(piece.sources), key=lambda rank: (load[rank], rank))
    count = engines * len(piece.targets)
    turns, more = divmod(count, len(order))
    for place, rank in enumerate(order):
        load[rank] += (turns + (place < more)) * piece.nbytes
    return Transfer(piece, tuple(order * turns + order[:more]))


def _digest(plan: Plan) -> str:
    digest = sha256(
        repr((plan.engines, plan.source_ranks, plan.engine_ranks, plan.limit_bytes)).encode()
    )
    for number, bucket in enumerate(plan.buckets):
        for transfer in bucket:
            piece = transfer.piece
            entry = (number, piece.name, piece.start, piece.shape, piece.nbytes, piece.targets)
            digest.update(repr(entry).encode())
            digest.update(np.array(transfer.senders, dtype="<i4").tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """What a plan costs.

    Attributes:
        links: (source ranks, engines x engine ranks) bytes over each link.
        moved_bytes: bytes over all links; repeated_bytes: of these, sent by a rank that had already sent
            the same ones to somebody else.
        staged_bytes: the most that any rank stages in one bucket, if each holder sends.
    """

    links: NDArray[np.int64]
    moved_bytes: int
    repeated_bytes: int
    staged_bytes: int

    @property
    def sent_bytes(self) -> NDArray[np.int64]:
        """Bytes that each source rank sends."""
        return np.asarray(self.links.sum(axis=1))

    @property
    def received_bytes(self) -> NDArray[np.int64]:
        """Bytes that each engine rank receives."""
        return np.asarray(self.links.sum(axis=0))


def load_of(plan: Plan) -> Load:
    """Return what a plan costs, by link."""
    links = np.zeros((plan.source_ranks, plan.engines * plan.engine_ranks), np.int64)
    firsts = np.arange(plan.engines, dtype=np.int64)[:, None] * plan.engine_ranks
    repeated = most = 0
    for bucket in plan.buckets:
        staged: Counter[int] = Counter()
        for transfer in bucket:
            piece = transfer.piece
            to = (firsts + np.array(piece.targets, dtype=np.int64)).ravel()
            np.add.at(links, (np.array(transfer.senders), to), piece.nbytes)
            senders = set(transfer.senders)
            repeated += (len(transfer.senders) - len(senders)) * piece.nbytes
            staged.update(_staged([replace(piece, sources=tuple(senders))]))
        most = max(most, *staged.values())
    return Load(links, int(links.sum()), repeated, most)
