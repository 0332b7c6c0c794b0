"""One rank's live path: what it needs to deliver the versions of a sharded publisher."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from syncline.abc import Observe, Outlet
from syncline.errors import ConfigError
from syncline.layouts import Layout
from syncline.sync.live import Courier
from syncline.sync.options import PublisherOptions
from syncline.sync.phases import Phases
from syncline.sync.reports import Delivery
from syncline.sync.sharded.convoy import Following, Leading
from syncline.sync.sharded.gathering import Gathering
from syncline.sync.sharded.lane import Lane
from syncline.sync.sharded.leader import Leader
from syncline.sync.sharded.ranks import Ranks
from syncline.sync.sharded.shard import Shard
from syncline.sync.sharded.shares import Shares


class Road:
    """A rank's outlet, and its part in deliveries over it.

    Raises:
        ConfigError: the transport cannot carry what is asked for, or time limits contradict each other.
    """

    def __init__(
        self,
        outlet: Outlet,
        layout: Layout,
        shares: Shares,
        ranks: Ranks,
        shard: Shard,
        options: PublisherOptions,
        observe: Observe,
    ) -> None:
        if options.live_timeout_s > ranks.timeout_s:
            raise ConfigError(
                f"live_timeout_s: expected at most the ranks' timeout_s, {ranks.timeout_s}, found "
                f"{options.live_timeout_s}: a rank may wait so long for an engine"
            )
        self.address = outlet.address
        self._courier = Courier(
            outlet,
            kind=options.live_kind,
            bucket_bytes=options.bucket_bytes,
            timeout_s=options.live_timeout_s,
            observe=observe,
        )
        self._lane = Lane(
            shares.owners, ranks, outlet, Gathering(layout, shares, shard), shard.dense
        )
        self._metas = [layout.catalog[name].meta for name in sorted(layout.catalog)]
        self._owners = shares.owners
        self._ranks = ranks
        self._following = Following(self._lane, ranks, outlet, observe)
        self._leading: Leading | None = None

    @property
    def takes_deltas(self) -> bool:
        """Whether payloads may travel, so that they should be kept."""
        return self._courier.takes_deltas

    def deliver(
        self,
        leader: Leader | None,
        payloads: Callable[[], Mapping[str, memoryview]],
        phases: Phases,
        model_bytes: int,
    ) -> Delivery:
        """Bring the engines to the version that was just committed; see `Courier.deliver`.

        Args:
            leader: on rank 0; None on the others.
            payloads: gives what this rank encoded of it, if it is a delta; asked when there is somebody to
                send it to, and where it fails, all are told.

        Raises:
            PeerLostError, TransportTimeoutError: (not on rank 0) the leader is gone, or failed.
            StoreError: (rank 0) the manifest cannot be read back.

        Collective: yes, over the ranks.
        """
        self._lane.payloads = payloads
        try:
            if leader is None:
                return self._following.follow(phases, model_bytes)
            return self._lead(leader, phases)
        finally:
            self._lane.payloads = dict

    def _lead(self, leader: Leader, phases: Phases) -> Delivery:
        if self._leading is None:
            self._leading = Leading(
                self._lane, self._ranks, leader.lanes, self._metas, self._owners
            )
        self._leading.payloads = leader.payloads
        try:
            delivery = self._courier.deliver(leader.goods(self._leading), phases)
        except BaseException as error:
            self._leading.over(None, error)
            raise
        self._leading.over(delivery)
        return delivery
