"""One version from store to engine: fetch, check the digest, decode, prove the fingerprint, apply."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from functools import partial

from syncline import threads
from syncline.abc import Buffer, Engine, Observe, Store
from syncline.errors import FormatError, VerifyError
from syncline.format import part as part_format
from syncline.sync.checks import check_layout, check_link
from syncline.sync.decode import DecodedSpan, DeltaDecoder, decode_all
from syncline.sync.fetch import check_objects, fetch_files, fetched
from syncline.sync.history import is_same_weights
from syncline.sync.phases import Phases
from syncline.sync.slices import by_tensor
from syncline.types import ZERO, Fingerprint, Record, Span, Step, TensorMeta
from syncline.version import HeldVersion, Manifest, PartEntry, TensorEntry

STEPS = (
    "pull.planned",
    "pull.fetching",
    "pull.part_fetched",
    "pull.tensor_decoded",
    "pull.version_applied",
)


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
            with self._phases("apply"), closing(self._tensors(manifest)) as tensors:
                self._engine.create(at, tensors, files)
        else:
            check_layout(metas, manifest)
            base = None
            if held is not None and manifest.kind == "delta":
                base = held.manifest
                check_link(manifest, base)
            with self._phases("apply"), closing(self._records(manifest, base)) as records:
                self._engine.apply(records, at)
        self.applied.append(manifest.version)

    def _payloads(self, manifest: Manifest) -> Generator[tuple[TensorEntry, Buffer], None, None]:
        """Yield every tensor's payload; the next part is fetched while this one is used."""

        def fetch(part: PartEntry) -> Buffer:
            return fetched(self._store, manifest, part, self._fetched, self._phases)

        fetches = (partial(fetch, part) for part in manifest.parts)
        with closing(threads.one_ahead(fetches)) as parts:
            for index, buffer in enumerate(parts):
                self._observe(Step("pull.part_fetched", self.done_bytes, self._total_bytes))
                for name, payload in part_format.load(buffer, manifest, index).items():
                    yield manifest.by_name[name], payload

    def _fetched(self, nbytes: int) -> None:
        self.done_bytes += nbytes
        self._observe(Step("pull.fetching", self.done_bytes, self._total_bytes))

    def _records(self, manifest: Manifest, base: Manifest | None) -> Generator[Record, None, None]:
        """Yield what to overwrite; raise before the end if the result would not be the manifest's."""
        decoder = DeltaDecoder(self._engine.view, base, self._phases)
        with (
            closing(self._payloads(manifest)) as payloads,
            closing(decoder.decode(payloads)) as decoded,
        ):
            for meta, pieces in by_tensor(decoded):
                entry = manifest.by_name[meta.name]
                total = ZERO if base is None else base.by_name[meta.name].fingerprint
                changed = 0
                for piece in pieces:
                    if piece.record is not None:
                        yield piece.record
                    total += piece.fingerprint
                    changed += piece.changed
                self.changed += changed
                if base is not None and changed != entry.changed:
                    raise FormatError(
                        f"tensor {meta.name!r}: the manifest announces {entry.changed} changed units, "
                        f"its payload changes {changed}",
                        tensor=meta.name,
                    )
                _check_fingerprint(entry, total)
                self._observe(Step("pull.tensor_decoded", self.done_bytes, self._total_bytes))

    def _tensors(
        self, manifest: Manifest
    ) -> Generator[tuple[TensorMeta, Iterator[Span]], None, None]:
        """Yield the tensors of a full version, each proved at the end of its spans."""
        with (
            closing(self._payloads(manifest)) as payloads,
            closing(decode_all(payloads, self._phases)) as pieces,
        ):
            for meta, spans in by_tensor(pieces):
                yield meta, self._spans(manifest.by_name[meta.name], spans)

    def _spans(self, entry: TensorEntry, pieces: Iterator[DecodedSpan]) -> Iterator[Span]:
        total = ZERO
        for piece in pieces:
            if piece.span is not None:
                self.changed += piece.span.bits.size
                yield piece.span
            total += piece.fingerprint
        _check_fingerprint(entry, total)


def _check_fingerprint(entry: TensorEntry, found: Fingerprint) -> None:
    if found != entry.fingerprint:
        raise VerifyError(
            f"tensor {entry.meta.name!r}: expected fingerprint {entry.fingerprint.hex()}, found "
            f"{found.hex()}: the engine does not hold the base's bits, or the payload is wrong; "
            "nothing was written; repair the engine with sync(repair=True), on disk syncline pull --repair",
            tensor=entry.meta.name,
        )
