"""One version from store to engine: fetch, check the digest, decode, prove the fingerprint, apply."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from syncline import codecs, kernels
from syncline.abc import Buffer, Engine, Observe, Store
from syncline.errors import FormatError, VerifyError
from syncline.format import part as part_format
from syncline.sync.checks import check_layout, check_link
from syncline.sync.fetch import check_objects, fetch_files, fetched
from syncline.sync.history import is_same_weights
from syncline.sync.phases import Phases
from syncline.types import (
    ZERO,
    Bits,
    Changes,
    Fingerprint,
    Record,
    Span,
    Step,
    TensorMeta,
    unsigned,
)
from syncline.version import HeldVersion, Manifest, TensorEntry

STEPS = (
    "pull.planned",
    "pull.fetching",
    "pull.part_fetched",
    "pull.tensor_decoded",
    "pull.version_applied",
)

_DENSE_SHARE = 0.5


class Pull:
    """Applies versions to an engine one by one and counts what that took."""

    def __init__(
        self, store: Store, engine: Engine, phases: Phases, observe: Observe, total_bytes: int
    ) -> None:
        self._store = store
        self._engine = engine
        self._phases = phases
        self._observe = observe
        self._total_bytes = total_bytes
        self.done_bytes = 0
        self.changed = 0
        self.applied: list[int] = []

    def step(self, held: HeldVersion | None, at: HeldVersion) -> None:
        """Bring the engine from `held` to `at`: a delta on it, a full version, or the same weights."""
        manifest = at.manifest
        if held is not None and is_same_weights(at) and manifest.base_sha256 == held.sha256:
            self._engine.apply((), at)
            return
        check_objects(self._store, manifest)
        metas = self._engine.tensors()
        if not metas:
            files = fetch_files(self._store, manifest, self._fetched, self._phases)
            with self._phases("apply"):
                self._engine.create(at, self._tensors(manifest), files)
        else:
            check_layout(metas, manifest)
            base = None
            if held is not None and manifest.kind == "delta":
                base = held.manifest
                check_link(manifest, base)
            with self._phases("apply"):
                self._engine.apply(self._records(manifest, base), at)
        self.applied.append(manifest.version)

    def _payloads(self, manifest: Manifest) -> Iterator[tuple[TensorEntry, Buffer]]:
        for index, part in enumerate(manifest.parts):
            with fetched(self._store, manifest, part, self._fetched, self._phases) as buffer:
                self._observe(Step("pull.part_fetched", self.done_bytes, self._total_bytes))
                payloads = part_format.load(buffer, manifest, index)
                for name, payload in payloads.items():
                    yield manifest.by_name[name], payload

    def _fetched(self, nbytes: int) -> None:
        self.done_bytes += nbytes
        self._observe(Step("pull.fetching", self.done_bytes, self._total_bytes))

    def _records(self, manifest: Manifest, base: Manifest | None) -> Iterator[Record]:
        """Yield what to overwrite; raise before the end if the result would not be the manifest's."""
        for entry, payload in self._payloads(manifest):
            before = None if base is None else base.by_name[entry.meta.name].fingerprint
            yield from self._tensor_records(entry, payload, before)
            self._observe(Step("pull.tensor_decoded", self.done_bytes, self._total_bytes))

    def _tensor_records(
        self, entry: TensorEntry, payload: Buffer, before: Fingerprint | None
    ) -> Iterator[Record]:
        """Decode one tensor against the engine's own bits and prove its fingerprint.

        With `before` known the proof takes the changes alone; without, it takes every unit.
        """
        meta = entry.meta
        seeds = kernels.seeds(meta.name)
        engine_bits = self._engine.view(meta.name)
        total = ZERO if before is None else before
        changed = 0
        pieces = iter(codecs.get(_encoding(entry)).decode(meta, payload, engine_bits))
        while True:
            with self._phases("decode"):
                piece = next(pieces, None)
                if piece is None:
                    break
                record = to_record(meta, piece, engine_bits)
                if before is None:
                    total += kernels.fingerprint(_span(entry, piece).bits, piece.start, seeds)
                else:
                    total += record_fingerprint(record, seeds)
                changed += changed_units(record)
            if record.new_bits.size:
                yield record
        self.changed += changed
        if before is not None and changed != entry.changed:
            raise FormatError(
                f"tensor {meta.name!r}: the manifest announces {entry.changed} changed units, its "
                f"payload changes {changed}",
                tensor=meta.name,
            )
        _check_fingerprint(entry, total)

    def _tensors(self, manifest: Manifest) -> Iterator[tuple[TensorMeta, Iterator[Span]]]:
        """Yield the tensors of a full version, each proved at the end of its spans."""
        for entry, payload in self._payloads(manifest):
            yield entry.meta, self._spans(entry, payload)

    def _spans(self, entry: TensorEntry, payload: Buffer) -> Iterator[Span]:
        meta = entry.meta
        seeds = kernels.seeds(meta.name)
        total = ZERO
        nothing = np.empty(0, unsigned(meta.unit_bytes))
        for piece in codecs.get(_encoding(entry)).decode(meta, payload, nothing):
            span = _span(entry, piece)
            with self._phases("verify"):
                total += kernels.fingerprint(span.bits, span.start, seeds)
            self.changed += span.bits.size
            yield span
        _check_fingerprint(entry, total)


def to_record(meta: TensorMeta, piece: Changes | Span, engine_bits: Bits) -> Record:
    """Pair new bits with the ones that stand in the engine; places that agree already drop out."""
    if isinstance(piece, Changes):
        window = engine_bits[piece.start :]
        old_bits = kernels.gather(window, piece.offsets)
        differs = old_bits != piece.bits
        if differs.all():
            return Record(meta.name, piece.start, piece.offsets, old_bits, piece.bits)
        return Record(
            meta.name, piece.start, piece.offsets[differs], old_bits[differs], piece.bits[differs]
        )
    window = engine_bits[piece.start : piece.start + piece.bits.size]
    offsets, old_bits, new_bits = kernels.diff(window, piece.bits)
    if offsets.size > _DENSE_SHARE * window.size:
        return Record(meta.name, piece.start, None, window.copy(), piece.bits)
    return Record(meta.name, piece.start, offsets, old_bits, new_bits)


def changed_units(record: Record) -> int:
    """Return how many units of a record really change; a dense one may repeat what stands there."""
    if record.offsets is None:
        return int(np.count_nonzero(record.old_bits != record.new_bits))
    return record.offsets.size


def record_fingerprint(record: Record, seeds: tuple[int, int]) -> Fingerprint:
    """Return what a record adds to its tensor's fingerprint."""
    if record.offsets is None:
        before = kernels.fingerprint(record.old_bits, record.start, seeds)
        return kernels.fingerprint(record.new_bits, record.start, seeds) - before
    return kernels.fingerprint_change(
        record.start, record.offsets, record.old_bits, record.new_bits, seeds
    )


def _span(entry: TensorEntry, piece: Changes | Span) -> Span:
    if isinstance(piece, Span):
        return piece
    raise FormatError(
        f"tensor {entry.meta.name!r}: a full version needs a full encoding, found {entry.encoding}",
        tensor=entry.meta.name,
    )


def _encoding(entry: TensorEntry) -> str:
    if entry.encoding is None:
        raise FormatError(
            f"tensor {entry.meta.name!r} has no payload in this version", tensor=entry.meta.name
        )
    return entry.encoding


def _check_fingerprint(entry: TensorEntry, found: Fingerprint) -> None:
    if found != entry.fingerprint:
        raise VerifyError(
            f"tensor {entry.meta.name!r}: expected fingerprint {entry.fingerprint.hex()}, found "
            f"{found.hex()}: the engine does not hold the base's bits, or the payload is wrong; "
            "nothing was written; repair the engine with sync(repair=True), on disk syncline pull --repair",
            tensor=entry.meta.name,
        )
