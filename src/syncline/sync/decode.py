"""Payloads through codecs on the thread pool: into records that prove themselves, or into all bits."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np

from syncline import codecs, kernels
from syncline.abc import Buffer
from syncline.codecs.windows import Unpack, WindowCodec
from syncline.errors import FormatError
from syncline.sync.phases import Phases
from syncline.sync.slices import Slice, in_batches, whole
from syncline.types import ZERO, Bits, Changes, Fingerprint, Record, Span, TensorMeta, unsigned
from syncline.version import Manifest, TensorEntry

_DENSE_SHARE = 0.5
_WHOLE_BYTES = 32 << 20
"""Largest tensor that a codec without windows of its own decodes on the pool, all its records in memory."""

Payloads = Iterable[tuple[TensorEntry, Buffer]]


class Decoded(NamedTuple):
    """What one window of a tensor overwrites; None: nothing.

    Attributes:
        fingerprint: what it adds to the tensor's; `changed`: units that really change.
    """

    meta: TensorMeta
    record: Record | None
    fingerprint: Fingerprint
    changed: int


class DecodedSpan(NamedTuple):
    """The bits of one window of a tensor and their fingerprint; no span: an empty tensor."""

    meta: TensorMeta
    span: Span | None
    fingerprint: Fingerprint


class DeltaDecoder:
    """Decodes payloads against the bits that stand in an engine.

    Args:
        view: returns the bits that the engine holds of the tensor with this name.
        base: the manifest of the version that they are; None if that is not known: then fingerprints
            are of all units, and every payload must carry them.
    """

    def __init__(self, view: Callable[[str], Bits], base: Manifest | None, phases: Phases) -> None:
        self._view = view
        self._is_full = base is None
        self._phases = phases

    def decode(self, payloads: Payloads) -> Generator[Decoded, None, None]:
        """Yield what every window overwrites, in order; for every tensor something, if only nothing.

        Raises:
            CodecError, FormatError: a payload is not one that its encoding makes; says where.
        """
        work = chain.from_iterable(self._work(entry, payload) for entry, payload in payloads)
        with closing(in_batches(work, self._phases)) as windows:
            for decoded in windows:
                yield from decoded

    def _work(
        self, entry: TensorEntry, payload: Buffer
    ) -> Iterator[tuple[Slice, Callable[[], Iterable[Decoded]]]]:
        meta, codec = entry.meta, codecs.get(encoding_of(entry))
        engine_bits = self._view(meta.name)
        yield Slice(meta, range(0)), lambda: [Decoded(meta, None, ZERO, 0)]
        if isinstance(codec, WindowCodec):
            for start, units, unpack in codec.pieces(meta, payload):
                piece = Slice(meta, range(start, start + units))
                yield piece, partial(self._window, entry, piece, unpack, engine_bits)
        else:
            pieces = codec.decode(meta, payload, engine_bits)
            yield whole(meta), partial(self._whole, entry, pieces, engine_bits)

    def _window(
        self, entry: TensorEntry, piece: Slice, unpack: Unpack, engine_bits: Bits
    ) -> list[Decoded]:
        with self._phases("decode"):
            found = unpack(engine_bits[piece.units.start : piece.units.stop])
            return [] if found is None else [self._decoded(entry, found, engine_bits)]

    def _whole(
        self, entry: TensorEntry, pieces: Iterator[Changes | Span], engine_bits: Bits
    ) -> Iterable[Decoded]:
        decoded = (self._decoded(entry, piece, engine_bits) for piece in pieces)
        if entry.meta.nbytes > _WHOLE_BYTES:
            return decoded
        with self._phases("decode"):
            return list(decoded)

    def _decoded(self, entry: TensorEntry, piece: Changes | Span, engine_bits: Bits) -> Decoded:
        meta = entry.meta
        seeds = kernels.seeds(meta.name)
        record = to_record(meta, piece, engine_bits)
        if self._is_full:
            fingerprint = kernels.fingerprint(span_of(entry, piece).bits, piece.start, seeds)
        else:
            fingerprint = record_fingerprint(record, seeds)
        kept = record if record.new_bits.size else None
        return Decoded(meta, kept, fingerprint, changed_units(record))


def decode_all(payloads: Payloads, phases: Phases) -> Generator[DecodedSpan, None, None]:
    """Yield the bits of every window of a full version, in order; for every tensor something.

    Raises:
        CodecError, FormatError: a payload is not one that its encoding makes, or does not carry all bits.
    """

    def span(entry: TensorEntry, unpack: Unpack) -> DecodedSpan:
        nothing = np.empty(0, unsigned(entry.meta.unit_bytes))
        with phases("decode"):
            found = span_of(entry, unpack(nothing))
            seeds = kernels.seeds(entry.meta.name)
            return DecodedSpan(
                entry.meta, found, kernels.fingerprint(found.bits, found.start, seeds)
            )

    def work(
        entry: TensorEntry, payload: Buffer
    ) -> Iterator[tuple[Slice, Callable[[], DecodedSpan]]]:
        meta = entry.meta
        codec = codecs.get(encoding_of(entry))
        if not isinstance(codec, WindowCodec) or not codec.is_full:
            raise not_full(entry)
        yield Slice(meta, range(0)), lambda: DecodedSpan(meta, None, ZERO)
        for start, units, unpack in codec.pieces(meta, payload):
            yield Slice(meta, range(start, start + units)), partial(span, entry, unpack)

    pairs = (work(entry, payload) for entry, payload in payloads)
    return in_batches(chain.from_iterable(pairs), phases)


def to_record(meta: TensorMeta, piece: Changes | Span, engine_bits: Bits) -> Record:
    """Pair new bits with the ones that stand in the engine; places that agree already drop out."""
    if isinstance(piece, Changes):
        old_bits = piece.base_bits
        if old_bits is None:
            old_bits = kernels.gather(engine_bits[piece.start :], piece.offsets)
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


def span_of(entry: TensorEntry, piece: Changes | Span | None) -> Span:
    """Return a piece that carries all its bits.

    Raises:
        FormatError: it does not.
    """
    if isinstance(piece, Span):
        return piece
    raise not_full(entry)


def not_full(entry: TensorEntry) -> FormatError:
    """Return the error for a full version's tensor whose encoding does not carry all bits."""
    return FormatError(
        f"tensor {entry.meta.name!r}: a full version needs a full encoding, found {entry.encoding}",
        tensor=entry.meta.name,
    )


def encoding_of(entry: TensorEntry) -> str:
    """Return the encoding of a tensor's payload.

    Raises:
        FormatError: it has none.
    """
    if entry.encoding is None:
        raise FormatError(
            f"tensor {entry.meta.name!r} has no payload in this version", tensor=entry.meta.name
        )
    return entry.encoding
