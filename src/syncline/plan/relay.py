"""Who reads which piece from whom: hosts serve each piece once, and receivers pass it on.

Pure: from a plan and the names of machines and NICs to a frozen value that every side computes alike. A piece that
several receivers want is read from a host by one of them, its first; the others take it from the sender with
least to send, be that a host or the first. So a host sends a model about once however many receivers there are,
no piece goes through more than one receiver, and a receiver sends no more than it receives.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

from syncline.errors import ConfigError
from syncline.plan.pieces import Piece
from syncline.plan.planner import Plan


@dataclass(frozen=True, slots=True)
class Node:
    """A host or a receiver.

    Attributes:
        name: what messages call it.
        machine: equal for nodes that read each other's memory without a NIC; empty: shared with nobody.
        nics: its network interfaces, over which what it sends is spread.
    """

    name: str
    machine: str = ""
    nics: tuple[str, ...] = ("",)


@dataclass(frozen=True, slots=True)
class Fetch:
    """One piece that one receiver reads.

    Attributes:
        target: the receiver's number: `engine * engine_ranks + rank`.
        piece: index in its bucket.
        is_relay: the sender is a receiver, else a host.
        sender: number of that receiver or host; `nic`: which of its NICs.
    """

    target: int
    piece: int
    is_relay: bool
    sender: int
    nic: int


@dataclass(frozen=True, slots=True)
class Assignment:
    """All reads, by bucket, those from hosts that others wait for first; and a digest over them."""

    buckets: tuple[tuple[Fetch, ...], ...]
    digest: str


def assign(
    plan: Plan,
    hosts: Sequence[Node],
    targets: Sequence[Node],
    *,
    relays: bool = True,
    only: Collection[int] | None = None,
) -> Assignment:
    """Return who reads each piece of a plan from whom.

    Args:
        hosts: the plan's source ranks; `targets`: its target ranks, engine by engine.
        relays: receivers pass on what they have; without, every read is from a host.
        only: numbers of the receivers that take part; None: all.

    Raises:
        ConfigError: other numbers of hosts or targets than the plan has, or a node without NICs.

    Deterministic. Cost: O(pieces x receivers of a piece x senders of it).
    """
    wanted = plan.engines * plan.engine_ranks
    if len(hosts) != plan.source_ranks or len(targets) != wanted:
        raise ConfigError(
            f"the plan has {plan.source_ranks} hosts and {wanted} receivers, given {len(hosts)} and {len(targets)}"
        )
    if not all(node.nics for node in (*hosts, *targets)):
        raise ConfigError("a host or receiver has no NIC")
    spread = _Spread(hosts, targets)
    asked = range(wanted) if only is None else sorted(only)
    if not asked or asked[0] < 0 or asked[-1] >= wanted:
        raise ConfigError(f"only: expected some of the {wanted} receivers, found {list(asked)}")
    buckets = tuple(
        tuple(
            sorted(
                (
                    fetch
                    for index, transfer in enumerate(bucket)
                    for fetch in spread.fetches(
                        plan, index, transfer.piece, set(asked), relays=relays
                    )
                ),
                key=lambda fetch: (fetch.is_relay, fetch.target, fetch.piece),
            )
        )
        for bucket in plan.buckets
    )
    assignment = Assignment(buckets, "")
    return replace(assignment, digest=sha256(repr((plan.digest, buckets)).encode()).hexdigest())


def receivers(plan: Plan, piece: Piece) -> list[int]:
    """Return the numbers of the receivers that want a piece."""
    return [
        engine * plan.engine_ranks + rank
        for engine in range(plan.engines)
        for rank in piece.targets
    ]


class _Spread:
    """What every NIC has to send, and every receiver to read from hosts, so far."""

    def __init__(self, hosts: Sequence[Node], targets: Sequence[Node]) -> None:
        self._nodes = {False: hosts, True: targets}
        self._sent = {
            is_relay: [[0] * len(node.nics) for node in nodes]
            for is_relay, nodes in self._nodes.items()
        }
        self._firsts = [0] * len(targets)

    def fetches(
        self, plan: Plan, index: int, piece: Piece, asked: Container[int], *, relays: bool
    ) -> list[Fetch]:
        """Return the reads of one piece by everyone who wants it and takes part."""
        waiting = [target for target in receivers(plan, piece) if target in asked]
        if not waiting:
            return []
        hosts = [(False, host) for host in piece.sources]
        if not relays:
            return [self._fetch(index, piece, target, hosts) for target in waiting]
        first = min(waiting, key=lambda target: (self._firsts[target], target))
        self._firsts[first] += piece.nbytes
        found = [self._fetch(index, piece, first, hosts)]
        others = [target for target in waiting if target != first]
        found.extend(self._fetch(index, piece, t, [*hosts, (True, first)]) for t in others)
        return found

    def _fetch(
        self, index: int, piece: Piece, target: int, senders: Sequence[tuple[bool, int]]
    ) -> Fetch:
        here = self._nodes[True][target].machine

        def cost(choice: tuple[bool, int, int]) -> tuple[bool, int, tuple[bool, int, int]]:
            is_relay, sender, nic = choice
            near = bool(here) and self._nodes[is_relay][sender].machine == here
            return not near, self._sent[is_relay][sender][nic], choice

        choices = [
            (is_relay, sender, nic)
            for is_relay, sender in senders
            for nic in range(len(self._nodes[is_relay][sender].nics))
        ]
        *_, (is_relay, sender, nic) = min(map(cost, choices))
        self._sent[is_relay][sender][nic] += piece.nbytes
        return Fetch(target, index, is_relay, sender, nic)
