"""Byte streams, each stored in the smallest of three ways: as it is, through zstd, or as one byte.

Several streams stand together behind a table: one varint a stream, four times the stored size plus
the coding. What a stream must be long when decoded is never in the payload; the reader knows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from syncline.abc import Buffer
from syncline.codecs.payload import Cursor, varint
from syncline.errors import CodecError
from syncline.format import zstd
from syncline.kernels import literals

RAW, ZSTD, CONSTANT = 0, 1, 2
"""The codings of a stream."""

_CODING_BITS = 2
_LEAST_FOR_ZSTD_BYTES = 16
_SAMPLE_BYTES = 1 << 14
_LEAST_FOR_SAMPLE_BYTES = 1 << 18
_ALIKE = 0.98


@dataclass(frozen=True, slots=True)
class Stream:
    """One stored stream, not decoded yet; `what` says which and where, for messages."""

    coding: int
    stored: memoryview
    what: str

    def content(self, size_bytes: int) -> NDArray[np.uint8]:
        """Return the stream's `size_bytes` bytes.

        Raises:
            CodecError: it has another size (nothing was allocated), or is damaged.

        Aliasing: the result may be a view of the payload.
        """
        return self.content_between(size_bytes, size_bytes)

    def content_between(self, least_bytes: int, most_bytes: int) -> NDArray[np.uint8]:
        """Return the stream's bytes, which are `least_bytes` to `most_bytes` many.

        A stream of one repeated byte comes out `least_bytes` long.

        Raises:
            CodecError: it has another size (nothing was allocated), or is damaged.

        Aliasing: the result may be a view of the payload.
        """
        if self.coding == CONSTANT:
            return np.full(least_bytes, self.stored[0], np.uint8)
        data: bytes | memoryview = self.stored
        if self.coding == ZSTD:
            data = zstd.decompress(self.stored, self.what, limit_bytes=most_bytes)
        if not least_bytes <= len(data) <= most_bytes:
            raise CodecError(
                f"{self.what} must be {least_bytes} to {most_bytes} bytes long, found {len(data)}"
            )
        return np.frombuffer(data, np.uint8)


def compress_noise(content: NDArray[np.uint8]) -> bytes:
    """Return a zstd frame from the entropy coder nearly alone; repeated patterns still count."""
    return zstd.compress_noise(content.data)


def compress_symbols(content: NDArray[np.uint8]) -> bytes:
    """Return a zstd frame; a long stream's is written several times faster where no pattern repeats.

    Whether one does is told by the beginning of the stream.
    """
    head = content[:_SAMPLE_BYTES]
    if content.size >= _LEAST_FOR_SAMPLE_BYTES:
        sample = literals.compress(head)
        if sample is not None and _ALIKE * len(sample) <= len(compress_noise(head)):
            frame = literals.compress(content)
            if frame is not None:
                return frame
    return compress_noise(content)


def pack(
    contents: Sequence[NDArray[np.uint8]],
    compress: Callable[[NDArray[np.uint8]], bytes] = compress_noise,
) -> bytes:
    """Return the table of the streams and, after it, what is stored of them.

    Args:
        contents: flat byte arrays; an empty one is stored as it is.
        compress: makes the zstd frame of a stream.
    """
    coded = [_code(np.ascontiguousarray(content), compress) for content in contents]
    table = b"".join(varint(len(stored) << _CODING_BITS | coding) for coding, stored in coded)
    return table + b"".join(stored for _, stored in coded)


def unpack(cursor: Cursor, names: Sequence[str]) -> list[Stream]:
    """Return the streams that `pack` wrote, one for each name, and move the cursor behind them.

    Raises:
        CodecError: a coding is unknown, or the payload ends before.
    """
    entries = [_entry(cursor, name) for name in names]
    streams = []
    for name, (coding, size_bytes) in zip(names, entries, strict=True):
        what = f"byte {cursor.offset}: {name} stream"
        streams.append(Stream(coding, cursor.take(size_bytes, f"{name} stream"), what))
    return streams


def _code(
    content: NDArray[np.uint8], compress: Callable[[NDArray[np.uint8]], bytes]
) -> tuple[int, Buffer]:
    # Streams that vary are told by their beginning, which spares most a look at the rest.
    if content.size > 1 and not any((part != content[0]).any() for part in (content[:64], content)):
        return CONSTANT, content[:1].data
    if content.size >= _LEAST_FOR_ZSTD_BYTES:
        frame = compress(content)
        if len(frame) < content.size:
            return ZSTD, frame
    return RAW, content.data


def _entry(cursor: Cursor, name: str) -> tuple[int, int]:
    start = cursor.offset
    entry = cursor.varint(f"table entry of the {name} stream", 0, (1 << 64) - 1)
    coding, size_bytes = entry & 3, entry >> _CODING_BITS
    if coding > CONSTANT or (coding == CONSTANT and size_bytes != 1):
        raise CodecError(
            f"byte {start}: {name} stream must be coded 0 (raw), 1 (zstd) or 2 (constant, 1 byte), "
            f"found coding {coding} with {size_bytes} bytes"
        )
    return coding, size_bytes
