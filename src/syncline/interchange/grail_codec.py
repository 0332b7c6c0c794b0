"""`delta_sparse.bin.zst` of PULSE/grail: one zstd frame of a header and every tensor's positions and values.

The content is a little-endian u32 header length, a JSON header, then for each tensor its positions
(version 2: int32 differences; 3 and 3.1: differences of rows and of columns) and its values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from syncline.abc import Store
from syncline.errors import CodecError, FormatError
from syncline.format import names, strict_json, zstd
from syncline.format.table import tensor_meta
from syncline.types import Bits, ObjectInfo, TensorMeta, unsigned

VERSIONS = {"sparse_codec_v2": 2, "sparse_codec_v3": 3, "sparse_codec_v3.1": 31}
"""The number in the header by the name in `delta_metadata.json`."""

_VALUE_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_INDEX_DTYPES = {"uint8": "<u1", "uint16": "<u2", "int32": "<i4"}
_MAX_HEADER_BYTES = 1 << 27
_LENGTH_BYTES = 4
_PREFIX_BYTES = 1 << 18
_ALWAYS = (
    "name",
    "shape",
    "num_nonzero",
    "value_dtype",
    "indices_offset",
    "indices_size",
    "values_offset",
    "values_size",
)
_ROWS = ("rows_size", "cols_size")
_NARROW = ("row_dtype", "col_dtype")


@dataclass(frozen=True, slots=True)
class Block:
    """One tensor of a file: what it is, how many elements changed, and how positions are coded.

    Attributes:
        rows, columns: numpy dtypes of the differences of rows and columns; of version 2, whose positions
            are flat, `rows` is that of the differences and `columns` None.
    """

    meta: TensorMeta
    count: int
    rows: str
    columns: str | None

    @property
    def nbytes(self) -> int:
        """Bytes of positions and values together."""
        widths = [np.dtype(self.rows).itemsize, self.meta.unit_bytes]
        if self.columns is not None:
            widths.append(np.dtype(self.columns).itemsize)
        return self.count * sum(widths)


@dataclass(frozen=True, slots=True)
class Header:
    """What stands before the data: which codec, the blocks, and bytes up to the data."""

    version: int
    blocks: tuple[Block, ...]
    size_bytes: int


def peek(store: Store, info: ObjectInfo) -> Header:
    """Return the header of a file without reading much more of it.

    Raises:
        CodecError: the file does not begin a zstd frame.
        FormatError: the header is illegal, or the file ends before it does.
    """
    prefix_bytes = _PREFIX_BYTES
    while True:
        prefix = store.get(info.key, 0, prefix_bytes)
        length = zstd.beginning(prefix, info.key, _LENGTH_BYTES)
        header_bytes = int.from_bytes(length, "little")
        _check_length(header_bytes, _MAX_HEADER_BYTES, info.key)
        text = zstd.beginning(prefix, info.key, _LENGTH_BYTES + header_bytes)[_LENGTH_BYTES:]
        if len(length) == _LENGTH_BYTES and len(text) == header_bytes:
            return _header(text, info.key)
        if len(prefix) < prefix_bytes:  # the end, though it was listed with more
            raise FormatError(
                f"{info.key}: a header length of 4 bytes and {header_bytes} bytes of header must be there, "
                f"found {len(length) + len(text)}: the file is cut short"
            )
        prefix_bytes *= 4


class File:
    """An open file: its blocks, then their contents one by one, in order.

    Args:
        frame: the whole file.
        where: its name, for messages.

    Raises:
        CodecError: not one whole zstd frame.
        FormatError: the header is illegal, or the content is not as long as it says.

    Memory: the header and one block, beside the frame.
    """

    def __init__(self, frame: bytes, where: str) -> None:
        total_bytes = zstd.inspect(frame, where).content_bytes
        if total_bytes < _LENGTH_BYTES:
            raise FormatError(f"{where}: expected at least 4 bytes, found {total_bytes}")
        self._reader = zstd.Reader(frame, where, total_bytes)
        header_bytes = int.from_bytes(self._reader.read(_LENGTH_BYTES), "little")
        _check_length(header_bytes, min(_MAX_HEADER_BYTES, total_bytes - _LENGTH_BYTES), where)
        header = _header(self._read(header_bytes), where)
        self.blocks = header.blocks
        described_bytes = sum(block.nbytes for block in self.blocks)
        left_bytes = total_bytes - header.size_bytes
        if described_bytes != left_bytes:
            raise FormatError(
                f"{where}: the header describes {described_bytes} bytes of positions and values, the frame "
                f"holds {left_bytes}"
            )

    def contents(self) -> Iterator[tuple[Block, NDArray[np.int64], Bits]]:
        """Yield each block with its positions and its new bits; positions are not checked yet."""
        for block in self.blocks:
            rows = self._array(block.count, block.rows)
            if block.columns is None:
                positions = np.cumsum(rows)
            else:
                positions = _flat(block, rows, self._array(block.count, block.columns))
            raw = self._read(block.count * block.meta.unit_bytes)
            yield block, positions, np.frombuffer(raw, unsigned(block.meta.unit_bytes))

    def _array(self, count: int, dtype: str) -> NDArray[np.int64]:
        return np.frombuffer(self._read(count * np.dtype(dtype).itemsize), dtype).astype(np.int64)

    def _read(self, size_bytes: int) -> bytes:
        # Nothing is read where nothing is left: the frame's end has been proved with its last byte.
        return self._reader.read(size_bytes) if size_bytes else b""


def _check_length(header_bytes: int, most_bytes: int, where: str) -> None:
    if header_bytes > most_bytes:
        raise FormatError(
            f"{where}: the header length must be at most {most_bytes}, found {header_bytes}"
        )


def _header(text: bytes, where: str) -> Header:
    fields = strict_json.Fields(
        strict_json.parse(text, where, limit_bytes=_MAX_HEADER_BYTES), where, ("version", "tensors")
    )
    version = fields.integer("version")
    if version not in VERSIONS.values():
        fields.refuse("version", "2, 3 or 31")
    return Header(version, tuple(_blocks(fields, version, where)), _LENGTH_BYTES + len(text))


def _blocks(fields: strict_json.Fields, version: int, where: str) -> list[Block]:
    blocks: list[Block] = []
    seen: set[str] = set()
    position = 0
    for number, row in enumerate(fields.items("tensors")):
        block, stop = _block(row, version, where, f"tensors[{number}]", position)
        if block.meta.name in seen:
            raise FormatError(
                f"{where}: tensors[{number}].name: tensor {block.meta.name!r} is there twice",
                tensor=block.meta.name,
            )
        seen.add(block.meta.name)
        blocks.append(block)
        position = stop
    return blocks


def _block(row: object, version: int, where: str, path: str, position: int) -> tuple[Block, int]:
    keys = {2: _ALWAYS, 3: (*_ALWAYS, *_ROWS), 31: (*_ALWAYS, *_ROWS, *_NARROW)}[version]
    fields = strict_json.Fields(row, where, keys, path)
    name = fields.text("name")
    names.check_tensor(name, fields.place("name"))
    dtype = _VALUE_DTYPES[fields.word("value_dtype", *_VALUE_DTYPES)]
    meta = tensor_meta(name, dtype, fields["shape"], where, path)
    count = fields.integer("num_nonzero", maximum=meta.count)
    rows, columns = "<i4", None if version == 2 else "<i4"
    if version == 31:
        rows = _INDEX_DTYPES[fields.word("row_dtype", *_INDEX_DTYPES)]
        columns = _INDEX_DTYPES[fields.word("col_dtype", *_INDEX_DTYPES)]
    block = Block(meta, count, rows, columns)
    values_bytes = count * meta.unit_bytes
    expected = {
        "indices_offset": position,
        "indices_size": block.nbytes - values_bytes,
        "values_offset": position + block.nbytes - values_bytes,
        "values_size": values_bytes,
    }
    if columns is not None:
        expected["rows_size"] = count * np.dtype(rows).itemsize
        expected["cols_size"] = count * np.dtype(columns).itemsize
    for key, wanted in expected.items():
        if fields.integer(key) != wanted:
            fields.refuse(key, f"{wanted}, without hole or overlap")
    return block, position + block.nbytes


def _flat(
    block: Block, row_steps: NDArray[np.int64], column_steps: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return flat positions: rows add up; columns add up within a row and begin anew with each."""
    if not row_steps.size:
        return row_steps
    if (row_steps < 0).any() or (column_steps < 0).any():
        raise CodecError(
            f"tensor {block.meta.name!r}: differences of positions must not be negative"
        )
    width = max(1, block.meta.count // max(1, block.meta.shape[0])) if block.meta.shape else 1
    is_new = row_steps != 0
    is_new[0] = True
    begins = np.maximum.accumulate(np.where(is_new, np.arange(is_new.size), 0))
    summed = np.cumsum(column_steps)
    columns = summed - (summed - column_steps)[begins]
    rows = np.cumsum(row_steps)
    if rows[-1] >= max(1, block.meta.count // width) or (columns >= width).any():
        raise CodecError(
            f"tensor {block.meta.name!r}: rows and columns must lie in {list(block.meta.shape)}"
        )
    return rows * width + columns
