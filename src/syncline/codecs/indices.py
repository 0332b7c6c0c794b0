"""`indices`: positions and new bits as they are; the quickest to make and to read, and needs no base."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from syncline import kernels
from syncline.codecs.payload import Cursor, placing, varint
from syncline.codecs.windows import Unpack, WindowCodec
from syncline.types import WINDOW_UNITS, Bits, Changes, TensorMeta, Window, unsigned

_OFFSET = np.dtype("<u4")


class Indices(WindowCodec):
    """Raw offsets and raw units; see `syncline.abc.Codec`."""

    name: ClassVar[str] = "indices"
    needs_base: ClassVar[bool] = False
    is_idempotent: ClassVar[bool] = True
    is_full: ClassVar[bool] = False

    def pack(self, meta: TensorMeta, window: Window) -> bytes:
        """Return count, offsets and units of one window."""
        count = varint(window.offsets.size)
        return (
            count + window.offsets.astype(_OFFSET, copy=False).tobytes() + window.new_bits.tobytes()
        )

    def locate(self, meta: TensorMeta, flag: int, cursor: Cursor, start: int, units: int) -> Unpack:
        """Find offsets and units of the window at the cursor."""
        count = cursor.varint("change count", 0, units)
        at = cursor.offset
        offsets = cursor.take(_OFFSET.itemsize * count, "offsets")
        bits = cursor.take(meta.unit_bytes * count, "units")

        def unpack(_: Bits) -> Changes | None:
            if not count:
                return None
            # Copied, because the payload keeps them at any address.
            places = np.frombuffer(offsets, _OFFSET).copy()
            with placing(f"byte {at}"):
                kernels.check_ascending(places, units)
            return Changes(start, places, np.frombuffer(bits, unsigned(meta.unit_bytes)).copy())

        return unpack

    def predict_bytes(self, meta: TensorMeta, changed: int) -> int:
        """Return the size, but for a few bytes a window."""
        window_count = -(-meta.unit_count // WINDOW_UNITS)
        return 12 + 3 * window_count + (_OFFSET.itemsize + meta.unit_bytes) * changed
