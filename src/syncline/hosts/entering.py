"""An engine that joins a running fleet takes the way that the table gives: from peers, or from the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from syncline.abc import Engine, PeerMemory, Store
from syncline.choice import Decision, Links, Topology
from syncline.hosts.joining import join
from syncline.sync import Receiver
from syncline.sync.accounting import Moved
from syncline.sync.choosing import assumed_density, choose, store_density


@dataclass(frozen=True, slots=True)
class EnterReport:
    """How an engine came into the fleet.

    Attributes:
        version: the engine's, now.
        decision: what was chosen, and why.
        moved: bytes and seconds by phase.
    """

    version: int
    decision: Decision
    moved: Moved | None


def enter(
    engine: Engine,
    store: Store | None,
    offers: Sequence[bytes],
    memories: Sequence[PeerMemory],
    *,
    timeout_s: float,
    joining: int = 1,
    links: Links | None = None,
) -> EnterReport:
    """Bring an engine to the fleet's version by the way that is chosen; nothing is written into the store.

    Args:
        store: the run's; None if this engine has none.
        offers: of those who hold the version, none if nobody does; memories: this side's transports, as for `join`.
        joining: engines that join at about the same time.
        links: measured or given; else assumed, and then peers are preferred.

    Raises:
        ConfigError: there is neither an offer nor a store.
        Else as `join` or `Receiver.sync`; the engine is then as it was.
    """
    topology = Topology(joining=joining, holders=len(offers), store=store is not None)
    density = assumed_density() if store is None else store_density(store)
    decision = choose(topology, density=density, links=links)
    if decision.transport == "peers" or store is None:
        joined = join(engine, offers, memories, timeout_s=timeout_s)
        return EnterReport(joined.version, decision, joined.moved)
    pulled = Receiver(store, engine).sync()
    return EnterReport(pulled.version, decision, pulled.moved)
