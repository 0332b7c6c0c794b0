"""Write the payload of a delta: detect and encode on the thread pool, spool in order, put part by part."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from contextlib import closing

from syncline import codecs
from syncline.abc import Buffer, Observe, WeightSource
from syncline.codecs import choice
from syncline.codecs.planes import Planes
from syncline.format import names
from syncline.format.part import Spool, metadata_for
from syncline.sync.base import Base
from syncline.sync.checks import check_complete, check_tensor
from syncline.sync.encode import DeltaEncoder, Encoded, encode_all
from syncline.sync.options import PublisherOptions
from syncline.sync.phases import Phases
from syncline.sync.slices import by_tensor
from syncline.sync.writer import VersionWriter
from syncline.threads import Background
from syncline.types import ZERO, Step, TensorMeta
from syncline.version import Manifest, PartEntry, TensorEntry

_REMOTE_PARTS = 8
_LAST_SHARES = (0.5, 0.25, 0.25)
_REMOTE_PART_BYTES = 64 << 20


class DeltaWriter:
    """Turns the weights of a source into the parts and the table of a delta on `base`.

    While later tensors are compared and encoded, the parts before them are being put.

    Args:
        snapshot: tells what differs from `base`.
        options: encoding, size of parts, memory for payloads.
        density: share of the units that is expected to change, to choose encodings by.
    """

    def __init__(
        self,
        writer: VersionWriter,
        base: Manifest,
        snapshot: Base,
        *,
        options: PublisherOptions,
        density: float,
        phases: Phases,
        observe: Observe,
    ) -> None:
        self._writer = writer
        self._base = base
        self._snapshot = snapshot
        self._encoding = options.encoding
        self._link_bytes_per_s = options.link_bytes_per_s
        self._density = density
        self._checksum = options.checksum
        at_once = writer.at_once
        self._memory_bytes = max(1, options.memory_bytes // at_once)
        self._phases = phases
        self._observe = observe
        self._ends = part_ends(base.model_bytes, options.part_bytes, is_wide=at_once > 1)
        self._count = len(self._ends)
        self._closed = 0
        self._done_bytes = 0
        self._seen: set[str] = set()
        self._spool = Spool(self._memory_bytes)
        self._digests: dict[str, str] = {}
        self._puts = Background(at_once)
        self._parts: dict[int, PartEntry] = {}
        self.entries: dict[str, TensorEntry] = {}

    @property
    def parts(self) -> list[PartEntry]:
        """The parts in order."""
        return [self._parts[index] for index in range(self._count)]

    def write(self, source: WeightSource) -> None:
        """Publish every tensor of the source; afterwards `parts` and `entries` are complete.

        Raises:
            LayoutError: a tensor is unknown, repeated, missing, or of another dtype or shape.
        """
        encoder = DeltaEncoder(
            self._snapshot.difference, self._encoding_of, self._phases, checksum=self._checksum
        )
        try:
            with self._puts, closing(encoder.encode(source, self._check)) as encoded:
                for meta, pieces in by_tensor(encoded):
                    self.entries[meta.name] = self._tensor(meta, pieces)
                    self._done_bytes += meta.nbytes
                    self._observe(Step("publish.tensor", self._done_bytes, self._base.model_bytes))
                    self._close_full_parts()
                check_complete(self._base, self.entries)
                while self._closed < self._count:
                    self._close_part()
        finally:
            self._spool.close()

    def _check(self, meta: TensorMeta) -> None:
        check_tensor(meta, self._base, self._seen)
        self._seen.add(meta.name)

    def _close_full_parts(self) -> None:
        while self._closed < self._count - 1 and self._done_bytes >= self._ends[self._closed]:
            self._close_part()

    def _close_part(self) -> None:
        self._puts.make_room()  # before the spool is given away: if this raises, `write` closes it
        index, spool, digests = self._closed, self._spool, self._digests
        path = names.part_name(index, self._count)

        def put() -> None:
            with spool:
                chunks = spool.chunks(metadata_for("delta", self._encoding, digests))
                self._parts[index] = self._writer.put(path, chunks, "publish.part_written")

        self._closed += 1
        self._digests = {}
        self._spool = Spool(self._memory_bytes)
        self._puts.run(put)

    def _tensor(self, meta: TensorMeta, pieces: Iterator[Encoded]) -> TensorEntry:
        found = _Found(pieces)
        size_bytes = self._spooled(meta, found)
        before = self._base.by_name[meta.name].fingerprint
        self._snapshot.confirm(meta, before + found.difference)
        if not found.changed:
            self._spool.drop(meta.name)
            return TensorEntry(meta, before, None, None, None)
        encoding = self._encoding_of(meta)
        if self._encoding == "auto" and size_bytes > dense_bytes(meta):
            # So many changes that the bits themselves are shorter, and need no base.
            self._spool.drop(meta.name)
            encoding = Planes.name
            tensor = (meta, self._snapshot.bits(meta.name))
            with closing(encode_all([tensor], Planes(), self._phases)) as encoded:
                self._spooled(meta, _Found(encoded))
        if found.digest is not None:
            self._digests[meta.name] = found.digest
        return TensorEntry(meta, before + found.difference, encoding, self._closed, found.changed)

    def _encoding_of(self, meta: TensorMeta) -> str:
        if self._encoding != "auto":
            return self._encoding
        if self._link_bytes_per_s is None:
            return choice.smallest(meta)
        changed = round(self._density * meta.unit_count)
        return choice.soonest(meta, changed, self._link_bytes_per_s)

    def _spooled(self, meta: TensorMeta, found: _Found) -> int:
        start_bytes = self._spool.size_bytes
        raw = meta if self._encoding == "full" else None
        with self._phases("spool"):
            self._spool.add(meta.name, found.chunks(), raw)
        return self._spool.size_bytes - start_bytes


class _Found:
    """Sums up the slices of one tensor while their chunks are used; complete after that."""

    def __init__(self, pieces: Iterable[Encoded]) -> None:
        self._pieces = pieces
        self.changed = 0
        self.difference = ZERO
        self.digest: str | None = None

    def chunks(self) -> Iterator[Buffer]:
        """Yield the payload of the tensor."""
        for piece in self._pieces:
            yield from piece.chunks
            if piece.difference is not None:
                self.changed += piece.difference.changed
                self.difference += piece.difference.fingerprint
            if piece.digest is not None:
                self.digest = piece.digest.hexdigest()


def part_ends(model_bytes: int, part_bytes: int, *, is_wide: bool) -> list[float]:
    """Return after how many bytes of weights each part of a delta ends.

    Over a link there are several, so that it is busy while the rest is encoded, and the last ones are ever
    smaller: what an engine still has to decode when the last byte has come is short.
    """
    count = max(1, math.ceil(model_bytes / part_bytes))
    if is_wide:
        count = max(count, min(_REMOTE_PARTS, model_bytes // _REMOTE_PART_BYTES))
    shares = [1.0] * count
    if is_wide and count > 1:
        shares[-1:] = _LAST_SHARES
    return [model_bytes * end / count for end in itertools.accumulate(shares)]


def dense_bytes(meta: TensorMeta) -> int:
    """Return about how many bytes the tensor takes when coded without its base."""
    return codecs.get("planes").predict_bytes(meta, meta.unit_count)
