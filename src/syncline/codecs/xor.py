"""`xor`: new XOR base over the whole tensor in one zstd frame, readable by the slime family."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar

import numpy as np

from syncline import kernels
from syncline.abc import Buffer, Codec
from syncline.codecs.payload import PIECE_BYTES, blaming
from syncline.codecs.prediction import STEP_BITS, place_bytes
from syncline.format import zstd
from syncline.types import Bits, Changes, TensorMeta, Window, unsigned

# Fitted to random places and steps; matches find some structure in gaps, so places cost more than
# their bound, and every block of 128 KiB costs something even if hardly anything is in it.
_FRAME_BYTES = 16
_PREDICTED_BLOCK_BYTES = 7
_PREDICTED_PLACE_RATIO = 2.7


class Xor(Codec):
    """Dense XOR through zstd; see `syncline.abc.Codec`. Holds one window at a time, both ways."""

    name: ClassVar[str] = "xor"
    needs_base: ClassVar[bool] = True
    is_idempotent: ClassVar[bool] = False
    is_full: ClassVar[bool] = False

    def encode(self, meta: TensorMeta, windows: Iterable[Window]) -> Iterator[Buffer]:
        """Yield the frame as the compressor lets go of it."""
        with blaming(meta, self.name):
            yield from zstd.compress_stream(map(_dense, windows), meta.nbytes)

    def decode(self, meta: TensorMeta, payload: Buffer, base: Bits) -> Iterator[Changes]:
        """Yield the changes of one piece of the tensor after another."""
        with blaming(meta, self.name):
            reader = zstd.Reader(payload, "byte 0", meta.nbytes)
            yield from changes_from(meta, reader.read, base)

    def predict_bytes(self, meta: TensorMeta, changed: int) -> int:
        """Return about the size for optimizer steps that lie anywhere alike."""
        if not meta.unit_count:
            return _FRAME_BYTES
        share = changed / meta.unit_count
        change_bytes = max(0.0, STEP_BITS[meta.unit_bytes] / 8 - 0.2) + 0.2 * min(1.0, 10 * share)
        blocks_bytes = _PREDICTED_BLOCK_BYTES * (meta.nbytes >> 17)
        places_bytes = _PREDICTED_PLACE_RATIO * place_bytes(meta, changed)
        return int(_FRAME_BYTES + blocks_bytes + places_bytes + change_bytes * changed)


def changes_from(meta: TensorMeta, read: Callable[[int], bytes], base: Bits) -> Iterator[Changes]:
    """Yield the changes that a tensor's dense XOR stands for, one piece of it after another.

    Args:
        read: returns so many next bytes of the XOR, or raises.
        base: (meta.unit_count,) bits that it was made on.
    """
    units = PIECE_BYTES // meta.unit_bytes
    nothing = np.zeros(min(units, meta.unit_count), unsigned(meta.unit_bytes))
    for start in range(0, max(meta.unit_count, 1), units):
        stop = min(start + units, meta.unit_count)
        dense = np.frombuffer(read((stop - start) * meta.unit_bytes), nothing.dtype)
        offsets, _, flips = kernels.diff(nothing[: stop - start], dense)
        if offsets.size:
            old = kernels.gather(base[start:stop], offsets)
            yield Changes(start, offsets, kernels.xor(old, flips), old)


def _dense(window: Window) -> memoryview:
    flips = np.zeros(window.new.size, window.new.dtype)
    kernels.scatter(flips, window.offsets, kernels.xor(window.old_bits, window.new_bits))
    return flips.data.cast("B")
