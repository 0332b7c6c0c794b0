"""The tensor table of a manifest, as a JSON list and as the compressed sidecar file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from syncline.errors import CodecError, FormatError, LayoutError
from syncline.format import strict_json, zstd
from syncline.format.rules import MAX_DIMENSIONS
from syncline.types import Fingerprint, TensorMeta
from syncline.version import TensorEntry

MAX_INLINE_TENSORS = 64
"""A longer table lies beside the manifest, in the sidecar."""

MAX_SIDECAR_BYTES = 1 << 26
MAX_TABLE_BYTES = 1 << 27
"""Largest sidecar, compressed and as JSON: some 600,000 tensors."""

_KEYS = ("name", "dtype", "shape", "fingerprint", "encoding", "part", "changed")


def document(entries: Sequence[TensorEntry]) -> list[dict[str, Any]]:
    """Return the table as a JSON document."""
    return [
        {
            "name": entry.meta.name,
            "dtype": entry.meta.dtype,
            "shape": list(entry.meta.shape),
            "fingerprint": entry.fingerprint.hex(),
            "encoding": entry.encoding,
            "part": entry.part,
            "changed": entry.changed,
        }
        for entry in entries
    ]


def entries_of(value: object, where: str) -> tuple[TensorEntry, ...]:
    """Return the entries of a table that came out of JSON; types are checked, rules are not yet.

    Raises:
        FormatError: says file, index and member.
    """
    rows = strict_json.items(value, f"{where}: tensors")
    return tuple(_entry(row, where, f"tensors[{index}]") for index, row in enumerate(rows))


def pack(entries: Sequence[TensorEntry]) -> bytes:
    """Return the content of the sidecar: one zstd frame of the table as canonical JSON."""
    return zstd.compress(strict_json.dump(document(entries)))


def unpack(sidecar: bytes, where: str) -> tuple[TensorEntry, ...]:
    """Return the entries in a sidecar.

    Raises:
        FormatError: not one zstd frame, larger than `MAX_TABLE_BYTES`, or not a legal table.
    """
    try:
        text = zstd.decompress(sidecar, where, limit_bytes=MAX_TABLE_BYTES)
    except CodecError as error:
        raise FormatError(str(error)) from error
    return entries_of(strict_json.parse(text, where, limit_bytes=MAX_TABLE_BYTES), where)


def _entry(row: object, where: str, path: str) -> TensorEntry:
    fields = strict_json.Fields(row, where, _KEYS, path)
    meta = tensor_meta(fields.text("name"), fields["dtype"], fields["shape"], where, path)
    return TensorEntry(
        meta=meta,
        fingerprint=Fingerprint.from_hex(fields.hexadecimal("fingerprint", 32)),
        encoding=None if fields["encoding"] is None else fields.text("encoding"),
        part=None if fields["part"] is None else fields.integer("part"),
        changed=None if fields["changed"] is None else fields.integer("changed"),
    )


def tensor_meta(name: str, dtype: object, shape: object, where: str, path: str) -> TensorMeta:
    """Return the meta of a tensor whose dtype and shape came out of JSON.

    Raises:
        FormatError: the dtype is unknown; the shape is no list of at most `MAX_DIMENSIONS` sizes,
            or does not end on a byte.
    """
    place = f"{where}: {path}.shape"
    sides = strict_json.items(shape, place)
    if len(sides) > MAX_DIMENSIONS:
        raise FormatError(f"{place} must have at most {MAX_DIMENSIONS} sides, found {len(sides)}")
    counts = [strict_json.integer(side, f"{place}[{axis}]") for axis, side in enumerate(sides)]
    if not isinstance(dtype, str):
        raise FormatError(f"{where}: {path}.dtype must be a string, found {dtype!r:.80}")
    try:
        return TensorMeta(name, dtype, tuple(counts))
    except LayoutError as error:
        raise FormatError(f"{where}: {path}: {error}", tensor=name) from error
