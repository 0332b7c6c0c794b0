"""`planes`: every unit, split into byte planes of which zstd's entropy coder takes what is regular.

For BF16 and F32 units are first rotated left by one bit, so that the exponent fills the top plane.
"""

from __future__ import annotations

from typing import ClassVar

from syncline import kernels
from syncline.codecs import streams
from syncline.codecs.payload import Cursor
from syncline.codecs.windows import Unpack, WindowCodec
from syncline.types import Bits, Span, TensorMeta, Window

_ROTATED = frozenset({"BF16", "F32"})

# Measured on normally distributed weights; other dtypes are taken for noise.
_PREDICTED_RATIO = {
    "BF16": 0.663,
    "F16": 0.843,
    "F32": 0.831,
    "F64": 0.878,
    "F8_E4M3": 0.817,
    "F8_E5M2": 0.693,
}


class Planes(WindowCodec):
    """Byte planes through an entropy coder; see `syncline.abc.Codec`."""

    name: ClassVar[str] = "planes"
    needs_base: ClassVar[bool] = False
    is_idempotent: ClassVar[bool] = True
    is_full: ClassVar[bool] = True
    flags: ClassVar[tuple[int, ...]] = (0, 1)

    def flag(self, meta: TensorMeta) -> int:
        """Return whether units are rotated."""
        return int(meta.dtype in _ROTATED)

    def pack(self, meta: TensorMeta, window: Window) -> bytes:
        """Return the planes of one window."""
        planes = kernels.split_planes(window.new, rotated=bool(self.flag(meta)))
        return streams.pack(list(planes), streams.compress_symbols)

    def locate(self, meta: TensorMeta, flag: int, cursor: Cursor, start: int, units: int) -> Unpack:
        """Find the planes of the window at the cursor."""
        found = streams.unpack(cursor, [f"plane {index}" for index in range(meta.unit_bytes)])

        def unpack(_: Bits) -> Span:
            planes = [stream.content(units) for stream in found]
            return Span(start, kernels.join_planes(planes, rotated=bool(flag)))

        return unpack

    def predict_bytes(self, meta: TensorMeta, changed: int) -> int:
        """Return about the size for normally distributed weights, whatever has changed."""
        return int(meta.nbytes * _PREDICTED_RATIO.get(meta.dtype, 1.0))
