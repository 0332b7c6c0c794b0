"""Follow a publisher that is not ours: every tensor proved as far as its layout goes, then one update."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Literal, TypeVar

from syncline import kernels
from syncline.abc import Engine, Interchange, Observe, Store
from syncline.commit.journal import Journal, JournalWriter
from syncline.errors import FormatError, VerifyError
from syncline.format import head as head_format
from syncline.format.part import temporary_file
from syncline.interchange import chain
from syncline.sync import followed
from syncline.sync.accounting import Moved
from syncline.sync.checks import check_layout, fingerprint_all, verify_engine
from syncline.sync.decode import to_record
from syncline.sync.engine_base import EngineBase
from syncline.sync.fingerprints import fingerprints
from syncline.sync.found import Found, only_spans, stage_tensor
from syncline.sync.history import read_head
from syncline.sync.metered import MeteredStore
from syncline.sync.phases import Phases
from syncline.sync.reports import AppliedVersion
from syncline.sync.slices import Slice, in_batches, whole
from syncline.sync.writer import model_fingerprint
from syncline.trace import Trace
from syncline.types import ZERO, Changes, Fingerprint, Record, Span, Step, TensorMeta
from syncline.version import ForeignVersion, HeldVersion, Kind, TensorEntry

T = TypeVar("T")

_STAGED_IN_MEMORY_BYTES = 64 << 20
_POOLED_BYTES = 256 << 20
"""Largest tensor that is decoded on the thread pool, with all its records in memory."""

_ON_TRUST = (
    "the base {base!r} is not in the directory: the engine's weights were taken for it; the digests "
    "prove the tensors that changed"
)


class Follower:
    """Keeps one engine on the versions of one foreign directory.

    The changes of a version are decoded and proved first, into a temporary file; only then does the engine
    take them, in one update that it can undo.

    Args:
        layout: how to read the store.
        engine, verify, observe, trace: as for `Receiver`.
    """

    def __init__(
        self,
        store: Store,
        layout: Interchange,
        engine: Engine,
        *,
        verify: Literal["changed", "full"],
        observe: Observe,
        trace: Trace | None = None,
    ) -> None:
        self._unmetered = store
        self._store = MeteredStore(store)
        self._layout = layout
        self._engine = engine
        self._verify = verify
        self._trace = trace
        self._observe = observe
        self._seen: list[ForeignVersion] = []
        self._sizes: dict[str, int] = {}
        self._done_bytes = self._total_bytes = self._changed = 0

    def sync(self, version: int | str | None = None, *, repair: bool = False) -> AppliedVersion:
        """Bring the engine to a version; see `Receiver.sync`.

        Args:
            version: its identity; None: the one that no other is made on.
        """
        phases = Phases(self._trace)
        self._store = MeteredStore(self._unmetered, phases)
        with phases("plan"):
            versions = self._layout.versions(self._store, self._seen)
            target = self._target(versions, version)
            held = None if repair else self._engine.held()
            has_weights = bool(self._engine.tensors()) and not repair
            path = followed.path(versions, target, held, has_weights=has_weights)
        self._done_bytes = self._changed = 0
        self._total_bytes = sum(at.payload_bytes for at in path)
        self._observe(Step("pull.planned", 0, self._total_bytes))
        missing = dict.fromkeys(sentence for at in path or [target] for sentence in at.missing)
        if path and path[0].kind == "delta" and held is None:
            missing[_ON_TRUST.format(base=path[0].base)] = None
        applied = []
        for at in path:
            self._sizes = {tensor.name: tensor.payload_bytes for tensor in at.tensors}
            take = self._delta if at.kind == "delta" else self._full
            held = take(at, held, phases)
            applied.append(held.version)
            self._observe(Step("pull.version_applied", self._done_bytes, self._total_bytes))
        if held is None:
            raise FormatError(f"version {target.identity!r}: no step leads to it")
        if self._verify == "full":
            with phases("verify"):
                verify_engine(self._engine, held.manifest)
        # The target is read anew next time, so that a directory that was rewritten is noticed.
        self._seen = [at for at in versions if at is not target]
        kind: Kind = "full" if any(at.kind == "full" for at in path) else "delta"
        model_bytes, seconds = held.manifest.model_bytes, phases.seconds()
        return AppliedVersion(
            run_id=held.manifest.run_id,
            version=held.version,
            manifest_sha256=held.sha256,
            fingerprint=held.manifest.fingerprint.hex(),
            applied=tuple(applied),
            changed=self._changed,
            payload_bytes=self._done_bytes,
            seconds=seconds,
            layout=self._layout.name,
            identity=target.identity,
            missing=tuple(missing),
            moved=Moved.of("store", kind, 1, self._store.wire_bytes, model_bytes, seconds),
        )

    def _target(self, versions: list[ForeignVersion], version: int | str | None) -> ForeignVersion:
        raw = read_head(self._store) if version is None else None
        return chain.find(versions, version if raw is None else head_format.load(raw).version)

    def _delta(self, at: ForeignVersion, held: HeldVersion | None, phases: Phases) -> HeldVersion:
        base = EngineBase(self._engine)
        table = self._table(base, held, phases)
        before = model_fingerprint(table.values())
        with tempfile.SpooledTemporaryFile(_STAGED_IN_MEMORY_BYTES) as file:
            stage = JournalWriter(file)
            done: dict[str, Found] = {}
            with closing(self._decoded(at, base, phases)) as decoded:
                for found in decoded:
                    with phases("stage"):
                        stage_tensor(found, done, stage)
                    self._changed += found.changed
                    self._reached(found.carried)
            with temporary_file():
                seal = stage.finish()
            for name, found in done.items():
                entry = table.get(name)
                total = self._fingerprint(found.meta) if entry is None else entry.fingerprint
                table[name] = TensorEntry(found.meta, total + found.difference, None, None, None)
            after = followed.record(at, held, table, before)
            with phases("apply"):
                staged = Journal(file, f"stage of version {at.identity!r}", seal)
                self._engine.apply(staged, after)
        return after

    def _decoded(
        self, at: ForeignVersion, base: EngineBase, phases: Phases
    ) -> Generator[Found, None, None]:
        """Yield what a delta changes, tensor by tensor; on the thread pool where the layout allows it."""

        def decode(found: Found) -> Found:
            if found.meta.nbytes <= _POOLED_BYTES:
                with phases("decode"):
                    found.take_all()
            return found

        def begun(meta: TensorMeta, pieces: Iterator[Changes | Span]) -> Found:
            bits = self._engine.view(meta.name)
            listed = replace(meta, name=base.listed(meta.name, bits))
            return Found(meta.name, listed, pieces, bits)

        work = (
            (whole(meta), partial(decode, begun(meta, pieces)))
            for meta, pieces in self._layout.read(self._store, at, base)
        )
        return self._each(work, phases)

    def _each(
        self, work: Iterable[tuple[Slice, Callable[[], T]]], phases: Phases
    ) -> Generator[T, None, None]:
        return in_batches(work, phases) if self._layout.is_concurrent else (do() for _, do in work)

    def _table(
        self, base: EngineBase, held: HeldVersion | None, phases: Phases
    ) -> dict[str, TensorEntry]:
        if held is not None:
            check_layout(base.metas, held.manifest)
            return dict(held.manifest.by_name)
        with phases("verify"):
            found = fingerprints(base.metas.values(), self._engine.view)
            return {meta.name: TensorEntry(meta, total, None, None, None) for meta, total in found}

    def _fingerprint(self, meta: TensorMeta) -> Fingerprint:
        return fingerprint_all(meta, self._engine.view(meta.name))

    def _full(self, at: ForeignVersion, held: HeldVersion | None, phases: Phases) -> HeldVersion:
        """Take a full version: read it once to know and prove it, and again to hand it over."""

        def prove(meta: TensorMeta, spans: Iterator[Changes | Span]) -> TensorEntry:
            total = ZERO
            with phases("verify"):
                for span in only_spans(meta, spans):
                    total += kernels.fingerprint(span.bits, span.start, kernels.seeds(meta.name))
            return TensorEntry(meta, total, None, None, None)

        work = (
            (whole(meta), partial(prove, meta, spans))
            for meta, spans in self._layout.read(self._store, at, None)
        )
        table = {entry.meta.name: entry for entry in self._each(work, phases)}
        before = ZERO if held is None else held.manifest.fingerprint
        after = followed.record(at, held, table, before)
        with phases("apply"):
            if self._engine.tensors():
                check_layout(self._engine.tensors(), after.manifest)
                self._engine.apply(self._records(at, table), after)
            else:
                files = self._layout.files(self._store, at)
                self._engine.create(after, self._tensors(at, table), files)
        return after

    def _tensors(
        self, at: ForeignVersion, table: dict[str, TensorEntry]
    ) -> Iterator[tuple[TensorMeta, Iterator[Span]]]:
        """Yield the tensors of the second reading, which are those of the first one, each once."""
        left = dict(table)
        for meta, spans in self._layout.read(self._store, at, None):
            entry = left.pop(meta.name, None)
            if entry is None or entry.meta != meta:
                raise _moved(at, meta.name)
            yield meta, self._same(at, entry, spans)
        if left:
            raise _moved(at, min(left))

    def _records(self, at: ForeignVersion, table: dict[str, TensorEntry]) -> Iterator[Record]:
        for meta, spans in self._tensors(at, table):
            bits = self._engine.view(meta.name)
            for span in spans:
                record = to_record(meta, span, bits)
                if record.new_bits.size:
                    yield record

    def _same(
        self, at: ForeignVersion, entry: TensorEntry, spans: Iterator[Changes | Span]
    ) -> Iterator[Span]:
        """Pass spans on; at the end they were the same as in the first reading."""
        meta, total = entry.meta, ZERO
        for span in only_spans(meta, spans):
            total += kernels.fingerprint(span.bits, span.start, kernels.seeds(meta.name))
            self._changed += span.bits.size
            yield span
        if entry.fingerprint != total:
            raise _moved(at, meta.name)
        self._reached(meta.name)

    def _reached(self, name: str) -> None:
        self._done_bytes += self._sizes.get(name, 0)
        self._observe(Step("pull.tensor_decoded", self._done_bytes, self._total_bytes))


def _moved(at: ForeignVersion, name: str) -> VerifyError:
    return VerifyError(
        f"version {at.identity!r}: tensor {name!r} changed while it was read; nothing was written; sync "
        "again once its publisher has finished",
        tensor=name,
    )
