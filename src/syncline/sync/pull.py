"""One version from store to engine: fetch, check the digest, decode, prove the fingerprint, apply."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from contextlib import closing
from functools import partial

from syncline import threads
from syncline.abc import Buffer, Engine, Observe, Store
from syncline.errors import TransportError
from syncline.format import part as part_format
from syncline.sync.checks import check_layout, check_link
from syncline.sync.decode import DeltaDecoder, decode_all
from syncline.sync.fetch import IN_MEMORY_BYTES, check_objects, fetch_files, fetched
from syncline.sync.history import is_same_weights
from syncline.sync.pace import Pace
from syncline.sync.phases import Phases
from syncline.sync.proof import proved, proved_spans
from syncline.types import Record, Span, Step, TensorMeta
from syncline.version import HeldVersion, Manifest, PartEntry, TensorEntry

STEPS = (
    "pull.planned",
    "pull.fetching",
    "pull.part_fetched",
    "pull.tensor_decoded",
    "pull.version_applied",
)


_PARTS_AT_ONCE = 4


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
        self._counting = threading.Lock()
        self.done_bytes = 0
        self.changed = 0
        self.applied: list[int] = []

    def step(self, held: HeldVersion | None, at: HeldVersion) -> None:
        """Bring the engine from `held` to `at`: a delta on it, a full version, or the same weights."""
        manifest = at.manifest
        if held is not None and is_same_weights(at) and manifest.base_sha256 == held.sha256:
            self._engine.apply((), at)
            return
        metas = self._engine.tensors()
        if not metas:
            check_objects(self._store, manifest)
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
        """Yield every tensor's payload; the next parts are fetched while this one is used."""
        pace = Pace()

        def fetch(number: int, part: PartEntry) -> Buffer:
            with pace.turn(number, part.size_bytes) as came:

                def on_bytes(nbytes: int) -> None:
                    came(nbytes)
                    self._fetched(nbytes)

                return fetched(self._store, manifest, part, on_bytes, self._phases)

        fetches = (partial(fetch, number, part) for number, part in enumerate(manifest.parts))
        with closing(threads.ahead(fetches, self._at_once(manifest))) as parts, pace:
            for index, buffer in enumerate(parts):
                self._observe(Step("pull.part_fetched", self.done_bytes, self._total_bytes))
                for name, payload in part_format.load(buffer, manifest, index).items():
                    yield manifest.by_name[name], payload

    def _at_once(self, manifest: Manifest) -> int:
        """Return how many parts may be under way: small ones would leave a long way empty between them."""
        if not self._store.is_remote:
            return 1
        largest_bytes = max((part.size_bytes for part in manifest.parts), default=0)
        return max(1, min(_PARTS_AT_ONCE, IN_MEMORY_BYTES // max(1, largest_bytes)))

    def _fetched(self, nbytes: int) -> None:
        with self._counting:
            self.done_bytes += nbytes
            self._observe(Step("pull.fetching", self.done_bytes, self._total_bytes))

    def _records(self, manifest: Manifest, base: Manifest | None) -> Generator[Record, None, None]:
        """Yield what to overwrite; raise before the end if the result would not be the manifest's.

        That the version's objects are all there and no others is found out meanwhile.
        """
        decoder = DeltaDecoder(self._engine.view, base, self._phases)
        with (
            threads.Background() as beside,
            closing(self._payloads(manifest)) as payloads,
            closing(decoder.decode(payloads)) as decoded,
        ):
            beside.run(partial(check_objects, self._store, manifest))
            try:
                yield from proved(decoded, manifest, base, self._proved)
            except TransportError:
                beside.finish()  # tells more than that one object is missing
                raise

    def _proved(self, changed: int) -> None:
        self.changed += changed
        self._observe(Step("pull.tensor_decoded", self.done_bytes, self._total_bytes))

    def _tensors(
        self, manifest: Manifest
    ) -> Generator[tuple[TensorMeta, Iterator[Span]], None, None]:
        """Yield the tensors of a full version, each proved at the end of its spans."""
        with (
            closing(self._payloads(manifest)) as payloads,
            closing(decode_all(payloads, self._phases)) as pieces,
        ):
            yield from proved_spans(pieces, manifest, self._taken)

    def _taken(self, changed: int) -> None:
        self.changed += changed
