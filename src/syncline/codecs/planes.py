"""`planes`: every unit, split into byte planes of which zstd's entropy coder takes what is regular.

For BF16 and F32 units are first rotated left by one bit, so that the exponent fills the top plane.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from syncline import kernels
from syncline.abc import Buffer, Codec
from syncline.codecs import streams
from syncline.codecs.payload import Cursor, blaming, encode_windows, read_header
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


class Planes(Codec):
    """Byte planes through an entropy coder; see `syncline.abc.Codec`."""

    name: ClassVar[str] = "planes"
    needs_base: ClassVar[bool] = False
    is_idempotent: ClassVar[bool] = True
    is_full: ClassVar[bool] = True

    def encode(self, meta: TensorMeta, windows: Iterable[Window]) -> Iterator[Buffer]:
        """Yield the header, then one piece a window."""
        is_rotated = meta.dtype in _ROTATED

        def pack(window: Window) -> bytes:
            planes = kernels.split_planes(window.new, rotated=is_rotated)
            return streams.pack(list(planes), streams.compress_symbols)

        with blaming(meta, self.name):
            yield from encode_windows(int(is_rotated), meta, windows, pack)

    def decode(self, meta: TensorMeta, payload: Buffer, base: Bits) -> Iterator[Span]:
        """Yield one span a window."""
        names = [f"plane {index}" for index in range(meta.unit_bytes)]
        with blaming(meta, self.name):
            cursor = Cursor(payload)
            is_rotated, window_units = read_header(cursor, meta, (0, 1))
            for start in range(0, meta.unit_count, window_units):
                units = min(window_units, meta.unit_count - start)
                planes = [stream.content(units) for stream in streams.unpack(cursor, names)]
                yield Span(start, kernels.join_planes(planes, rotated=bool(is_rotated)))
            cursor.end()

    def predict_bytes(self, meta: TensorMeta, changed: int) -> int:
        """Return about the size for normally distributed weights, whatever has changed."""
        return int(meta.nbytes * _PREDICTED_RATIO.get(meta.dtype, 1.0))
