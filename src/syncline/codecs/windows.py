"""Payloads that are a header and then windows, each of which is coded and decoded on its own.

So windows can be worked on side by side, and what comes out does not depend on how that was done.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar

from syncline.abc import Buffer, Codec
from syncline.codecs.payload import Cursor, blaming, varint
from syncline.errors import CodecError
from syncline.types import Bits, Changes, Span, TensorMeta, Window

MAX_WINDOW_UNITS = 1 << 24
"""The largest window that a decoder takes, so that nobody else decides about its memory."""

Unpack = Callable[[Bits], Changes | Span | None]
"""Decodes one window: takes its bits in the base, returns what to overwrite, if anything."""


class WindowCodec(Codec):
    """A codec of such payloads; `encode` and `decode` go through the windows one by one.

    Class attributes:
        flags: values of the header's first byte that a decoder takes.
    """

    flags: ClassVar[tuple[int, ...]] = (0,)

    @abstractmethod
    def pack(self, meta: TensorMeta, window: Window) -> bytes:
        """Return what stands in the payload for one window that is not empty; on any thread."""

    @abstractmethod
    def locate(self, meta: TensorMeta, flag: int, cursor: Cursor, start: int, units: int) -> Unpack:
        """Move the cursor behind the window that begins at unit `start`; return what decodes it, on any thread.

        Cost: reads lengths, not content.
        """

    def flag(self, meta: TensorMeta) -> int:
        """Return the first byte of the header for this tensor."""
        return 0

    def head(self, meta: TensorMeta, window_units: int) -> bytes:
        """Return the header of a payload with windows of this size."""
        head = bytes((self.flag(meta), meta.unit_bytes))
        return head + varint(window_units) + varint(meta.unit_count)

    def read_head(self, meta: TensorMeta, cursor: Cursor) -> tuple[int, int]:
        """Move the cursor behind the header and return flag and window units.

        Raises:
            CodecError: another flag, or the header of a tensor with other units.
        """
        flag = cursor.byte("flag", self.flags)
        cursor.byte("unit bytes", (meta.unit_bytes,))
        window_units = cursor.varint("window units", 1, MAX_WINDOW_UNITS)
        cursor.varint("unit count", meta.unit_count, meta.unit_count)
        return flag, window_units

    def encode(self, meta: TensorMeta, windows: Iterable[Window]) -> Iterator[Buffer]:
        """Yield the header, then one piece a window.

        Raises:
            CodecError: windows that do not tile the tensor, are of several sizes, or too large.
        """
        with blaming(meta, self.name):
            window_units = position = 0
            for window in windows:
                units = window.new.size
                if not window_units:
                    window_units = max(1, units)
                    yield self.head(meta, window_units)
                expected = min(window_units, meta.unit_count - position)
                if window.start != position or units != expected or units > MAX_WINDOW_UNITS:
                    raise CodecError(
                        f"windows must be equally long, at most {MAX_WINDOW_UNITS} units, and tile "
                        f"the tensor: expected {expected} units at {position}, found {units} at "
                        f"{window.start}"
                    )
                position += units
                if units:
                    yield self.pack(meta, window)
            if not window_units:
                yield self.head(meta, 1)
            if position != meta.unit_count:
                raise CodecError(f"windows must tile {meta.unit_count} units, found {position}")

    def decode(self, meta: TensorMeta, payload: Buffer, base: Bits) -> Iterator[Changes | Span]:
        """Yield what every window overwrites."""
        for start, units, unpack in self.pieces(meta, payload):
            piece = unpack(base[start : start + units])
            if piece is not None:
                yield piece

    def pieces(self, meta: TensorMeta, payload: Buffer) -> Iterator[tuple[int, int, Unpack]]:
        """Yield for every window its first unit, its units, and what decodes it, on any thread.

        Raises:
            CodecError: a header of another tensor, a window cut short, or bytes after the last one.
        """
        with blaming(meta, self.name):
            cursor = Cursor(payload)
            flag, window_units = self.read_head(meta, cursor)
            for start in range(0, meta.unit_count, window_units):
                units = min(window_units, meta.unit_count - start)
                unpack = self.locate(meta, flag, cursor, start, units)
                yield start, units, self._blamed(meta, unpack)
            cursor.end()

    def _blamed(self, meta: TensorMeta, unpack: Unpack) -> Unpack:
        def blamed(base: Bits) -> Changes | Span | None:
            with blaming(meta, self.name):
                return unpack(base)

        return blamed
