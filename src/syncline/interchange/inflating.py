"""The content of one zlib stream, in order, a piece at a time, and never more than it may hold."""

from __future__ import annotations

import zlib

from syncline.abc import Buffer
from syncline.errors import CodecError


class Inflating:
    """Reads a zlib stream whose content is `size_bytes` long.

    Memory: one piece. Nothing beyond `size_bytes` is ever decompressed but one byte.

    Example:
        >>> reader = Inflating(zlib.compress(b"abc"), 3)
        >>> reader.read(2), reader.read(1)
        (b'ab', b'c')
    """

    def __init__(self, stream: Buffer, size_bytes: int) -> None:
        self._stream = zlib.decompressobj()
        self._rest: Buffer = stream
        self._left_bytes = size_bytes

    def read(self, size_bytes: int) -> bytes:
        """Return the next `size_bytes`; the last piece also proves that the stream ends there.

        Raises:
            CodecError: the stream is damaged, too short, too long, or something follows it.
        """
        pieces = []
        wanted_bytes = size_bytes
        while wanted_bytes:
            piece = self._inflate(wanted_bytes)
            if not piece:
                raise CodecError(f"the zlib stream ends {self._left_bytes} bytes too early")
            pieces.append(piece)
            wanted_bytes -= len(piece)
            self._left_bytes -= len(piece)
        if not self._left_bytes:
            self._check_end()
        return b"".join(pieces)

    def _inflate(self, most_bytes: int) -> bytes:
        try:
            piece = self._stream.decompress(self._rest, most_bytes)
        except zlib.error as error:
            raise CodecError(f"the zlib stream is damaged: {error}") from error
        self._rest = self._stream.unconsumed_tail
        return piece

    def _check_end(self) -> None:
        if self._inflate(1):
            raise CodecError("the zlib stream's content is longer than the tensor")
        if not self._stream.eof:
            raise CodecError("the zlib stream is cut short: its own checksum is missing")
        if self._stream.unused_data:
            raise CodecError(f"{len(self._stream.unused_data)} bytes follow the zlib stream")
