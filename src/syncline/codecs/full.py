"""`full`: a tensor's raw bytes, as they stand in any safetensors file."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from syncline.codecs.payload import Cursor
from syncline.codecs.windows import Unpack, WindowCodec
from syncline.errors import CodecError
from syncline.types import WINDOW_UNITS, Span, TensorMeta, Window, unsigned


class Full(WindowCodec):
    """Raw bytes; see `syncline.abc.Codec`. Spans are views of the payload, nothing is copied."""

    name: ClassVar[str] = "full"
    needs_base: ClassVar[bool] = False
    is_idempotent: ClassVar[bool] = True
    is_full: ClassVar[bool] = True

    def head(self, meta: TensorMeta, window_units: int) -> bytes:
        """Return nothing: the bits speak for themselves."""
        return b""

    def pack(self, meta: TensorMeta, window: Window) -> bytes:
        """Return a copy of the new bits of one window."""
        return window.new.tobytes()

    def read_head(self, meta: TensorMeta, cursor: Cursor) -> tuple[int, int]:
        """Check the payload's size.

        Raises:
            CodecError: it is not the tensor's.
        """
        if cursor.left_bytes != meta.nbytes:
            raise CodecError(
                f"the payload must be {meta.nbytes} bytes long, found {cursor.left_bytes}"
            )
        return 0, WINDOW_UNITS

    def locate(self, meta: TensorMeta, flag: int, cursor: Cursor, start: int, units: int) -> Unpack:
        """Take the bits of the window at the cursor."""
        raw = cursor.take(units * meta.unit_bytes, "window")
        return lambda _: Span(start, np.frombuffer(raw, unsigned(meta.unit_bytes)))

    def predict_bytes(self, meta: TensorMeta, changed: int) -> int:
        """Return the tensor's size."""
        return meta.nbytes
