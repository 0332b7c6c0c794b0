"""The only door to zstandard: one frame with its content size, checked before memory is taken.

A buffer is legal if it is exactly one frame that says its content size, needs no dictionary, and
whose blocks can hold that much; two frames, bytes after the frame and skippable frames are refused.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import zstandard

from syncline.abc import Buffer
from syncline.errors import CodecError

MAX_WINDOW_BYTES = 1 << 23
"""Largest window of a frame that is decompressed in pieces: what RFC 8878 asks of every decoder."""

_LEVEL = 1
_MAGIC = b"\x28\xb5\x2f\xfd"
_BLOCK_BYTES = 1 << 17
_CHECKSUM_BYTES = 4
_UNKNOWN_SIZE = (1 << 64) - 1
_RLE_BLOCK, _RESERVED_BLOCK = 1, 3

# Almost no match search (64 hash slots, matches of 7): in noise from a small alphabet the matches
# that level 1 finds cost more than the literals they replace, and finding them costs most time.
_ENTROPY_ONLY = zstandard.ZstdCompressionParameters(
    window_log=17,
    chain_log=6,
    hash_log=6,
    search_log=1,
    min_match=7,
    target_length=0,
    strategy=zstandard.STRATEGY_FAST,
    write_content_size=True,
)


class _Here(threading.local):
    """What a thread keeps, since making it costs as much as a small stream; not to be shared by threads."""

    def __init__(self) -> None:
        self.noise = zstandard.ZstdCompressor(compression_params=_ENTROPY_ONLY)
        self.decompressor = zstandard.ZstdDecompressor()


_here = _Here()


class Frame(NamedTuple):
    """What a frame's headers say: size of its content, and of the window to decompress it with."""

    content_bytes: int
    window_bytes: int


def compress(data: Buffer) -> bytes:
    """Return one level-1 frame of `data`, with its content size."""
    return zstandard.ZstdCompressor(level=_LEVEL).compress(data)


def compress_noise(data: Buffer) -> bytes:
    """Return one frame of `data`, with its content size, from the entropy coder nearly alone.

    Smaller and faster than `compress` for symbols without repeating patterns.
    """
    return _here.noise.compress(data)


def compress_stream(chunks: Iterable[Buffer], size_bytes: int) -> Iterator[bytes]:
    """Yield the pieces of one level-1 frame of the chunks, which are `size_bytes` long together.

    Raises:
        CodecError: the chunks have another size.

    Memory: O(one chunk).
    """
    stream = zstandard.ZstdCompressor(level=_LEVEL).compressobj(size=size_bytes)
    found_bytes = 0
    for chunk in chunks:
        found_bytes += memoryview(chunk).nbytes
        if found_bytes > size_bytes:
            break
        piece = stream.compress(chunk)
        if piece:
            yield piece
    if found_bytes != size_bytes:
        raise CodecError(
            f"what is compressed must be {size_bytes} bytes long, found {found_bytes} or more"
        )
    yield stream.flush()


def inspect(frame: Buffer, where: str) -> Frame:
    """Check that `frame` is exactly one frame with its content size, without decompressing it.

    Args:
        frame: the bytes, all of them.
        where: begins messages, which add the offset inside the frame.

    Raises:
        CodecError: cut short, something after the frame, no content size, a dictionary, or a
            content size that the blocks cannot reach.

    Cost: one step for each block of the frame (128 KiB of content).
    """
    view = memoryview(frame).cast("B")
    if view[:4] != _MAGIC:
        raise CodecError(f"{where}: a zstd frame must begin here, found {bytes(view[:4]).hex()!r}")
    try:
        head = zstandard.get_frame_parameters(view[:18])
        offset = zstandard.frame_header_size(view[:18])
    except zstandard.ZstdError as error:
        raise CodecError(f"{where}: zstd frame header: {error}") from error
    if head.content_size == _UNKNOWN_SIZE or head.dict_id != 0:
        raise CodecError(f"{where}: a zstd frame must say its content size and need no dictionary")
    end, block_count = _walk(view, offset, where)
    end += _CHECKSUM_BYTES if head.has_checksum else 0
    if end != len(view):
        raise CodecError(f"{where}: the zstd frame ends at offset {end}, found {len(view)} bytes")
    if head.content_size > block_count * _BLOCK_BYTES:
        raise CodecError(
            f"{where}: {block_count} zstd blocks hold at most {block_count * _BLOCK_BYTES} bytes, "
            f"but the frame says {head.content_size}"
        )
    return Frame(head.content_size, head.window_size)


def decompress(frame: Buffer, where: str, *, limit_bytes: int) -> bytes:
    """Return the content of a frame that is at most `limit_bytes` long.

    Raises:
        CodecError: not one whole frame, too long (nothing was allocated), or damaged.
    """
    content_bytes = inspect(frame, where).content_bytes
    if content_bytes > limit_bytes:
        raise CodecError(
            f"{where}: at most {limit_bytes} bytes may be in the zstd frame, it says "
            f"{content_bytes}"
        )
    return _inflate(frame, where)


def decompress_exactly(frame: Buffer, where: str, size_bytes: int) -> bytes:
    """Return the content of a frame that is `size_bytes` long.

    Raises:
        CodecError: not one whole frame, another size (nothing was allocated), or damaged.
    """
    _check_size(inspect(frame, where), where, size_bytes)
    return _inflate(frame, where)


def beginning(start: Buffer, where: str, size_bytes: int) -> bytes:
    """Return the first `size_bytes` of a frame's content, or fewer if `start` does not hold as many.

    Args:
        start: the first bytes of the frame; the frame itself is not checked.

    Raises:
        CodecError: no frame begins there, or it is damaged.
    """
    try:
        return zstandard.ZstdDecompressor().stream_reader(start).read(size_bytes)
    except zstandard.ZstdError as error:
        raise CodecError(f"{where}: {error}") from error


class Reader:
    """The content of one frame, in order, a piece at a time.

    Args:
        frame: the bytes of the frame.
        where: begins messages.
        size_bytes: what the content size must be.

    Raises:
        CodecError: not one whole frame, another size, or a window above `MAX_WINDOW_BYTES`.

    Memory: the window and one piece.
    """

    def __init__(self, frame: Buffer, where: str, size_bytes: int) -> None:
        found = inspect(frame, where)
        _check_size(found, where, size_bytes)
        if found.window_bytes > MAX_WINDOW_BYTES:
            raise CodecError(
                f"{where}: the zstd window must be at most {MAX_WINDOW_BYTES} bytes, found "
                f"{found.window_bytes}"
            )
        self._where = where
        self._left_bytes = size_bytes
        self._stream = zstandard.ZstdDecompressor().stream_reader(frame)

    def read(self, size_bytes: int) -> bytes:
        """Return the next `size_bytes`; the last piece also proves that the frame ends there.

        Raises:
            CodecError: the frame is damaged, or ends before.
        """
        try:
            piece = self._stream.read(size_bytes)
            self._left_bytes -= len(piece)
            beyond = b"" if self._left_bytes else self._stream.read(1)
        except zstandard.ZstdError as error:
            raise CodecError(f"{self._where}: {error}") from error
        if len(piece) != size_bytes or beyond:
            raise CodecError(f"{self._where}: the zstd frame's content is not as long as it says")
        return piece


def _walk(view: memoryview, offset: int, where: str) -> tuple[int, int]:
    """Return where the blocks that begin at `offset` end, and how many they are."""
    block_count = 0
    is_last = False
    while not is_last:
        header = int.from_bytes(view[offset : offset + 3], "little")
        is_last = bool(header & 1)
        kind = header >> 1 & 3
        size_bytes = 1 if kind == _RLE_BLOCK else header >> 3
        if offset + 3 + size_bytes > len(view) or kind == _RESERVED_BLOCK:
            raise CodecError(
                f"{where}: no whole zstd block at offset {offset}: damaged or cut short"
            )
        offset += 3 + size_bytes
        block_count += 1
    return offset, block_count


def _check_size(found: Frame, where: str, size_bytes: int) -> None:
    if found.content_bytes != size_bytes:
        raise CodecError(
            f"{where}: {size_bytes} bytes must be in the zstd frame, it says {found.content_bytes}"
        )


def _inflate(frame: Buffer, where: str) -> bytes:
    decompressor = _here.decompressor
    try:
        content = decompressor.decompress(frame)
        if not content:
            # The library has not looked at the blocks, because the frame says that it is empty.
            decompressor.stream_reader(frame).read(1)
    except zstandard.ZstdError as error:
        raise CodecError(f"{where}: {error}") from error
    return content
