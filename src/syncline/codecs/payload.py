"""What payloads have in common: errors with a name, a cursor, and varints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

from syncline.abc import Buffer
from syncline.errors import CodecError, FormatError
from syncline.types import TensorMeta

PIECE_BYTES = 1 << 22
"""How much of a tensor is decoded at a time by encodings without windows of their own."""

_VARINT_BITS = 7
_MAX_VARINT_BYTES = 10


@contextmanager
def placing(where: str, tensor: str | None = None) -> Iterator[None]:
    """Begin the message of every error out of the block with `where`, and name its tensor."""
    try:
        yield
    except (CodecError, FormatError) as error:
        raise type(error)(f"{where}: {error}", tensor=tensor) from error


def blaming(meta: TensorMeta, encoding: str) -> AbstractContextManager[None]:
    """Name tensor and encoding in every error out of the block."""
    return placing(f"tensor {meta.name!r}, encoding {encoding}", meta.name)


def varint(value: int) -> bytes:
    """Return an unsigned LEB128 number: 7 bits a byte, low first, high bit on all but the last.

    Example:
        >>> varint(3).hex(), varint(640).hex()
        ('03', '8005')
    """
    out = bytearray()
    while value >> _VARINT_BITS:
        out.append(value & 0x7F | 0x80)
        value >>= _VARINT_BITS
    out.append(value)
    return bytes(out)


class Cursor:
    """Reads a payload, or what lies in it from `start` on, and never past its end; errors name the offset."""

    def __init__(self, payload: Buffer, start: int = 0) -> None:
        self._view = memoryview(payload).cast("B")
        self._start = self.offset = start

    @property
    def left_bytes(self) -> int:
        """Bytes that have not been read."""
        return self._start + len(self._view) - self.offset

    def take(self, size_bytes: int, what: str) -> memoryview:
        """Return a view of the next `size_bytes`.

        Raises:
            CodecError: the payload ends before.
        """
        if size_bytes > self.left_bytes:
            raise CodecError(
                f"byte {self.offset}: {what} needs {size_bytes} bytes, found {self.left_bytes}: damaged "
                "or cut short"
            )
        at = self.offset - self._start
        self.offset += size_bytes
        return self._view[at : at + size_bytes]

    def byte(self, what: str, legal: Iterable[int]) -> int:
        """Return the next byte, which must be one of `legal`."""
        start = self.offset
        value = self.take(1, what)[0]
        if value not in legal:
            raise CodecError(f"byte {start}: {what} must be one of {tuple(legal)}, found {value}")
        return value

    def varint(self, what: str, minimum: int, maximum: int) -> int:
        """Return the next varint, in its shortest form, in `minimum..maximum`."""
        start = self.offset
        value = 0
        for index in range(_MAX_VARINT_BYTES):
            byte = self.take(1, what)[0]
            value |= (byte & 0x7F) << (_VARINT_BITS * index)
            if byte < 0x80:
                if minimum <= value <= maximum and (byte or not index):
                    return value
                break
        raise CodecError(
            f"byte {start}: {what} must be a number from {minimum} to {maximum} in its shortest "
            f"form, found {self._since(start)!r}"
        )

    def end(self) -> None:
        """Check that nothing is left.

        Raises:
            CodecError: there is.
        """
        if self.left_bytes:
            raise CodecError(
                f"byte {self.offset}: the payload must end here, found {self.left_bytes} bytes more"
            )

    def _since(self, offset: int) -> str:
        return bytes(self._view[offset - self._start : self.offset - self._start]).hex()
