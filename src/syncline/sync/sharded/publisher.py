"""Publish from every rank of a trainer: each writes its own part of one version, the leader commits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache, partial
from os import PathLike
from typing import Any

from syncline.abc import Observe, Outlet, Store, ignore
from syncline.errors import ConfigError, OutcomeUnknownError, SynclineError, TransportError
from syncline.format import names
from syncline.layouts import Layout
from syncline.sources import CheckpointSource
from syncline.sync.accounting import Moved
from syncline.sync.checks import check_kind
from syncline.sync.detect import dense_windows
from syncline.sync.history import History
from syncline.sync.kept import Kept
from syncline.sync.metered import MeteredStore
from syncline.sync.options import PublisherOptions, named
from syncline.sync.ownership import check_owned
from syncline.sync.phases import Phases
from syncline.sync.reports import PublishReport
from syncline.sync.sharded.answers import Answer, Start, proof_message
from syncline.sync.sharded.changes import RankChanges, check_sum, pack, unpack
from syncline.sync.sharded.leader import Leader
from syncline.sync.sharded.part import SPARSE_ENCODINGS, Drift, PartWriter, Result, WindowsOf
from syncline.sync.sharded.ranks import Ranks
from syncline.sync.sharded.road import Road
from syncline.sync.sharded.rounds import Rounds
from syncline.sync.sharded.shard import Shard
from syncline.sync.sharded.shares import Copy, shares
from syncline.sync.writer import VersionWriter
from syncline.types import ZERO
from syncline.version import TensorEntry

LocalWeights = Mapping[str, Any] | Iterable[tuple[str, Any]]


class ShardedPublisher:
    """One rank's part in the publisher of a run; every rank of the trainer makes one, with the same arguments.

    A version is the same in canonical terms as one that a single process publishes. Nothing is
    gathered: a rank compares its own shards, and sends what changed in a tensor to the one rank that encodes
    that tensor. Rank 0 commits when all parts are in the store.

    Args:
        store: as for `Publisher`; every rank opens the same one.
        layout: where the canonical tensors lie on the ranks.
        ranks: how this rank talks to the others.
        base: checkpoint that the engines have loaded, which every rank can read. In an empty store it
            becomes version 1; else it must hold the current version (`syncline pull` brings it there).
            None: only in an empty store; the first `publish` makes version 1 from the shards.
        observe: told of this rank's steps.
        live: a live path to engines that are there: every rank has an outlet of one kind, with an address of
            its own. Engines join rank 0's alone, and find the others. Every version that `publish` commits goes
            straight to them; see `PublishReport.delivery`.
        options: the fields of `PublisherOptions`. `encoding` is `auto`, `packed` or `indices`. A rank writes
            one part and compares in host memory: `part_bytes` and `device_copy` are not used.

    Raises:
        BaseVersionError: base is not the store's current version.
        LayoutError: base and layout are not of one model.
        CoverageError: the layout does not name every element as it should.
        VersionConflictError, TransportError: as `publish`.

    Collective: yes. Cost: one copy of the rank's own shards in host memory (see `snapshot_dir`), one pass over
    it to prove that base, layout and version agree.
    """

    def __init__(
        self,
        store: Store,
        layout: Layout,
        ranks: Ranks,
        *,
        base: str | PathLike[str] | None = None,
        observe: Observe | None = None,
        live: Outlet | None = None,
        **options: Any,
    ) -> None:
        check_kind("store", store, Store)
        if "transport" in options or "topology" in options:
            raise ConfigError(
                "transport: a sharded publisher opens no live path by itself, since each rank needs an address by "
                "which engines reach it; ask syncline.choose(topology, store), and give every rank an outlet as `live`"
            )
        self.options = named(options)
        _check_options(self.options)
        if ranks.size != len(layout.placements):
            raise ConfigError(
                f"ranks: {ranks.size} ranks publish, the layout has {len(layout.placements)}"
            )
        self._store = MeteredStore(store)
        self._layout = layout
        self._ranks = ranks
        self._observe = observe if observe is not None else ignore
        self._shares = shares(layout, ranks.rank)
        placement = next(p for p in layout.placements if p.rank == ranks.rank)
        self._shard = Shard(layout.catalog, placement, self._shares, self.options.snapshot_dir)
        self._entries: dict[str, TensorEntry] = {}
        self._leader: Leader | None = None
        self._leftover: str | None = None
        self._is_broken = False
        self._kept: Kept | None = None
        self._live = None if live is None else self._road(live)
        self._start = self._begin(base)

    @property
    def version(self) -> int | None:
        """Number of the last committed version; None before the first."""
        return self._start.version

    def publish(self, weights: LocalWeights, *, full: bool = False) -> PublishReport:
        """Commit all ranks' weights as the next version.

        Args:
            weights: this rank's tensors by the layout's local names: torch or numpy, a DTensor counts as its
                local part. Only read.
            full: write a full version also where a delta would do.

        Returns:
            the same report on every rank; `seconds` and `moved` are this rank's.

        Raises:
            LayoutError: a tensor is unknown, missing, repeated, or of another dtype or shape.
            VerifyError: copies of one thing differ between ranks; names ranks and elements.
            TransportTimeoutError, PeerLostError: a rank is missing; names it.
            VersionConflictError, StoreError: as `Publisher.publish`.
            OutcomeUnknownError: the leader is gone; make new publishers on all ranks.
        After any of them but the last, on every rank, the store's current version is the one before, and
        the next `publish` begins from it. On a live path there is one more: where the leader is lost, or
        fails, after it has committed, the others raise PeerLostError or TransportTimeoutError that says so.

        An engine on the live path that does not take the version, or a rank that is lost while it is sent,
        fails nothing: see `PublishReport.delivery`.

        Collective: yes. Cost: reads this rank's shards and the copy of them once; sends 8 bytes for every
        changed BF16 element that another rank encodes.
        """
        if self._is_broken:
            raise OutcomeUnknownError(
                "this publisher does not know what the store holds; make new ones on all ranks"
            )
        phases = Phases()
        before_bytes = self._store.wire_bytes
        if self._start.version is None:
            answer = self._step(lambda: self._first(weights, phases), phases)
        elif full:
            answer = self._step(lambda: self._whole(weights, phases), phases)
        else:
            answer = self._step(lambda: self._delta(weights, phases), phases)
        report = answer.require_report()
        wire_bytes = self._store.wire_bytes - before_bytes
        moved = Moved.of("store", report.kind, 1, wire_bytes, report.full_bytes, phases.seconds())
        report = self._delivered(replace(report, moved=moved), phases)
        if answer.is_anchor_due:
            anchor = self._step(lambda: self._from_shards(phases), phases)
            version = self._delivered(anchor.require_report(), phases).version
            report = replace(report, anchor=version)
        return replace(report, seconds=phases.seconds())

    def _road(self, live: Outlet) -> Road:
        check_kind("live", live, Outlet)
        return Road(
            live, self._layout, self._shares, self._ranks, self._shard, self.options, self._observe
        )

    def _delivered(self, report: PublishReport, phases: Phases) -> PublishReport:
        """Send the version that was just committed to the engines on the live path."""
        kept, self._kept = self._kept, None
        if self._live is None:
            return report

        @cache
        def payloads() -> Mapping[str, memoryview]:
            return {} if kept is None else kept.part(self._part_writer().path)

        try:
            delivery = self._live.deliver(self._leader, payloads, phases, report.full_bytes)
        except TransportError:
            self._is_broken = not self._ranks.is_leader
            raise
        finally:
            if kept is not None:
                kept.close()
        return replace(report, delivery=delivery)

    def _begin(self, base: str | PathLike[str] | None) -> Start:
        """Agree on the layout, take the store over, fill the copies, and prove that they are the version's."""
        source = None if base is None else CheckpointSource(base)

        def prove() -> bytes:
            if source is not None:
                self._shard.seed(source)
            proof = None if source is None else self._shard.proof()
            address = None if self._live is None else self._live.address
            return proof_message(self._shares.digest, proof, address)

        def decide(results: list[bytes]) -> bytes:
            files = None if source is None else source.files()
            self._leader = Leader(self._store, self._layout, self.options, self._observe)
            return self._leader.start(results, files)

        start = Start.load(self._ranks.together(prove, decide))
        if start.version is not None and start.sha256 is not None:
            table = History.open(self._store).load(start.version, start.sha256).manifest.tensors
            self._hold(table)
        elif source is not None:
            self._start = start
            self._step(lambda: self._from_base(source, Phases()), Phases())
            return self._start
        return start

    def _step(self, write: Callable[[], Result], phases: Phases) -> Answer:
        """Let every rank write its part and the leader commit; put everything back if that fails."""
        own: list[Result] = []

        def local() -> bytes:
            own.append(write())
            return own[0].dump()

        def decide(results: list[bytes]) -> bytes:
            return self._require_leader().commit(results, phases)

        def on_failure() -> None:
            if self._leader is not None:
                self._leader.clean()

        waiting = {*self._shares.targets, *self._shares.writers, *self._shares.sources}
        try:
            raw = self._ranks.together(local, decide, waiting=waiting, on_failure=on_failure)
            answer = Answer.load(raw)
            if answer.drift is not None:
                self._explain(answer.drift)
        except BaseException as error:
            known = isinstance(error, Exception) and not isinstance(error, OutcomeUnknownError)
            self._is_broken = not known
            if known:
                self._put_back()
            raise
        self._shard.keep()
        self._hold(own[0].tensors)
        self._leftover = None
        self._start = replace(self._start, version=answer.require_report().version)
        return answer

    def _delta(self, weights: LocalWeights, phases: Phases) -> Result:
        told = self._exchange(self._detect(weights, phases), phases)
        if not self._owns_something:
            return Result()
        if self._live is not None and self._live.takes_deltas:
            self._kept = Kept()
        result = self._part_writer().delta(told, self._writer(phases), phases)
        if self._kept is None or result.part is None:
            return result
        found = self._kept.part(result.part.path)
        return replace(result, payloads={name: raw.nbytes for name, raw in found.items()})

    def _first(self, weights: LocalWeights, phases: Phases) -> Result:
        with phases("read"):
            self._shard.load(_pairs(weights))
            copies = self._shard.copies()
        return self._compared(copies, phases)

    def _whole(self, weights: LocalWeights, phases: Phases) -> Result:
        found = self._detect(weights, phases)
        return self._compared(RankChanges(copies=found.copies), phases)

    def _compared(self, found: RankChanges, phases: Phases) -> Result:
        """Write a full version from the shards, and say which copies of what is in it differ."""
        told = self._exchange(found, phases)
        drifted = tuple(self._part_writer().drifts(told)) if self._owns_something else ()
        return replace(self._from_shards(phases), drifted=drifted)

    def _from_shards(self, phases: Phases) -> Result:
        rounds = Rounds(self._layout, self._shares, self._ranks, self._shard)
        result = self._full(rounds.windows, phases)
        rounds.finish()
        return self._proved(result, phases)

    def _from_base(self, source: CheckpointSource, phases: Phases) -> Result:
        result = self._full(lambda meta: dense_windows(source.bits(meta.name)), phases)
        return self._proved(result, phases)

    def _proved(self, result: Result, phases: Phases) -> Result:
        """Check that what was written of each tensor is what the ranks hold of it together."""
        with phases("verify"):
            proof = RankChanges(differences=self._shard.proof())
        told = self._exchange(proof, phases)
        for entry in result.tensors:
            check_sum(entry, told)
        return result

    def _full(self, windows_of: WindowsOf, phases: Phases) -> Result:
        if not self._owns_something:
            return Result()
        return self._part_writer().full(windows_of, self._writer(phases), phases)

    def _detect(self, weights: LocalWeights, phases: Phases) -> RankChanges:
        return self._shard.detect(_pairs(weights), phases)

    def _exchange(self, found: RankChanges, phases: Phases) -> dict[int, RankChanges]:
        """Send every owner what this rank found in its tensors; return what ranks found in this one's."""
        catalog, owners = self._layout.catalog, self._shares.owners
        owned: dict[int, list[str]] = {target: [] for target in self._shares.targets}
        for name in {*found.differences, *(copy[0] for copy in found.copies)}:
            owned[owners[name]].append(name)
        told: dict[int, RankChanges] = {}
        with phases("exchange"):
            for target, its in owned.items():
                self._ranks.send(target, pack(found, its, catalog))
            for source in self._shares.sources:
                message = self._ranks.receive(source, "its changes")
                told[source] = unpack(message, catalog, f"changes of rank {source}")
        return told

    def _explain(self, drift: Drift) -> None:
        """Tell the leader what two drifted copies hold, so that all ranks can name the elements."""
        for copy in drift.copies:
            self._ranks.together(partial(self._copy, copy), partial(self._judge, drift))

    def _copy(self, copy: Copy) -> bytes:
        found = self._shard.copy_changes(copy)
        if found is None:
            return b""
        changes = RankChanges({copy[0]: [found]}, {copy[0]: ZERO})
        return pack(changes, [copy[0]], self._layout.catalog)

    def _judge(self, drift: Drift, results: list[bytes]) -> bytes:
        self._require_leader().judge(drift, results)
        return b""

    def _require_leader(self) -> Leader:
        if self._leader is None:
            raise ConfigError("only rank 0 commits")
        return self._leader

    def _put_back(self) -> None:
        self._shard.undo()
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.close()
        try:
            self._remove_leftover()
        except SynclineError:
            return  # tried again before the next part is put; nobody reads it meanwhile

    def _remove_leftover(self) -> None:
        if self._leftover is not None:
            self._check_owned()  # a later publisher may be writing the same part by now
            self._store.delete(self._leftover)
            self._leftover = None

    def _check_owned(self) -> None:
        check_owned(self._store, self._start.run_id, self._start.epoch)

    @property
    def _owns_something(self) -> bool:
        return self._ranks.rank in self._shares.writers

    def _part_writer(self) -> PartWriter:
        return PartWriter(
            self._layout.catalog,
            self._shares,
            self._ranks.rank,
            self._entries,
            self._shard,
            self.options,
        )

    def _writer(self, phases: Phases) -> VersionWriter:
        version = self._start.next_version
        self._remove_leftover()
        self._leftover = names.key(version, self._part_writer().path)
        return VersionWriter(
            self._store,
            version,
            phases,
            self._observe,
            self._check_owned,
            self._kept,
        )

    def _hold(self, table: Iterable[TensorEntry]) -> None:
        for entry in table:
            if self._shares.owners[entry.meta.name] == self._ranks.rank:
                self._entries[entry.meta.name] = entry


def _check_options(options: PublisherOptions) -> None:
    if options.encoding not in ("auto", *SPARSE_ENCODINGS):
        raise ConfigError(
            f"encoding: expected 'auto' or one of {SPARSE_ENCODINGS}, found {options.encoding!r}: others need "
            "whole tensors, which no rank has"
        )
    for name in ("link_bytes_per_s", "notify"):
        if getattr(options, name):
            raise ConfigError(
                f"{name}: not used by a sharded publish; leave it out "
                "(docs/how-to/publish-from-every-rank.md)"
            )


def _pairs(weights: LocalWeights) -> Iterable[tuple[str, Any]]:
    return weights.items() if isinstance(weights, Mapping) else weights
