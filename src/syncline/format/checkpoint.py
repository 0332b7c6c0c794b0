"""Hugging Face checkpoints as they are found on disk: which tensor lies where.

Stricter than most loaders: the tensors of a file must tile its data, and an index must agree with the
files that it names, or nothing of the checkpoint is used. Other writers order headers as they like, so
unlike `part` this takes them in any order.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from syncline.errors import ConfigError, FormatError, StoreError
from syncline.format import names, strict_json
from syncline.format.table import tensor_meta
from syncline.types import Bits, TensorMeta, unsigned

SINGLE = "model.safetensors"
"""What a checkpoint's only file is called."""

_MAX_HEADER_BYTES = 100_000_000
_MAX_INDEX_BYTES = 1 << 28
_LENGTH_BYTES = 8
_KEYS = ("dtype", "shape", "data_offsets")


@dataclass(frozen=True, slots=True)
class Place:
    """Where one tensor lies: `meta.nbytes` bytes of the file at `path`, from byte `start` on."""

    meta: TensorMeta
    path: Path
    start: int


class MappedFiles:
    """Read-only views of tensors, mapped from their files; each file is mapped once, when it is needed.

    A file that another program cuts short while it is mapped kills the process: checkpoints that are
    being read must not be rewritten in place.
    """

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}

    def bits(self, place: Place) -> Bits:
        """Return a tensor's bits. Aliasing: a view of the file, which it keeps mapped."""
        dtype = unsigned(place.meta.unit_bytes)
        if place.meta.nbytes == 0:
            return np.frombuffer(b"", dtype)
        mapped = self._maps.get(place.path)
        if mapped is None:
            mapped = self._maps[place.path] = _map(place.path)
        raw = np.frombuffer(mapped, np.uint8, place.meta.nbytes, place.start)
        return raw.view(dtype)


def locate(path: Path) -> dict[str, Place]:
    """Return the place of every tensor of a checkpoint, in the order of files and offsets.

    Args:
        path: a safetensors file; or a directory with `model.safetensors.index.json`, or else with
            `model.safetensors` or a single file of another name. Where there is an index, files that it
            does not name do not belong to the checkpoint.

    Raises:
        ConfigError: there is no checkpoint.
        FormatError: a header or the index is illegal, they disagree, or files are missing; says where.
        StoreError: the system refuses to read.
    """
    if path.is_file():
        return read_places(path)
    if not path.is_dir():
        raise ConfigError(
            f"{path}: expected a safetensors file or a checkpoint directory, found none"
        )
    if (path / names.INDEX).exists():
        return _locate_by_index(path)
    return read_places(_only_file(path))


def read_places(path: Path) -> dict[str, Place]:
    """Return the places in one safetensors file, in the order of offsets.

    Raises:
        FormatError: the header is illegal, or its tensors do not tile the data; says which.
        StoreError: the system refuses to read.
    """
    text, size_bytes = _read_header(path)
    document = strict_json.members(
        strict_json.parse(text, str(path), limit_bytes=_MAX_HEADER_BYTES), str(path)
    )
    _check_metadata(document.pop(names.METADATA, {}), path)
    data_start = _LENGTH_BYTES + len(text)
    places = [_place(name, row, path, data_start) for name, row in document.items()]
    places.sort(key=lambda place: (place.start, place.meta.nbytes))
    position = data_start
    for place in places:
        if place.start != position:
            raise FormatError(
                f"{path}: tensor {place.meta.name!r} must begin at byte {position - data_start} of the "
                f"data, found {place.start - data_start}: a hole or an overlap",
                tensor=place.meta.name,
            )
        position += place.meta.nbytes
    if position != size_bytes:
        raise FormatError(
            f"{path}: the header describes {position} bytes, the file has {size_bytes}; "
            "it is cut short or damaged"
        )
    return {place.meta.name: place for place in places}


def _locate_by_index(directory: Path) -> dict[str, Place]:
    path = directory / names.INDEX
    weight_map = _weight_map(path)
    places: dict[str, Place] = {}
    for part in sorted(set(weight_map.values())):
        if not (directory / part).is_file():
            raise FormatError(
                f"{path}: weight_map names {part!r}, which is missing from {directory}"
            )
        for name, place in read_places(directory / part).items():
            if weight_map.get(name) != part:
                where = weight_map.get(name, "no file")
                raise FormatError(
                    f"{path}: tensor {name!r} is in {part!r}, but weight_map says {where!r}; "
                    "every tensor must be in exactly one file",
                    tensor=name,
                )
            places[name] = place
    for name in weight_map:
        if name not in places:
            raise FormatError(
                f"{path}: weight_map says that tensor {name!r} is in {weight_map[name]!r}, "
                "which does not hold it",
                tensor=name,
            )
    return places


def _weight_map(path: Path) -> dict[str, str]:
    where = str(path)
    data = _read(path, _MAX_INDEX_BYTES)
    document = strict_json.members(
        strict_json.parse(data, where, limit_bytes=_MAX_INDEX_BYTES), where
    )
    for key in document.keys() - {"metadata", "weight_map"}:
        raise FormatError(
            f"{where}: {key:.80} is not a known key; known are metadata and weight_map"
        )
    metadata = strict_json.members(document.get("metadata", {}), f"{where}: metadata")
    if "delta_encoding" in metadata:
        raise FormatError(
            f"{where}: metadata.delta_encoding is {metadata['delta_encoding']!r:.80}: this directory "
            "holds a delta or compressed payloads, no weights; pull it into a checkpoint first"
        )
    weight_map = strict_json.members(document.get("weight_map"), f"{where}: weight_map")
    for name, part in weight_map.items():
        if not names.is_part(part):
            raise FormatError(
                f"{where}: weight_map[{name!r:.80}] must be the name of a {names.PART_SUFFIX} file in "
                f"the same directory, found {part!r:.80}",
                tensor=name,
            )
    return weight_map


def _only_file(directory: Path) -> Path:
    """Return the file of a checkpoint without index."""
    if (directory / SINGLE).exists():
        return directory / SINGLE
    found = sorted(path.name for path in directory.glob("*" + names.PART_SUFFIX))
    if not found:
        raise ConfigError(
            f"{directory}: expected {names.INDEX}, {SINGLE} or another {names.PART_SUFFIX} file, "
            "found none"
        )
    if len(found) > 1 or "-of-" in found[0]:
        raise FormatError(
            f"{directory}: found {', '.join(found[:4])} but no {names.INDEX} to say which files belong "
            "together; the checkpoint is not complete"
        )
    return directory / found[0]


def _place(name: str, row: object, path: Path, data_start: int) -> Place:
    inside = f"tensor {name!r:.80}"
    names.check_tensor(name, f"{path}: a key of the header")
    fields = strict_json.Fields(row, str(path), _KEYS, inside)
    meta = tensor_meta(name, fields["dtype"], fields["shape"], str(path), inside)
    place = fields.place("data_offsets")
    offsets = [strict_json.integer(offset, place) for offset in fields.items("data_offsets")]
    if len(offsets) != 2 or offsets[1] - offsets[0] != meta.nbytes:
        fields.refuse("data_offsets", f"begin and end of {meta.nbytes} bytes")
    return Place(meta, path, data_start + offsets[0])


def _check_metadata(value: object, path: Path) -> None:
    for key, text in strict_json.members(value, f"{path}: {names.METADATA}").items():
        if not isinstance(text, str):
            raise FormatError(
                f"{path}: {names.METADATA}.{key:.80} must be a string, found {text!r:.80}"
            )


def _read_header(path: Path) -> tuple[bytes, int]:
    """Return the JSON text of a file's header, and the size of the file."""
    try:
        with path.open("rb") as file:
            size_bytes = file.seek(0, 2)
            file.seek(0)
            if size_bytes < _LENGTH_BYTES:
                raise FormatError(
                    f"{path}: expected a safetensors file, found {size_bytes} bytes, too few for one"
                )
            length_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            most_bytes = min(_MAX_HEADER_BYTES, size_bytes - _LENGTH_BYTES)
            if length_bytes > most_bytes:
                raise FormatError(
                    f"{path}: the header length must be at most {most_bytes}, found {length_bytes}; "
                    "this is no whole safetensors file"
                )
            text = file.read(length_bytes)
    except OSError as error:
        raise StoreError(f"read {path}: {error.strerror}") from error
    if not text.startswith(b"{"):
        raise FormatError(f"{path}: the header must begin with '{{', found {text[:1]!r}")
    return text, size_bytes


def _read(path: Path, limit_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(limit_bytes + 1)
    except OSError as error:
        raise StoreError(f"read {path}: {error.strerror}") from error


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise StoreError(f"map {path}: {error.strerror}") from error
