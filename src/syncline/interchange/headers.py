"""Headers of safetensors files in a store, as others write them: read strictly, in any order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from syncline.abc import Store
from syncline.errors import FormatError
from syncline.format import names, strict_json
from syncline.format.digest import sha256
from syncline.format.table import tensor_meta
from syncline.types import ObjectInfo, TensorMeta

MAX_HEADER_BYTES = 100_000_000
"""What the safetensors library itself allows."""

_LENGTH_BYTES = 8
_FIRST_BYTES = 1 << 16
_KEYS = ("dtype", "shape", "data_offsets")


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one tensor lies: bytes `start:stop` of the object `key`."""

    meta: TensorMeta
    key: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Header:
    """A slot for every tensor of a file, in the order of the data, and the file's own metadata.

    `sha256` is that of the header's bytes, the length in front included.
    """

    slots: Mapping[str, Slot]
    metadata: Mapping[str, str]
    sha256: str


def read(store: Store, info: ObjectInfo) -> Header:
    """Return what the header of a safetensors file says, if its tensors tile the data.

    Raises:
        FormatError: the header is illegal, or the file is shorter or longer than it says; names the file.

    Cost: one read of 64 KiB; two where the header is longer.
    """
    where, size_bytes = info.key, info.size_bytes
    if size_bytes < _LENGTH_BYTES:
        raise FormatError(f"{where}: a safetensors file has at least 8 bytes, found {size_bytes}")
    start = store.get(info.key, 0, _FIRST_BYTES)
    data_start = _LENGTH_BYTES + int.from_bytes(start[:_LENGTH_BYTES], "little")
    if data_start > min(size_bytes, _LENGTH_BYTES + MAX_HEADER_BYTES):
        raise FormatError(
            f"{where}: the header must end within the file's {size_bytes} bytes, its length says "
            f"{data_start}; the file is cut short, or no safetensors file"
        )
    if data_start > len(start):
        start = store.get(info.key, 0, data_start)
    document = strict_json.members(
        strict_json.parse(start[_LENGTH_BYTES:data_start], where, limit_bytes=MAX_HEADER_BYTES),
        where,
    )
    metadata = _metadata(document.pop(names.METADATA, {}), where)
    slots = [_slot(name, row, info.key, data_start) for name, row in document.items()]
    slots.sort(key=lambda slot: (slot.start, slot.stop))
    _check_tiled(slots, data_start, size_bytes, where)
    by_name = {slot.meta.name: slot for slot in slots}
    return Header(by_name, metadata, sha256(start[:data_start]))


def _check_tiled(slots: list[Slot], data_start: int, size_bytes: int, where: str) -> None:
    position = data_start
    for slot in slots:
        if slot.start != position:
            raise FormatError(
                f"{where}: tensor {slot.meta.name!r} must begin at byte {position}, found "
                f"{slot.start}: a hole or an overlap",
                tensor=slot.meta.name,
            )
        position = slot.stop
    if position != size_bytes:
        raise FormatError(
            f"{where}: the header describes {position} bytes, the file has {size_bytes}; it is cut "
            "short or damaged"
        )


def _slot(name: str, row: object, key: str, data_start: int) -> Slot:
    path = f"tensor {name!r:.80}"
    names.check_tensor(name, f"{key}: a key of the header")
    fields = strict_json.Fields(row, key, _KEYS, path)
    meta = tensor_meta(name, fields["dtype"], fields["shape"], key, path)
    place = fields.place("data_offsets")
    offsets = [strict_json.integer(offset, place) for offset in fields.items("data_offsets")]
    if len(offsets) != 2 or offsets[1] - offsets[0] != meta.nbytes:
        fields.refuse("data_offsets", f"begin and end of {meta.nbytes} bytes")
    return Slot(meta, key, data_start + offsets[0], data_start + offsets[1])


def _metadata(value: object, where: str) -> dict[str, str]:
    metadata = strict_json.members(value, f"{where}: {names.METADATA}")
    for key, text in metadata.items():
        if not isinstance(text, str):
            raise FormatError(
                f"{where}: {names.METADATA}.{key:.80} must be a string, found {text!r:.80}"
            )
    return metadata
