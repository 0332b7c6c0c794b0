"""`manifest.json` of a SkyRL delta, read strictly."""

from __future__ import annotations

import re
from dataclasses import dataclass

from syncline.errors import FormatError
from syncline.format import checksum as checksums
from syncline.format import names, strict_json
from syncline.format.table import tensor_meta
from syncline.types import TensorMeta

MAX_BYTES = 1 << 28

_KEYS = (
    "version",
    "base_version",
    "tensors",
    "total_uncompressed_num_bytes",
    "total_compressed_num_bytes",
    "payload_files",
)
_TENSOR_KEYS = (
    "name",
    "dtype",
    "shape",
    "uncompressed_num_bytes",
    "compressed_num_bytes",
    "payload_file",
    "payload_key",
    "checksum",
    "checksum_algorithm",
)
_PAYLOAD = re.compile(r"delta-rank[0-9]{5}-file[0-9]{6}\.safetensors")
_TORCH_DTYPES = {
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
}


@dataclass(frozen=True, slots=True)
class Record:
    """One changed tensor: what it is, where its payload lies, and the digest of its new bytes."""

    meta: TensorMeta
    payload_bytes: int
    payload_file: str
    payload_key: str
    checksum: str
    algorithm: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a manifest says."""

    version: int
    base_version: int
    tensors: tuple[Record, ...]
    payload_files: tuple[str, ...]

    @property
    def algorithm(self) -> str | None:
        """The name of the digests, if all tensors have the same one."""
        found = {record.algorithm for record in self.tensors}
        return found.pop() if len(found) == 1 else None


def load(text: bytes, where: str) -> Manifest:
    """Return what a manifest says.

    Raises:
        FormatError: an unknown or a missing key, a value that is not allowed, a tensor or a file named
            twice, a file outside the directory, or totals that are not those of the tensors.
    """
    fields = strict_json.Fields(strict_json.parse(text, where, limit_bytes=MAX_BYTES), where, _KEYS)
    version = fields.integer("version", minimum=1)
    base_version = fields.integer("base_version", maximum=version - 1)
    records = tuple(
        _record(row, where, f"tensors[{number}]")
        for number, row in enumerate(fields.items("tensors"))
    )
    _check_once([record.meta.name for record in records], f"{where}: tensors: tensor")
    for key, total in (
        ("total_uncompressed_num_bytes", sum(record.meta.nbytes for record in records)),
        ("total_compressed_num_bytes", sum(record.payload_bytes for record in records)),
    ):
        if fields.integer(key) != total:
            fields.refuse(key, f"{total}, the sum over the tensors")
    files = tuple(
        _file(name, fields.place("payload_files")) for name in fields.items("payload_files")
    )
    _check_once(files, fields.place("payload_files"))
    return Manifest(version, base_version, records, files)


def _record(row: object, where: str, path: str) -> Record:
    fields = strict_json.Fields(row, where, _TENSOR_KEYS, path)
    name = fields.text("name")
    names.check_tensor(name, fields.place("name"))
    dtype = fields.text("dtype").removeprefix("torch.")
    if dtype not in _TORCH_DTYPES:
        fields.refuse("dtype", f"one of {', '.join(_TORCH_DTYPES)}")
    meta = tensor_meta(name, _TORCH_DTYPES[dtype], fields["shape"], where, path)
    if fields.integer("uncompressed_num_bytes") != meta.nbytes:
        fields.refuse("uncompressed_num_bytes", f"{meta.nbytes}, as dtype and shape say")
    algorithm = fields.word("checksum_algorithm", *checksums.NAMES)
    return Record(
        meta=meta,
        payload_bytes=fields.integer("compressed_num_bytes", minimum=1),
        payload_file=_file(fields["payload_file"], fields.place("payload_file")),
        payload_key=fields.text("payload_key"),
        checksum=checksums.check(algorithm, fields["checksum"], fields.place("checksum")),
        algorithm=algorithm,
    )


def _file(name: object, place: str) -> str:
    if not isinstance(name, str) or _PAYLOAD.fullmatch(name) is None:
        raise FormatError(
            f"{place} must be the name of a payload file in the same directory, such as "
            f"delta-rank00000-file000000.safetensors, found {name!r:.80}"
        )
    return name


def _check_once(found: list[str] | tuple[str, ...], place: str) -> None:
    seen: set[str] = set()
    for name in found:
        if name in seen:
            raise FormatError(f"{place} {name!r:.80} is there twice")
        seen.add(name)
