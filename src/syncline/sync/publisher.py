"""The trainer's side: publish what changed since the last version, exactly, or change nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Any, Literal

from syncline.abc import Observe, Outlet, Store, WeightSource, ignore
from syncline.choice import Decision, Topology, Updater
from syncline.errors import BaseVersionError, ConfigError
from syncline.sources import CheckpointSource, WatchedWeights, as_source
from syncline.sync.accounting import Moved
from syncline.sync.base import Base
from syncline.sync.checks import adopt, check_kind
from syncline.sync.delta import DeltaWriter
from syncline.sync.fetch import files_of, manifest_bytes
from syncline.sync.full import FullWriter
from syncline.sync.kept import Kept
from syncline.sync.layout import check_slime_run
from syncline.sync.live import Courier, Goods, Whole
from syncline.sync.meeting import Meeting, meet
from syncline.sync.metered import MeteredStore
from syncline.sync.notify import clients, notify
from syncline.sync.options import named
from syncline.sync.ownership import Ownership
from syncline.sync.phases import Phases
from syncline.sync.receiver import Receiver
from syncline.sync.reports import PublishReport
from syncline.sync.snapshot import Snapshot
from syncline.sync.watched import WatchedBase
from syncline.sync.writer import VersionWriter, model_fingerprint
from syncline.trace import Trace
from syncline.version import HeldVersion, Kind, Manifest, PartEntry, TensorEntry

_FIRST_DENSITY = 0.01
"""Share of the units that is expected to change before one step has shown it."""

Weights = WeightSource | Mapping[str, Any] | Iterable[tuple[str, Any]]


class Publisher:
    """Publishes the versions of one run into a store; the only one that may, as long as it lives.

    Taking a store over is a compare-and-swap that makes every later commit of an older publisher fail.
    A publish that fails changes nothing that a reader can see, and the next one starts from what the
    store then holds.

    Args:
        store: empty, or holding a run that this publisher carries on.
        base: checkpoint (directory or file) that the engines have loaded. In an empty store it becomes
            version 1; else it must hold the weights of some version of the run, and saves reading
            them back from the store.
        observe: told of every step, with bytes done, for progress bars; steps of parts that are put come
            from another thread.
        trace: collects what ran when; see `syncline.Trace`.
        live: a live path (`syncline.channels`) to engines that are there: every version that `publish`
            commits goes straight to them, too; see `PublishReport.delivery`.
        transport: in place of `live`: `auto` chooses how versions reach the engines of `topology` and opens
            it; or a transport's name, or a decision of `syncline.choose`. See `decision`, `wait` and `close`.
        options: the fields of `PublisherOptions`.

    Cost: one copy of the weights in host memory (see `snapshot_dir`), and where they are in GPU memory
    one more there with `device_copy`; none for weights from `watch`.

    Example:
        >>> import numpy as np, syncline
        >>> publisher = syncline.Publisher(syncline.MemoryStore())
        >>> weights = {"w": np.zeros(1000, np.float32)}
        >>> publisher.publish(weights).kind
        'full'
        >>> weights["w"][7] = 1.0
        >>> report = publisher.publish(weights)
        >>> report.kind, report.changed
        ('delta', 1)
    """

    def __init__(
        self,
        store: Store,
        *,
        base: str | PathLike[str] | None = None,
        observe: Observe | None = None,
        trace: Trace | None = None,
        live: Outlet | None = None,
        transport: Literal["auto"] | Updater | Decision | None = None,
        topology: Topology | None = None,
        **options: Any,
    ) -> None:
        check_kind("store", store, Store)
        self.options = named(options)
        self._live = None if live is None else self._courier(live, observe)
        self._told = clients(self.options.notify, self.options.notify_token_env)
        if self.options.layout == "slime":
            check_slime_run(store)
        self._store = MeteredStore(store)
        self._observe = observe if observe is not None else ignore
        self._trace = trace
        self._snapshot: Base | None = None
        self._files: Mapping[str, bytes] = {}
        self._owner = Ownership(self._store, self._observe)
        self._deltas = 0
        self._density = _FIRST_DENSITY
        self._kept: Kept | None = None
        self._meeting: Meeting | None = None
        if base is not None:
            self._start_from(CheckpointSource(base))
        if transport is not None:
            if live is not None:
                raise ConfigError("transport: expected it or `live`, not both")
            self._meeting = meet(transport, topology, self._store, self._owner.head, self.options)
            chosen = self._meeting.decision
            self.options = self.options.chosen(chosen.chosen.kind, chosen.link_bytes_per_s)
            if self._meeting.outlet is not None:
                self._live = self._courier(self._meeting.outlet, observe)

    @property
    def decision(self) -> Decision | None:
        """What was chosen, and why; None where nothing was to be chosen."""
        return None if self._meeting is None else self._meeting.decision

    def wait(self, timeout_s: float) -> None:
        """Return when all engines of the topology have joined; at once if they pull from the store.

        Raises:
            TransportTimeoutError: they have not; names those that have.
            ConfigError: nothing was chosen: wait on the outlet that was passed as `live`.
        """
        if self._meeting is None:
            raise ConfigError("wait: expected a transport; wait on the outlet of `live` itself")
        self._meeting.wait(timeout_s)

    def close(self) -> None:
        """Let the engines on a chosen live path go; harmless where there is none, or again."""
        if self._meeting is not None:
            self._live = None
            self._meeting.close()

    @property
    def _sends_full(self) -> bool:
        """Whether it was chosen that every version in the store is a full one."""
        decision = self.decision
        return (
            decision is not None
            and decision.transport == "store"
            and decision.chosen.kind == "full"
        )

    @property
    def version(self) -> int | None:
        """Number of the last committed version; None before the first."""
        return self._owner.head.version

    def publish(self, weights: Weights, *, full: bool = False) -> PublishReport:
        """Commit the weights as the next version; the first is full, the others are deltas.

        Args:
            weights: every tensor of the model under its Hugging Face name: a mapping or an iterable of
                pairs of torch tensors or numpy arrays, or a `WeightSource`. Only read.
            full: write a full version also where a delta would do.

        Raises:
            LayoutError: a tensor is unknown, missing, repeated, or of another dtype or shape.
            VersionConflictError: another publisher has taken the store over.
            StoreError: the store failed.
        After any error the store's current version is whole, and these weights are not committed
        (unless writing the anchor behind them failed: see `version`); publish them again.

        A deployment in `notify`, or an engine on the live path, that does not take the version fails nothing:
        see `PublishReport.notices` and `PublishReport.delivery`.

        Cost: reads the weights and the snapshot once. Collective: no.
        """
        phases = Phases(self._trace)
        before_bytes = self._store.wire_bytes
        source = as_source(weights)
        with phases("recover"):
            snapshot = self._recovered(source)
        # Until the commit the snapshot runs ahead of the store: after an error it is rebuilt from there.
        self._snapshot = None
        if not snapshot.tensors():
            with phases("read"):
                self._files = snapshot.fill(source)
            report = self._commit_full(snapshot, snapshot.table(), phases)
        elif full or self._sends_full:
            table = snapshot.refresh(source, phases)
            report = self._commit_full(snapshot, table, phases)
        else:
            report = self._commit_delta(snapshot, source, phases)
        sent_bytes = self._store.wire_bytes - before_bytes
        model_bytes, seconds = report.full_bytes, phases.seconds()
        moved = Moved.of("store", report.kind, 1, sent_bytes, model_bytes, seconds)
        report = self._delivered(replace(report, moved=moved), snapshot, phases)
        if self._is_anchor_due():
            anchor = self._commit_full(snapshot, snapshot.table(), phases)
            self._delivered(anchor, snapshot, phases)
            report = replace(report, anchor=anchor.version)
        self._snapshot = snapshot
        if self._told:
            with phases("notify"):
                current = snapshot.require_held().manifest
                notices = notify(
                    self._told,
                    current,
                    self.options.notify_timeout_s,
                    checksum=self.options.checksum,
                )
            report = replace(report, notices=notices)
        return replace(report, seconds=phases.seconds())

    def _courier(self, live: Outlet, observe: Observe | None) -> Courier:
        check_kind("live", live, Outlet)
        return Courier(
            live,
            kind=self.options.live_kind,
            bucket_bytes=self.options.bucket_bytes,
            timeout_s=self.options.live_timeout_s,
            observe=ignore if observe is None else observe,
        )

    def _delivered(self, report: PublishReport, snapshot: Base, phases: Phases) -> PublishReport:
        """Send the version that was just committed to the engines on the live path."""
        kept, self._kept = self._kept, None
        if self._live is None:
            return report
        held = snapshot.require_held()
        goods = Goods(
            held=held,
            raw=manifest_bytes(self._store, held),
            kinds=("full",) if kept is None else ("full", "delta"),
            sender=Whole(
                [entry.meta for entry in held.manifest.tensors],
                snapshot.bits,
                None if kept is None else partial(kept.payloads, held.manifest),
            ),
            files=self._files,
        )
        try:
            return replace(report, delivery=self._live.deliver(goods, phases))
        finally:
            if kept is not None:
                kept.close()

    def _start_from(self, base: CheckpointSource) -> None:
        """Seed the snapshot from the bytes that the engines loaded; in an empty store publish them."""
        snapshot = self._new_snapshot()
        self._files = snapshot.fill(base)
        self._owner.remove_leftovers()
        if self._owner.head.version is None:
            self._commit_full(snapshot, snapshot.table(), Phases())
        elif adopt(snapshot, self._owner.history()) is None:
            raise BaseVersionError(
                f"base {base.path}: its weights are those of no version of this run, whose current "
                f"version is {self.version}; pass the checkpoint that the engines loaded, or no base, "
                "to rebuild it from the store"
            )
        else:
            self._catch_up(snapshot)
        self._snapshot = snapshot

    def _recovered(self, source: WeightSource) -> Base:
        """Return what knows the current version, rebuilt from the store if it must be."""
        if isinstance(source, WatchedWeights):
            return WatchedBase(source, self._held())
        if isinstance(self._snapshot, Snapshot):
            return self._snapshot
        self._owner.check()
        self._owner.remove_leftovers()
        snapshot = self._new_snapshot()
        if self._owner.head.version is not None:
            self._catch_up(snapshot)
        return snapshot

    def _new_snapshot(self) -> Snapshot:
        return Snapshot(self.options.snapshot_dir, device_copy=self.options.device_copy)

    def _held(self) -> HeldVersion | None:
        """Return the current version without its weights."""
        if self._snapshot is not None:
            return self._snapshot.held()
        self._owner.check()
        self._owner.remove_leftovers()
        history = self._owner.history()
        if history.current is not None:
            self._files = files_of(history)
            self._deltas = history.deltas_since_full()
        return history.current

    def _catch_up(self, snapshot: Snapshot) -> None:
        Receiver(self._store, snapshot, observe=self._observe).sync()
        history = self._owner.history()
        self._files = files_of(history)
        self._deltas = history.deltas_since_full()

    def _is_anchor_due(self) -> bool:
        every = self.options.anchor_every
        return every is not None and self._deltas >= every

    def _commit_delta(self, snapshot: Base, source: WeightSource, phases: Phases) -> PublishReport:
        if self._live is not None and self._live.takes_deltas:
            self._kept = Kept()
        delta = DeltaWriter(
            self._writer(phases, self._kept),
            snapshot.require_held().manifest,
            snapshot,
            options=self.options,
            density=self._density,
            phases=phases,
            observe=self._observe,
        )
        with self._store.turn():
            delta.write(source)
            table = sorted(delta.entries.values(), key=lambda entry: entry.meta.name)
            report = self._commit(snapshot, "delta", delta.parts, [], table, phases)
        self._deltas += 1
        self._density = report.density
        return report

    def _commit_full(
        self, snapshot: Base, table: Mapping[str, TensorEntry], phases: Phases
    ) -> PublishReport:
        self.options.check(entry.meta for entry in table.values())
        full = FullWriter(self._writer(phases), snapshot, options=self.options, phases=phases)
        with self._store.turn():
            parts, files, entries = full.write(table, self._files)
            report = self._commit(snapshot, "full", parts, files, entries, phases)
        self._deltas = 0
        return report

    def _writer(self, phases: Phases, kept: Kept | None = None) -> VersionWriter:
        return VersionWriter(
            self._store, self._owner.next_version, phases, self._observe, self._owner.check, kept
        )

    def _commit(
        self,
        snapshot: Base,
        kind: Kind,
        parts: list[PartEntry],
        files: list[PartEntry],
        table: list[TensorEntry],
        phases: Phases,
    ) -> PublishReport:
        head, base = self._owner.head, snapshot.held()
        manifest = Manifest(
            run_id=head.run_id,
            epoch=head.epoch,
            version=self._owner.next_version,
            kind=kind,
            base_version=head.version,
            base_sha256=head.manifest_sha256,
            encoding=self.options.encoding,
            parts=tuple(parts),
            files=tuple(files),
            tensors=tuple(table),
            fingerprint_before=None if base is None else base.manifest.fingerprint,
            fingerprint=model_fingerprint(table),
        )
        with phases("commit"):
            version = self._writer(phases).finish(manifest, self.options.checksum)
            snapshot.check_unwritten()
            self._owner.commit(version)
        snapshot.apply((), version)
        return report_of(version)


def report_of(version: HeldVersion) -> PublishReport:
    """Sum up a committed version."""
    manifest = version.manifest
    total = sum(entry.meta.unit_count for entry in manifest.tensors)
    changed = sum(entry.changed for entry in manifest.tensors if entry.changed is not None)
    return PublishReport(
        version=version.version,
        manifest_sha256=version.sha256,
        kind=manifest.kind,
        tensors=sum(entry.encoding is not None for entry in manifest.tensors),
        changed=total if manifest.kind == "full" else changed,
        total=total,
        payload_bytes=manifest.payload_bytes,
        full_bytes=manifest.model_bytes,
    )
