"""`full`: a tensor's raw bytes, as they stand in any safetensors file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

import numpy as np

from syncline.abc import Buffer, Codec
from syncline.codecs.payload import PIECE_BYTES, blaming
from syncline.errors import CodecError
from syncline.types import Bits, Span, TensorMeta, Window, unsigned


class Full(Codec):
    """Raw bytes; see `syncline.abc.Codec`. Spans are views of the payload, nothing is copied."""

    name: ClassVar[str] = "full"
    needs_base: ClassVar[bool] = False
    is_idempotent: ClassVar[bool] = True
    is_full: ClassVar[bool] = True

    def encode(self, meta: TensorMeta, windows: Iterable[Window]) -> Iterator[Buffer]:
        """Yield the new bits window by window, each a copy."""
        for window in windows:
            yield window.new.tobytes()

    def decode(self, meta: TensorMeta, payload: Buffer, base: Bits) -> Iterator[Span]:
        """Yield spans that are views of the payload."""
        view = memoryview(payload).cast("B")
        with blaming(meta, self.name):
            if len(view) != meta.nbytes:
                raise CodecError(f"the payload must be {meta.nbytes} bytes long, found {len(view)}")
            bits = np.frombuffer(view, unsigned(meta.unit_bytes))
            units = PIECE_BYTES // meta.unit_bytes
            for start in range(0, meta.unit_count, units):
                yield Span(start, bits[start : start + units])

    def predict_bytes(self, meta: TensorMeta, changed: int) -> int:
        """Return the tensor's size."""
        return meta.nbytes
