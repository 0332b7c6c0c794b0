"""Write the payload of a delta: detect, encode and spool tensor by tensor, part by part."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np
import xxhash

from syncline import codecs
from syncline.abc import Observe, WeightSource
from syncline.codecs import exponents
from syncline.format import names
from syncline.format.part import Spool, metadata_for
from syncline.format.rules import INTERCHANGE_ENCODINGS
from syncline.sync.base import Base, Windows
from syncline.sync.checks import check_complete, check_tensor
from syncline.sync.detect import dense_windows
from syncline.sync.options import PublisherOptions
from syncline.sync.phases import Phases
from syncline.sync.writer import VersionWriter
from syncline.types import Bits, Step, TensorMeta, Window
from syncline.version import Manifest, PartEntry, TensorEntry


class DeltaWriter:
    """Turns the weights of a source into the parts and the table of a delta on `base`.

    Args:
        snapshot: tells what differs from `base`.
        options: encoding, size of parts, memory for payloads.
    """

    def __init__(
        self,
        writer: VersionWriter,
        base: Manifest,
        snapshot: Base,
        *,
        options: PublisherOptions,
        phases: Phases,
        observe: Observe,
    ) -> None:
        self._writer = writer
        self._base = base
        self._snapshot = snapshot
        self._encoding = options.encoding
        self._memory_bytes = options.memory_bytes
        self._phases = phases
        self._observe = observe
        self._count = max(1, math.ceil(base.model_bytes / options.part_bytes))
        self._done_bytes = 0
        self._spool = Spool(self._memory_bytes)
        self._digests: dict[str, str] = {}
        self.parts: list[PartEntry] = []
        self.entries: dict[str, TensorEntry] = {}

    def write(self, source: WeightSource) -> None:
        """Publish every tensor of the source; afterwards `parts` and `entries` are complete.

        Raises:
            LayoutError: a tensor is unknown, repeated, missing, or of another dtype or shape.
        """
        try:
            for meta, bits in source.tensors():
                check_tensor(meta, self._base, self.entries)
                self.entries[meta.name] = self._tensor(meta, bits)
                self._done_bytes += meta.nbytes
                self._observe(Step("publish.tensor", self._done_bytes, self._base.model_bytes))
                self._close_full_parts()
            check_complete(self._base, self.entries)
            while len(self.parts) < self._count:
                self._close_part()
        finally:
            self._spool.close()

    def _close_full_parts(self) -> None:
        share_bytes = self._base.model_bytes / self._count
        while (
            len(self.parts) < self._count - 1
            and self._done_bytes >= (len(self.parts) + 1) * share_bytes
        ):
            self._close_part()

    def _close_part(self) -> None:
        path = names.part_name(len(self.parts), self._count)
        chunks = self._spool.chunks(metadata_for("delta", self._encoding, self._digests))
        self.parts.append(self._writer.put(path, chunks, "publish.part_written"))
        self._spool.close()
        self._digests = {}
        self._spool = Spool(self._memory_bytes)

    def _tensor(self, meta: TensorMeta, bits: Bits) -> TensorEntry:
        difference = self._snapshot.difference(meta, bits, self._phases)
        digest = xxhash.xxh3_128() if self._encoding in INTERCHANGE_ENCODINGS else None
        encoding = smallest_delta(meta) if self._encoding == "auto" else self._encoding
        with self._phases("encode"):
            size_bytes = self._spooled(meta, encoding, _digested(difference, digest))
            before = self._base.by_name[meta.name].fingerprint
            if not difference.changed:
                self._spool.drop(meta.name)
                return TensorEntry(meta, before, None, None, None)
            if self._encoding == "auto" and size_bytes > dense_bytes(meta):
                # So many changes that the bits themselves are shorter, and need no base.
                self._spool.drop(meta.name)
                encoding = "planes"
                self._spooled(meta, encoding, dense_windows(self._snapshot.bits(meta.name)))
        if digest is not None:
            self._digests[meta.name] = digest.hexdigest()
        fingerprint = before + difference.fingerprint
        return TensorEntry(meta, fingerprint, encoding, len(self.parts), difference.changed)

    def _spooled(self, meta: TensorMeta, encoding: str, windows: Iterable[Window]) -> int:
        start_bytes = self._spool.size_bytes
        chunks = codecs.get(encoding).encode(meta, windows)
        self._spool.add(meta.name, chunks, meta if encoding == "full" else None)
        return self._spool.size_bytes - start_bytes


def smallest_delta(meta: TensorMeta) -> str:
    """Return the encoding that makes the smallest deltas of a tensor of this dtype.

    What an optimizer changes depends on the exponent, which `tight` makes use of; a dtype without one
    gives it nothing to go by, and `packed` is the quicker of the two.
    """
    return "tight" if meta.dtype in exponents.FIELDS else "packed"


def dense_bytes(meta: TensorMeta) -> int:
    """Return about how many bytes the tensor takes when coded without its base."""
    return codecs.get("planes").predict_bytes(meta, meta.unit_count)


def _digested(windows: Windows, digest: xxhash.xxh3_128 | None) -> Iterator[Window]:
    for window in windows:
        if digest is not None:
            digest.update(window.new.view(np.uint8).data)
        yield window
