"""Buckets that arrive, as payloads to decode or as bits; each is released when nothing of it is in use."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from functools import partial

import numpy as np

from syncline import device, kernels
from syncline.abc import Buffer
from syncline.errors import TransportError
from syncline.format.bucket import Bucket, Cargo, Piece
from syncline.sync.decode import Decoded, DecodedSpan, changed_units, to_record
from syncline.sync.live.lanes import Lanes
from syncline.sync.phases import Phases
from syncline.sync.slices import Slice, in_batches
from syncline.types import WINDOW_UNITS, Bits, Span, TensorMeta, unsigned
from syncline.version import Manifest, TensorEntry


class Arriving:
    """The buckets of one cargo.

    Args:
        on_bytes: told how many bytes came, bucket by bucket.
    """

    def __init__(
        self, lanes: Lanes, cargo: Cargo, phases: Phases, on_bytes: Callable[[int], None]
    ) -> None:
        self._lanes = lanes
        self._cargo = cargo
        self._phases = phases
        self._on_bytes = on_bytes
        self._sizes = [bucket.nbytes for bucket in cargo.buckets if bucket.nbytes]
        self._has_begun = False

    def abandon(self) -> None:
        """End the round for everybody if it was never begun here, so that nobody waits for this engine."""
        if self._sizes and not self._has_begun:
            with suppress(TransportError), closing(self._lanes.buckets(self._sizes)) as coming:
                next(coming)

    def payloads(self, manifest: Manifest) -> Generator[tuple[TensorEntry, Buffer], None, None]:
        """Yield every payload of a delta, copied out of the buckets. Memory: one payload."""
        parts: list[bytes] = []
        with closing(self._buckets()) as buckets:
            for bucket, bits in buckets:
                for piece in bucket.pieces:
                    parts.append(bits[piece.offset : piece.stop].tobytes())
                    if piece.is_last:
                        yield manifest.by_name[piece.meta.name], b"".join(parts)
                        parts.clear()

    def decoded(self, view: Callable[[str], Bits]) -> Generator[Decoded, None, None]:
        """Yield what a full version overwrites, in order; for every tensor something, if only nothing.

        Aliasing: records may be views of a bucket, until the next one is asked for.
        """

        def change(meta: TensorMeta, span: Span, engine_bits: Bits) -> Decoded:
            with self._phases("decode"):
                # Proved first: a byte that comes late, after its transport said it was there, is then never taken.
                fingerprint = kernels.fingerprint(span.bits, span.start, kernels.seeds(meta.name))
                record = to_record(meta, span, engine_bits)
                kept = record if record.new_bits.size else None
                return Decoded(meta, kept, fingerprint, changed_units(record))

        with closing(self._buckets()) as buckets:
            for bucket, bits in buckets:
                work = (
                    (piece, partial(change, piece.meta, span, view(piece.meta.name)))
                    for piece, span in _windows(bucket, bits)
                )
                with closing(in_batches(work, self._phases)) as found:
                    yield from found

    def spans(self) -> Generator[DecodedSpan, None, None]:
        """Yield the bits of a full version in order. Aliasing: as `decoded`."""

        def prove(meta: TensorMeta, span: Span) -> DecodedSpan:
            with self._phases("decode"):
                fingerprint = kernels.fingerprint(span.bits, span.start, kernels.seeds(meta.name))
                return DecodedSpan(meta, span if span.bits.size else None, fingerprint)

        with closing(self._buckets()) as buckets:
            for bucket, bits in buckets:
                work = (
                    (piece, partial(prove, piece.meta, span))
                    for piece, span in _windows(bucket, bits)
                )
                with closing(in_batches(work, self._phases)) as found:
                    yield from found

    def _buckets(self) -> Generator[tuple[Bucket, Bits], None, None]:
        """Yield each bucket and its bytes in host memory, which are valid until the next is asked for."""
        self._has_begun = True
        with closing(self._lanes.buckets(self._sizes)) as coming:
            for bucket in self._cargo.buckets:
                if not bucket.nbytes:
                    yield bucket, np.empty(0, np.uint8)
                    continue
                with self._phases("wire"):
                    there = next(coming)
                self._on_bytes(bucket.nbytes)
                if isinstance(there, np.ndarray):
                    yield bucket, there
                else:
                    with self._phases("d2h"):
                        here = device.to_host(there)
                    yield bucket, here
            # Asking once more releases the last bucket.
            if self._sizes:
                with self._phases("wire"):
                    next(coming, None)


def _windows(bucket: Bucket, bits: Bits) -> Iterator[tuple[Slice, Span]]:
    for piece in bucket.pieces:
        yield from _windows_of(piece, bits)


def _windows_of(piece: Piece, bits: Bits) -> Iterator[tuple[Slice, Span]]:
    """Yield the windows of a piece; of an empty tensor one that is empty, at its place between the others."""
    units = bits[piece.offset : piece.stop].view(unsigned(piece.meta.unit_bytes))
    first = piece.units.start
    for start in range(0, max(1, units.size), WINDOW_UNITS):
        window = units[start : start + WINDOW_UNITS]
        at = first + start
        yield Slice(piece.meta, range(at, at + window.size)), Span(at, window)
