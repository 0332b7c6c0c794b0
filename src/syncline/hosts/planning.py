"""The plan of an update as server and workers make it, each for itself, from the same offers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod

from syncline.hosts.offer import Way, shared_with
from syncline.hosts.sources import Sources, flat_plan
from syncline.layouts import Layout
from syncline.plan import Assignment, Node, Plan, assign, make_plan


@dataclass(frozen=True, slots=True)
class Fleet:
    """The engines that a parameter server feeds.

    Attributes:
        engines: how many, all alike.
        layout: what the ranks of one engine hold; None: every engine has one rank with the whole model, under
            its canonical names.
        unused: canonical tensors that no rank wants.
    """

    engines: int = 1
    layout: Layout | None = None
    unused: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """Ranks of one engine."""
        return 1 if self.layout is None else len(self.layout.placements)

    def wanted_bytes(self, rank: int, sources: Sources) -> int:
        """Return how many bytes a rank gets."""
        if self.layout is None:
            return sources.held.manifest.model_bytes
        catalog = self.layout.catalog
        return sum(
            prod(block.shape) * catalog[block.name].meta.unit_bytes
            for block in self.layout.placements[rank].blocks
        )


@dataclass(frozen=True, slots=True)
class Receiver:
    """A worker that takes part: its name, its number (`engine * ranks + rank`), and whom it shares memory with."""

    name: str
    number: int
    machine: str


def plan_update(
    fleet: Fleet,
    sources: Sources,
    receivers: Sequence[Receiver],
    limit_bytes: int,
    *,
    relays: bool,
) -> tuple[Plan, Assignment]:
    """Return what moves in which bucket, and who reads it from whom. Deterministic."""
    if fleet.layout is None:
        plan = flat_plan(sources, fleet.engines, limit_bytes)
    else:
        plan = make_plan(
            sources.layout(),
            fleet.layout,
            engines=fleet.engines,
            limit_bytes=limit_bytes,
            unused=fleet.unused,
        )
    by_number = {receiver.number: receiver for receiver in receivers}
    nodes = [
        Node(by_number[n].name, by_number[n].machine) if n in by_number else Node("")
        for n in range(fleet.engines * fleet.ranks)
    ]
    only: Collection[int] = by_number.keys()
    return plan, assign(plan, host_nodes(sources), nodes, relays=relays, only=only)


def host_nodes(sources: Sources) -> list[Node]:
    """Return the hosts with as many NICs as they describe."""
    return [
        Node(
            source.offer.host,
            shared_with(source.offer.ways, source.offer.machine),
            tuple(f"nic{number}" for number in range(_nics(source.offer.ways))),
        )
        for source in sources.hosts
    ]


def _nics(ways: Sequence[Way]) -> int:
    """Return how many descriptions a host gives of the transport of which it gives most."""
    return max([1, *(sum(way.kind == kind for way in ways) for kind in {w.kind for w in ways})])
