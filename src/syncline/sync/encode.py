"""Tensors through codecs on the thread pool: what changed since the base, or all bits."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain

from syncline import codecs
from syncline.abc import Buffer, Codec, WeightSource
from syncline.codecs.payload import blaming
from syncline.codecs.windows import WindowCodec
from syncline.format import checksum as checksums
from syncline.format.rules import INTERCHANGE_ENCODINGS
from syncline.sync.base import Windows
from syncline.sync.detect import dense_windows
from syncline.sync.phases import Phases
from syncline.sync.slices import Slice, in_batches, whole, windows_of
from syncline.types import WINDOW_UNITS, Bits, TensorMeta, Window

_WHOLE_BYTES = 64 << 20
"""Largest tensor that a codec without windows of its own encodes on the pool, its payload in memory."""


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """A slice of a tensor as it stands in the payload.

    Attributes:
        chunks: the bytes; can be used once.
        difference: what was found; complete when the chunks have been used. None: all bits were taken.
        digest: of the new bytes, where slime-family readers want it; complete like `difference`.
    """

    meta: TensorMeta
    chunks: Iterable[Buffer]
    difference: Windows | None = None
    digest: checksums.Checksum | None = None


Work = Iterator[tuple[Slice, Callable[[], Encoded]]]


class DeltaEncoder:
    """Encodes what differs from a base.

    Args:
        difference: see `Base.difference`; called in order and in the caller's thread.
        encoding: returns the name of the codec for a tensor.
        checksum: of the new bytes, where slime-family readers want one.
    """

    def __init__(
        self,
        difference: Callable[[TensorMeta, Bits, Phases, range], Windows],
        encoding: Callable[[TensorMeta], str],
        phases: Phases,
        *,
        checksum: str,
    ) -> None:
        self._checksum = checksum
        self._difference = difference
        self._encoding = encoding
        self._phases = phases

    def encode(
        self, source: WeightSource, check: Callable[[TensorMeta], None]
    ) -> Generator[Encoded, None, None]:
        """Yield the slices of every tensor in the order of the source.

        Args:
            check: called with every tensor before its bits are read; raises if it may not come.
        """
        tensors = self._checked(source, check)
        if source.is_stable:
            work = chain.from_iterable(self._work(meta, bits) for meta, bits in tensors)
            yield from in_batches(work, self._phases)
            return
        for meta, bits in tensors:
            # Used up before the next tensor is asked for, since that may lie in the same memory.
            yield from in_batches(self._work(meta, bits), self._phases)

    def _checked(
        self, source: WeightSource, check: Callable[[TensorMeta], None]
    ) -> Iterator[tuple[TensorMeta, Bits]]:
        tensors = source.tensors()
        while True:
            with self._phases("read"):
                found = next(tensors, None)
            if found is None:
                return
            check(found[0])
            yield found

    def _work(self, meta: TensorMeta, bits: Bits) -> Work:
        codec = codecs.get(self._encoding(meta))
        slices = windows_of(meta) if isinstance(codec, WindowCodec) else [whole(meta)]
        for piece in slices:
            difference = self._difference(meta, bits, self._phases, piece.units)
            yield piece, partial(self._slice, codec, piece, difference)

    def _slice(self, codec: Codec, piece: Slice, difference: Windows) -> Encoded:
        if isinstance(codec, WindowCodec):
            with self._phases("encode"):
                return Encoded(piece.meta, list(_packed(codec, piece, difference)), difference)
        is_interchange = codec.name in INTERCHANGE_ENCODINGS
        digest = checksums.new(self._checksum) if is_interchange else None
        chunks = codec.encode(piece.meta, _digested(difference, digest))
        if piece.nbytes > _WHOLE_BYTES:
            return Encoded(piece.meta, chunks, difference, digest)
        with self._phases("encode"):
            return Encoded(piece.meta, list(chunks), difference, digest)


def encode_all(
    tensors: Iterable[tuple[TensorMeta, Bits]], codec: WindowCodec, phases: Phases
) -> Generator[Encoded, None, None]:
    """Yield the slices of every tensor, each carrying all its bits."""

    def pack(piece: Slice, bits: Bits) -> Encoded:
        with phases("encode"):
            windows = dense_windows(bits, piece.units)
            return Encoded(piece.meta, list(_packed(codec, piece, windows)))

    work = (
        (piece, partial(pack, piece, bits)) for meta, bits in tensors for piece in windows_of(meta)
    )
    return in_batches(work, phases)


def _packed(codec: WindowCodec, piece: Slice, windows: Iterable[Window]) -> Iterator[Buffer]:
    if piece.is_first:
        yield codec.head(piece.meta, max(1, min(WINDOW_UNITS, piece.meta.unit_count)))
    for window in windows:
        with blaming(piece.meta, codec.name):
            yield codec.pack(piece.meta, window)


def _digested(difference: Windows, digest: checksums.Checksum | None) -> Iterator[Window]:
    for window in difference:
        if digest is not None:
            checksums.update(digest, window.new)
        yield window
