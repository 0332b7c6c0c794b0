"""`model.safetensors.index.json` of a slime-layout version, read strictly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from syncline.errors import FormatError
from syncline.format import checksum, names, strict_json
from syncline.format.rules import INTERCHANGE_ENCODINGS

RAW = "raw"
"""What `ForeignVersion.encoding` says of a full version."""

_MAX_INDEX_BYTES = 1 << 28
_DELTA_KEYS = ("version", "base_version", "delta_encoding", "compression_format", "checksum_format")
_REMARKS = ("total_size", "total_parameters")


@dataclass(frozen=True, slots=True)
class Index:
    """What the index of one version says.

    Attributes:
        version, base_version: as written; None of a full version that does not say them.
        encoding: `xor` or `overwrite`; `RAW` of a full version.
        checksum: name of the digests in the parts; None of a full version without.
        weight_map: tensor name -> file name.
    """

    version: str | None
    base_version: str | None
    encoding: str
    checksum: str | None
    weight_map: Mapping[str, str]

    @property
    def is_delta(self) -> bool:
        """Whether the version needs a base."""
        return self.encoding != RAW


def is_delta(data: bytes, where: str) -> bool:
    """Tell whether an index is of a delta, as far as that can be told without the other rules."""
    metadata = _document(data, where)[0]
    return "delta_encoding" in metadata


def load(data: bytes, where: str) -> Index:
    """Return what an index says.

    Raises:
        FormatError: an unknown or a missing key, encoding, compression or checksum; a tensor named
            twice; a file outside the directory. Names the file and the field.
    """
    metadata, weight_map = _document(data, where)
    for name, part in weight_map.items():
        names.check_tensor(name, f"{where}: a key of weight_map")
        if not names.is_part(part):
            raise FormatError(
                f"{where}: weight_map[{name!r:.80}] must be the name of a {names.PART_SUFFIX} file in "
                f"the same directory, found {part!r:.80}",
                tensor=name,
            )
    if "delta_encoding" in metadata:
        return _delta(metadata, weight_map, where)
    if not weight_map:
        raise FormatError(
            f"{where}: weight_map of a full version must name its tensors, found none"
        )
    return Index(
        version=names.check_identity(metadata["version"], f"{where}: metadata.version")
        if "version" in metadata
        else None,
        base_version=None,
        encoding=RAW,
        checksum=_checksum(metadata, where) if "checksum_format" in metadata else None,
        weight_map=weight_map,
    )


def _document(data: bytes, where: str) -> tuple[dict[str, object], dict[str, str]]:
    document = strict_json.members(
        strict_json.parse(data, where, limit_bytes=_MAX_INDEX_BYTES), where
    )
    for key in document.keys() - {"metadata", "weight_map"}:
        raise FormatError(
            f"{where}: {key:.80} is not a known key; known are metadata and weight_map"
        )
    metadata = document.get("metadata")
    return (
        strict_json.members({} if metadata is None else metadata, f"{where}: metadata"),
        strict_json.members(document.get("weight_map"), f"{where}: weight_map"),
    )


def _delta(metadata: Mapping[str, object], weight_map: Mapping[str, str], where: str) -> Index:
    encoding = metadata["delta_encoding"]
    if encoding == "syncline":
        raise FormatError(
            f"{where}: metadata.delta_encoding is 'syncline': only Syncline's own layout can follow this "
            "run; publish it with layout='slime' for others"
        )
    _check_word(encoding, INTERCHANGE_ENCODINGS, f"{where}: metadata.delta_encoding")
    for key in _DELTA_KEYS:
        if key not in metadata:
            raise FormatError(f"{where}: metadata.{key} is missing, as every delta must have it")
    for key in metadata:
        if key not in (*_DELTA_KEYS, *_REMARKS):
            raise FormatError(
                f"{where}: metadata.{key:.80} is not a known key; known are {', '.join(_DELTA_KEYS)}"
            )
    _check_word(metadata["compression_format"], ("zstd",), f"{where}: metadata.compression_format")
    index = Index(
        version=names.check_identity(metadata["version"], f"{where}: metadata.version"),
        base_version=names.check_identity(
            metadata["base_version"], f"{where}: metadata.base_version"
        ),
        encoding=str(encoding),
        checksum=_checksum(metadata, where),
        weight_map=weight_map,
    )
    if index.version == index.base_version:
        raise FormatError(
            f"{where}: metadata.base_version is the version itself, {index.version!r}"
        )
    return index


def _checksum(metadata: Mapping[str, object], where: str) -> str:
    found = metadata["checksum_format"]
    _check_word(found, checksum.NAMES, f"{where}: metadata.checksum_format")
    return str(found)


def _check_word(found: object, words: tuple[str, ...], place: str) -> None:
    if found not in words:
        raise FormatError(f"{place} must be one of {', '.join(words)}, found {found!r:.80}")
