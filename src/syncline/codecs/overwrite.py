"""`overwrite`: byte positions and new bytes in one zstd frame, readable by the slime family."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from tempfile import SpooledTemporaryFile
from typing import IO, ClassVar

import numpy as np
from numpy.typing import NDArray

from syncline import kernels
from syncline.abc import Buffer, Codec
from syncline.codecs.payload import PIECE_BYTES, blaming, placing
from syncline.codecs.prediction import CHANGED_BYTES
from syncline.errors import CodecError
from syncline.format import zstd
from syncline.types import Bits, Changes, TensorMeta, Window

_COUNT_BYTES = 4
_POSITION = np.dtype("<u4")
_CHANGE_BYTES = _POSITION.itemsize + 1
_LIMIT_BYTES = 1 << 32
_PIECE_CHANGES = 1 << 18
_SPOOL_BYTES = 1 << 24
_PREDICTED_CHANGE_BYTES = 4.3


class Overwrite(Codec):
    """Positions and new bytes; see `syncline.abc.Codec`. Tensors of 4 GiB and more are refused."""

    name: ClassVar[str] = "overwrite"
    needs_base: ClassVar[bool] = True
    is_idempotent: ClassVar[bool] = True
    is_full: ClassVar[bool] = False

    def encode(self, meta: TensorMeta, windows: Iterable[Window]) -> Iterator[Buffer]:
        """Yield the frame; until all windows are seen, changes wait in memory, then on disk."""
        with (
            blaming(meta, self.name),
            SpooledTemporaryFile(_SPOOL_BYTES) as positions,
            SpooledTemporaryFile(_SPOOL_BYTES) as values,
        ):
            _check_limit(meta)
            for window in windows:
                places, new_bytes = _changed_bytes(window)
                positions.write(places.tobytes())
                values.write(new_bytes.tobytes())
            count = values.tell()
            pieces = chain(
                [count.to_bytes(_COUNT_BYTES, "little")], _pieces(positions), _pieces(values)
            )
            yield from zstd.compress_stream(pieces, _COUNT_BYTES + _CHANGE_BYTES * count)

    def decode(self, meta: TensorMeta, payload: Buffer, base: Bits) -> Iterator[Changes]:
        """Yield changes of whole units; the bytes that a unit keeps come from the base."""
        with blaming(meta, self.name):
            _check_limit(meta)
            places, new_bytes = np.empty(0, _POSITION), np.empty(0, np.uint8)
            done = 0
            for more_places, more_bytes, is_last in _read(payload, meta):
                places = np.concatenate((places, more_places))
                new_bytes = np.concatenate((new_bytes, more_bytes))
                with placing(f"byte 0 of the frame's content: of the positions from {done} on"):
                    kernels.check_ascending(places, meta.nbytes)
                units = places // meta.unit_bytes
                # The last unit may go on in the next piece, so it waits for that.
                whole = places.size if is_last else int(np.searchsorted(units, units[-1]))
                if whole:
                    yield _merge(meta, places[:whole], new_bytes[:whole], base)
                places, new_bytes, done = places[whole:], new_bytes[whole:], done + whole

    def predict_bytes(self, meta: TensorMeta, changed: int) -> int:
        """Return about the size for optimizer steps that lie anywhere alike."""
        return int(16 + _PREDICTED_CHANGE_BYTES * CHANGED_BYTES[meta.unit_bytes] * changed)


def _check_limit(meta: TensorMeta) -> None:
    if meta.nbytes >= _LIMIT_BYTES:
        raise CodecError(
            f"positions have 32 bits, so the tensor must be below {_LIMIT_BYTES} bytes, found "
            f"{meta.nbytes}; use another encoding"
        )


def _changed_bytes(window: Window) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
    """Return the positions of the bytes that differ, in the tensor, and what they become."""
    unit_bytes = window.new.dtype.itemsize
    new_bytes = np.ascontiguousarray(window.new_bits).view(np.uint8).reshape(-1, unit_bytes)
    flips = kernels.xor(window.old_bits, window.new_bits).view(np.uint8).reshape(-1, unit_bytes)
    rows, columns = np.nonzero(flips)
    places = (window.start + window.offsets[rows].astype(np.uint64)) * unit_bytes + columns
    return places.astype(_POSITION), new_bytes[rows, columns]


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    file.seek(0)
    while piece := file.read(PIECE_BYTES):
        yield piece


def _read(
    payload: Buffer, meta: TensorMeta
) -> Iterator[tuple[NDArray[np.uint32], NDArray[np.uint8], bool]]:
    """Yield positions, new bytes and whether they are the last; two readers share one frame."""
    size_bytes = zstd.inspect(payload, "byte 0").content_bytes
    count = (size_bytes - _COUNT_BYTES) // _CHANGE_BYTES
    if not 0 <= count <= meta.nbytes or size_bytes != _COUNT_BYTES + _CHANGE_BYTES * count:
        raise CodecError(
            f"byte 0: the frame's content must be 4 bytes and 5 for each of at most {meta.nbytes} "
            f"changed bytes, found {size_bytes}"
        )
    positions = zstd.Reader(payload, "byte 0", size_bytes)
    found = int.from_bytes(positions.read(_COUNT_BYTES), "little")
    if found != count:
        raise CodecError(f"byte 0 of the frame's content: count must be {count}, found {found}")
    values = zstd.Reader(payload, "byte 0", size_bytes)
    _skip(values, _COUNT_BYTES + _POSITION.itemsize * count)
    for start in range(0, count, _PIECE_CHANGES):
        changes = min(_PIECE_CHANGES, count - start)
        places = np.frombuffer(positions.read(_POSITION.itemsize * changes), _POSITION)
        new_bytes = np.frombuffer(values.read(changes), np.uint8)
        yield places, new_bytes, start + changes == count


def _skip(reader: zstd.Reader, size_bytes: int) -> None:
    for start in range(0, size_bytes, PIECE_BYTES):
        reader.read(min(PIECE_BYTES, size_bytes - start))


def _merge(
    meta: TensorMeta, places: NDArray[np.uint32], new_bytes: NDArray[np.uint8], base: Bits
) -> Changes:
    """Return the changes of the units in which the places lie, all bytes of each together."""
    units = places // meta.unit_bytes
    is_first = np.concatenate(([True], units[1:] != units[:-1]))
    start, stop = int(units[0]), int(units[-1]) + 1
    offsets = units[is_first] - np.uint32(start)
    bits = kernels.gather(base[start:stop], offsets)
    rows = np.cumsum(is_first) - 1
    bits.view(np.uint8).reshape(-1, meta.unit_bytes)[rows, places % meta.unit_bytes] = new_bytes
    return Changes(start, offsets, bits)
