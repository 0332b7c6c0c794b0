"""Flat buckets: which bytes of a version lie where, in memory that is handed over again and again.

A bucket is one contiguous buffer that holds tensors of one dtype, each at a multiple of
`ALIGNMENT_BYTES`. It holds nothing but their bytes: names, shapes and places are in the `Cargo` that travels
beside it, once for all buckets of a version, so that both sides know every size before a byte moves. A
tensor that is longer than a bucket lies in several, as consecutive spans.

What is in the buckets is either all weights of a version (`full`) or its payloads (`delta`), which are
one-dimensional U8 tensors, as in a part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from syncline.errors import ConfigError, FormatError
from syncline.types import TensorMeta
from syncline.version import Kind

ALIGNMENT_BYTES = 256
"""What offsets in a bucket are multiples of, and what the size of a bucket is a multiple of."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A span of one tensor in a bucket: bytes `start : start + nbytes` of the tensor, at `offset`.

    Attributes:
        meta: of the whole tensor (of a payload: U8 and its length).
        start: where the span begins in the tensor, in bytes; a multiple of its unit.
        offset: where it begins in the bucket, in bytes; a multiple of `ALIGNMENT_BYTES`.
        nbytes: how long it is.
    """

    meta: TensorMeta
    start: int
    offset: int
    nbytes: int

    @property
    def stop(self) -> int:
        """Where the span ends in the bucket, in bytes."""
        return self.offset + self.nbytes

    @property
    def units(self) -> slice:
        """Which units of the tensor the span is."""
        unit_bytes = self.meta.unit_bytes
        return slice(self.start // unit_bytes, (self.start + self.nbytes) // unit_bytes)

    @property
    def is_last(self) -> bool:
        """Whether the tensor ends here."""
        return self.start + self.nbytes == self.meta.nbytes


@dataclass(frozen=True, slots=True)
class Bucket:
    """One bucket: pieces of one dtype in ascending order, with holes of less than `ALIGNMENT_BYTES`.

    Attributes:
        digest: XXH3-128 of the bucket's `nbytes` bytes, holes as zeros; None where fingerprints of the
            tensors prove the bytes and nobody else asks.
    """

    dtype: str
    pieces: tuple[Piece, ...]
    digest: str | None = None

    @property
    def nbytes(self) -> int:
        """How much of the buffer is used; 0 if the pieces are empty tensors."""
        return self.pieces[-1].stop


@dataclass(frozen=True)
class Cargo:
    """What travels of one version: its identity, and every bucket in the order in which they come.

    Attributes:
        run_id, version, manifest_sha256: the version, as its manifest says it and is identified.
        generation: counts what the sender has put into its buffers; a buffer whose generation moved on
            holds something else by now.
        kind: `full`: the version's weights, whatever the receiver holds; `delta`: its payloads.
        bucket_bytes: how long a buffer is; no bucket is longer.
    """

    run_id: str
    version: int
    manifest_sha256: str
    generation: int
    kind: Kind
    bucket_bytes: int
    buckets: tuple[Bucket, ...]

    @cached_property
    def metas(self) -> Mapping[str, TensorMeta]:
        """The tensors (or payloads) in the buckets, by name, in the order in which they come."""
        return {piece.meta.name: piece.meta for bucket in self.buckets for piece in bucket.pieces}

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all buckets, holes included."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @cached_property
    def longest_bytes(self) -> int:
        """Bytes of the longest bucket: what a buffer needs at least."""
        return max((bucket.nbytes for bucket in self.buckets), default=0)


def pack(metas: Iterable[TensorMeta], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Return buckets of at most `bucket_bytes` that hold every tensor, dtype by dtype, in their order.

    Only a tensor that is longer than a bucket is cut; the buckets are never longer than what they hold.

    Args:
        bucket_bytes: a multiple of `ALIGNMENT_BYTES`.

    Raises:
        ConfigError: it is not.

    Cost: O(pieces); looks at metadata alone.

    Example:
        >>> metas = [TensorMeta("a", "BF16", (200,)), TensorMeta("b", "F32", (3,))]
        >>> for bucket in pack(metas, 256):
        ...     print(bucket.dtype, [(p.meta.name, p.start, p.offset, p.nbytes) for p in bucket.pieces])
        BF16 [('a', 0, 0, 256)]
        BF16 [('a', 256, 0, 144)]
        F32 [('b', 0, 0, 12)]
    """
    check_bucket_bytes(bucket_bytes)
    by_dtype: dict[str, list[TensorMeta]] = {}
    for meta in metas:
        by_dtype.setdefault(meta.dtype, []).append(meta)
    return tuple(
        Bucket(dtype, pieces)
        for dtype, group in by_dtype.items()
        for pieces in _filled(group, bucket_bytes)
    )


def check_bucket_bytes(bucket_bytes: int) -> None:
    """Check the size of a buffer.

    Raises:
        ConfigError: it is no positive multiple of `ALIGNMENT_BYTES`.
    """
    if bucket_bytes < ALIGNMENT_BYTES or bucket_bytes % ALIGNMENT_BYTES:
        raise ConfigError(
            f"bucket_bytes: expected a positive multiple of {ALIGNMENT_BYTES}, found {bucket_bytes}"
        )


def aligned(offset: int) -> int:
    """Return the first place from `offset` on where a piece may begin.

    Example:
        >>> aligned(0), aligned(1), aligned(256)
        (0, 256, 256)
    """
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def check_tiles(buckets: Iterable[Bucket], where: str) -> None:
    """Check that pieces come in order, fit their bucket, and tile every tensor exactly once.

    Raises:
        FormatError: a gap, an overlap, a tensor that comes twice, changes or is cut short; says where.
    """
    open_meta: TensorMeta | None = None
    done_bytes = 0
    seen: set[str] = set()
    for index, bucket in enumerate(buckets):
        place = f"{where}: buckets[{index}]"
        _check_places(bucket, place)
        for number, piece in enumerate(bucket.pieces):
            path = f"{place}.pieces[{number}]"
            if open_meta is None:
                if piece.meta.name in seen:
                    raise _illegal(f"{path}.name", "a tensor that did not come yet", piece)
                seen.add(piece.meta.name)
                open_meta = piece.meta
            if piece.meta != open_meta or piece.start != done_bytes:
                raise _illegal(path, f"{open_meta} from byte {done_bytes} on", piece)
            done_bytes += piece.nbytes
            if done_bytes > piece.meta.nbytes or (not piece.nbytes and piece.meta.nbytes):
                raise _illegal(f"{path}.nbytes", f"within {piece.meta.nbytes} bytes", piece)
            if piece.is_last:
                open_meta, done_bytes = None, 0
            elif done_bytes % piece.meta.unit_bytes:
                raise _illegal(f"{path}.nbytes", f"whole units of {piece.meta.unit_bytes}", piece)
    if open_meta is not None:
        raise FormatError(
            f"{where}: tensor {open_meta.name!r} ends after {done_bytes} of {open_meta.nbytes} bytes",
            tensor=open_meta.name,
        )


def _check_places(bucket: Bucket, place: str) -> None:
    if not bucket.pieces:
        raise FormatError(f"{place}.pieces must not be empty")
    offset = 0
    for number, piece in enumerate(bucket.pieces):
        if piece.meta.dtype != bucket.dtype:
            raise _illegal(f"{place}.pieces[{number}].dtype", repr(bucket.dtype), piece)
        if piece.offset != offset:
            raise _illegal(f"{place}.pieces[{number}].offset", str(offset), piece)
        offset = aligned(piece.stop)


def _filled(metas: list[TensorMeta], bucket_bytes: int) -> Iterator[tuple[Piece, ...]]:
    """Yield the pieces of one bucket after another."""
    pieces: list[Piece] = []
    offset = 0
    for meta in metas:
        if pieces and offset + meta.nbytes > bucket_bytes:
            yield tuple(pieces)
            pieces, offset = [], 0
        start = 0
        while meta.nbytes - start > bucket_bytes:
            yield (Piece(meta, start, 0, bucket_bytes),)
            start += bucket_bytes
        pieces.append(Piece(meta, start, offset, meta.nbytes - start))
        offset = aligned(pieces[-1].stop)
    if pieces:
        yield tuple(pieces)


def _illegal(place: str, expected: str, found: Piece) -> FormatError:
    return FormatError(f"{place} must be {expected}, found {found}", tensor=found.meta.name)
