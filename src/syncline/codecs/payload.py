"""What payloads have in common: errors with a name, the grid of windows, a cursor, and varints.

The payloads of `planes` and `packed` are a header and then, one after another, windows that can be
coded and decoded on their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

from syncline.abc import Buffer
from syncline.errors import CodecError, FormatError
from syncline.types import TensorMeta, Window

MAX_WINDOW_UNITS = 1 << 24
"""The largest window that a decoder takes, so that nobody else decides about its memory."""

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
    """Reads a payload from front to back and never past its end; errors name the offset."""

    def __init__(self, payload: Buffer) -> None:
        self._view = memoryview(payload).cast("B")
        self.offset = 0

    def take(self, size_bytes: int, what: str) -> memoryview:
        """Return a view of the next `size_bytes`.

        Raises:
            CodecError: the payload ends before.
        """
        left_bytes = len(self._view) - self.offset
        if size_bytes > left_bytes:
            raise CodecError(
                f"byte {self.offset}: {what} needs {size_bytes} bytes, found {left_bytes}: damaged "
                "or cut short"
            )
        self.offset += size_bytes
        return self._view[self.offset - size_bytes : self.offset]

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
            f"form, found {bytes(self._view[start : self.offset]).hex()!r}"
        )

    def end(self) -> None:
        """Check that nothing is left.

        Raises:
            CodecError: there is.
        """
        if self.offset != len(self._view):
            raise CodecError(
                f"byte {self.offset}: the payload must end here, found {len(self._view)} bytes"
            )


def encode_windows(
    flag: int, meta: TensorMeta, windows: Iterable[Window], pack: Callable[[Window], bytes]
) -> Iterator[bytes]:
    """Yield header and windows of a payload.

    Args:
        flag: first byte of the header.
        meta: the tensor's.
        windows: they tile the tensor, and all but the last are equally long.
        pack: returns what stands in the payload for one window.

    Raises:
        CodecError: the windows do not tile the tensor so, or are larger than `MAX_WINDOW_UNITS`.
    """
    window_units = position = 0
    for window in windows:
        units = window.new.size
        if not window_units:
            window_units = max(1, units)
            yield _header(flag, meta, window_units)
        expected = min(window_units, meta.unit_count - position)
        if window.start != position or units != expected or units > MAX_WINDOW_UNITS:
            raise CodecError(
                f"windows must be equally long, at most {MAX_WINDOW_UNITS} units, and tile the "
                f"tensor: expected {expected} units at {position}, found {units} at {window.start}"
            )
        position += units
        if units:
            yield pack(window)
    if not window_units:
        yield _header(flag, meta, 1)
    if position != meta.unit_count:
        raise CodecError(f"windows must tile {meta.unit_count} units, found {position}")


def read_header(cursor: Cursor, meta: TensorMeta, flags: Iterable[int]) -> tuple[int, int]:
    """Return flag and window units out of the header that `encode_windows` writes.

    Raises:
        CodecError: another flag, or the header of a tensor with other units.
    """
    flag = cursor.byte("flag", flags)
    cursor.byte("unit bytes", (meta.unit_bytes,))
    window_units = cursor.varint("window units", 1, MAX_WINDOW_UNITS)
    cursor.varint("unit count", meta.unit_count, meta.unit_count)
    return flag, window_units


def _header(flag: int, meta: TensorMeta, window_units: int) -> bytes:
    return bytes((flag, meta.unit_bytes)) + varint(window_units) + varint(meta.unit_count)
