"""A plan followed: what a source rank sends in a bucket, and where a target rank puts it.

A message is the pieces that one rank sends another in one bucket, in the bucket's order, each row-major in
its box. Neither side holds more than its own shard and one message per peer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from syncline.abc import Channel
from syncline.errors import PlanError
from syncline.layouts import Layout, Placement
from syncline.layouts.blocks import Block, Run, overlap, part, run_of
from syncline.layouts.dense import Shard, local_view
from syncline.layouts.grids import refine
from syncline.layouts.values import to_canonical, to_local
from syncline.plan.pieces import Piece
from syncline.plan.planner import Plan, Transfer
from syncline.types import TensorMeta, unsigned

_Key = TypeVar("_Key")
Peer = tuple[int, int]
"""A target rank: engine, and rank in the engine."""


class Mover:
    """One rank's side of a plan: finds pieces in its memory by name and box.

    Args:
        layout: the layout that the rank belongs to; `placement`: what it holds.
        shard: its flat bits by local name; a receiving rank's are written.
    """

    def __init__(self, layout: Layout, placement: Placement, shard: Shard) -> None:
        self._catalog = layout.catalog
        self._shard = shard
        self._blocks: dict[str, list[Block]] = {}
        for block in placement.blocks:
            self._blocks.setdefault(block.name, []).append(block)

    def read(self, pieces: Sequence[Piece]) -> bytes:
        """Return the message with these pieces.

        Raises:
            PlanError: the rank does not hold one of them.
        """
        parts = []
        for piece in pieces:
            run, meta = next(self.find(piece))
            value = to_canonical(self._view(run, meta), run.block, meta)
            parts.append(value.tobytes())
        return b"".join(parts)

    def write(self, pieces: Sequence[Piece], message: bytes) -> None:
        """Put the pieces of a message into the rank's memory, everywhere it holds them.

        Raises:
            PlanError: the message has another length than the pieces, or the rank does not hold one; the
                memory may then hold some of the others.
        """
        if len(message) != sum(piece.nbytes for piece in pieces):
            raise PlanError(
                f"a message of {len(pieces)} pieces has {sum(piece.nbytes for piece in pieces)} bytes, "
                f"received {len(message)}"
            )
        place = 0
        for piece in pieces:
            raw = message[place : place + piece.nbytes]
            for run, meta in self.find(piece):
                view = self._view(run, meta)
                bits = np.frombuffer(raw, unsigned(meta.unit_bytes)).reshape(view.shape)
                view[...] = to_local(bits, run.block, meta)
            place += piece.nbytes

    def find(self, piece: Piece) -> Iterator[tuple[Run, TensorMeta]]:
        """Yield the parts of the rank's blocks that hold a piece; at least one.

        Raises:
            PlanError: the rank does not hold it.
        """
        box = (piece.start, piece.shape)
        found = False
        for whole in self._blocks.get(piece.name, ()):
            tensor = self._catalog[piece.name]
            for block in refine(whole, tensor.grid, piece.grid):
                if overlap(box, block.box) == box:
                    found = True
                    yield run_of(part(block, box), piece.grid), tensor.meta
        if not found:
            raise PlanError(f"{piece}: this rank does not hold it", tensor=piece.name)

    def _view(self, run: Run, meta: TensorMeta) -> NDArray[Any]:
        return local_view(run, meta, self._shard[run.block.local])


def outgoing(bucket: Sequence[Transfer], rank: int) -> dict[Peer, list[Piece]]:
    """Return what a source rank sends in a bucket, by target."""
    found: dict[Peer, list[Piece]] = {}
    for source, target, piece in _links(bucket):
        if source == rank:
            found.setdefault(target, []).append(piece)
    return found


def incoming(bucket: Sequence[Transfer], peer: Peer) -> dict[int, list[Piece]]:
    """Return what a target rank receives in a bucket, by source rank."""
    found: dict[int, list[Piece]] = {}
    for source, target, piece in _links(bucket):
        if target == peer:
            found.setdefault(source, []).append(piece)
    return found


def _links(bucket: Sequence[Transfer]) -> Iterator[tuple[int, Peer, Piece]]:
    """Yield source rank, target and piece of everything that moves in a bucket, each once."""
    for transfer in bucket:
        targets = transfer.piece.targets
        for place, source in enumerate(transfer.senders):
            engine, which = divmod(place, len(targets))
            yield source, (engine, targets[which]), transfer.piece


def send(
    plan: Plan, rank: int, mover: Mover, channels: Mapping[Peer, Channel], timeout_s: float
) -> None:
    """Do a source rank's part of a plan: agree with every target, then send, bucket by bucket.

    Args:
        channels: to every target rank that the plan lets this rank send to; others are not used.
        timeout_s: the longest wait for a target's digest.

    Raises:
        PlanError: no channel to a target, or the rank does not hold what the plan says.
        PlanDisagreementError: a target made another plan; this rank has sent no weight to anybody.
        TransportError: a channel failed.

    Memory: one message. Collective: every rank of both sides takes part.
    """
    messages = [outgoing(bucket, rank) for bucket in plan.buckets]
    _agree(plan, _channels(messages, channels, f"source rank {rank}"), timeout_s)
    for bucket in messages:
        for peer, pieces in bucket.items():
            channels[peer].send(mover.read(pieces))


def receive(
    plan: Plan, peer: Peer, mover: Mover, channels: Mapping[int, Channel], timeout_s: float
) -> None:
    """Do a target rank's part of a plan: agree with every source, then receive, bucket by bucket.

    Args:
        channels: from every source rank that the plan lets send to this one; others are not used.
        timeout_s: the longest wait for one message.
    Raises: as `send`. After an error other than the first two the rank's memory may hold a mix.
    """
    messages = [incoming(bucket, peer) for bucket in plan.buckets]
    _agree(plan, _channels(messages, channels, f"target rank {peer}"), timeout_s)
    for bucket in messages:
        for rank, pieces in bucket.items():
            mover.write(pieces, channels[rank].receive(timeout_s))


def _channels(
    messages: Sequence[Mapping[_Key, object]], channels: Mapping[_Key, Channel], who: str
) -> list[Channel]:
    """Return the channels that the messages need, each once."""
    needed = list(dict.fromkeys(key for bucket in messages for key in bucket))
    missing = [key for key in needed if key not in channels]
    if missing:
        raise PlanError(f"{who} has no channel to or from {missing}, which its plan needs")
    return [channels[key] for key in needed]


def _agree(plan: Plan, channels: Sequence[Channel], timeout_s: float) -> None:
    """Exchange digests on every channel; both sides find out before either moves a weight."""
    for channel in channels:
        channel.send(plan.digest.encode())
    for channel in channels:
        plan.agree(channel.receive(timeout_s).decode("ascii", "replace"))


def execute(plan: Plan, sources: Mapping[int, Mover], targets: Mapping[Peer, Mover]) -> None:
    """Follow a whole plan inside one process.

    Raises:
        PlanError: a mover is missing, or does not hold what the plan says.
    """
    for bucket in plan.buckets:
        for rank, mover in sources.items():
            for peer, pieces in outgoing(bucket, rank).items():
                if peer not in targets:
                    raise PlanError(
                        f"the plan sends to rank {peer[1]} of engine {peer[0]}; no mover"
                    )
                targets[peer].write(pieces, mover.read(pieces))
