"""What makes a head or a manifest legal: one validator, run when reading and when writing."""

from __future__ import annotations

import re
from collections.abc import Sequence

from syncline.errors import FormatError
from syncline.format import names
from syncline.types import ZERO, Fingerprint
from syncline.version import Head, Manifest, PartEntry, TensorEntry

FULL_ENCODINGS = ("full", "planes")
"""Encodings that need no base; a full version uses no others."""

ENCODINGS = ("full", "indices", "overwrite", "packed", "planes", "tight", "xor")
"""Every encoding that a payload may have."""

INTERCHANGE_ENCODINGS = ("overwrite", "xor")
"""Encodings that readers of the slime family understand; a delta never mixes them with others."""

MIN_PART_BYTES = 16
"""A part with no tensors: 8 bytes of header length and the shortest padded header."""

MAX_DIMENSIONS = 64
"""Of a tensor's shape; more is refused before sides are multiplied."""

_SHA256 = re.compile(r"[0-9a-f]{64}")
_RUN_ID = re.compile(r"[0-9a-f]{32}")


def check_head(head: Head, where: str = names.HEAD) -> None:
    """Check every rule of `HEAD.json` in `docs/reference/format.md`, section 2.

    Raises:
        FormatError: names the member, what it must be and what it is.
    """
    _check_run(head.run_id, head.epoch, where)
    if (head.version is None) != (head.manifest_sha256 is None):
        raise _illegal(
            f"{where}: manifest_sha256", "null exactly where version is", head.manifest_sha256
        )
    if head.version is not None:
        _check_integer(head.version, 1, names.MAX_INTEGER, f"{where}: version")
        _check_sha256(head.manifest_sha256, f"{where}: manifest_sha256")


def check_manifest(manifest: Manifest, where: str = names.MANIFEST) -> None:
    """Check every rule of a manifest in `docs/reference/format.md`, section 3.

    Raises:
        FormatError: names the member, what it must be and what it is.

    Cost: a few microseconds a tensor.
    """
    _check_run(manifest.run_id, manifest.epoch, where)
    _check_integer(manifest.version, 1, names.MAX_INTEGER, f"{where}: version")
    _check_base(manifest, where)
    if manifest.encoding not in ("auto", *ENCODINGS):
        raise _illegal(f"{where}: encoding", f"auto or one of {ENCODINGS}", manifest.encoding)
    _check_parts(manifest.parts, where)
    _check_files(manifest, where)
    _check_tensors(manifest, where)
    _check_part_sizes(manifest, where)
    _check_sum(manifest, where)


def _check_run(run_id: str, epoch: int, where: str) -> None:
    if _RUN_ID.fullmatch(run_id) is None:
        raise _illegal(f"{where}: run_id", "32 lowercase hexadecimal digits", run_id)
    _check_integer(epoch, 1, names.MAX_INTEGER, f"{where}: epoch")


def _check_base(manifest: Manifest, where: str) -> None:
    if manifest.kind not in ("full", "delta"):
        raise _illegal(f"{where}: kind", "'full' or 'delta'", manifest.kind)
    base = manifest.base_version
    if base is None and manifest.kind == "delta":
        raise _illegal(f"{where}: base_version", "there in a delta", base)
    if (base is None) != (manifest.base_sha256 is None):
        raise _illegal(
            f"{where}: base_sha256", "null exactly where base_version is", manifest.base_sha256
        )
    before = manifest.fingerprint_before
    if (base is None) != (before is None):
        raise _illegal(f"{where}: fingerprint_before", "null exactly where base_version is", before)
    if base is not None and before is not None:
        _check_integer(base, 1, manifest.version - 1, f"{where}: base_version")
        _check_sha256(manifest.base_sha256, f"{where}: base_sha256")
        _check_fingerprint(before, f"{where}: fingerprint_before")


def _check_parts(parts: Sequence[PartEntry], where: str) -> None:
    for index, part in enumerate(parts):
        place = f"{where}: parts[{index}]"
        expected = names.part_name(index, len(parts))
        if part.path != expected:
            raise _illegal(f"{place}.path", repr(expected), part.path)
        _check_integer(part.size_bytes, MIN_PART_BYTES, names.MAX_INTEGER, f"{place}.size_bytes")
        _check_sha256(part.sha256, f"{place}.sha256")


def _check_files(manifest: Manifest, where: str) -> None:
    if manifest.files and manifest.kind == "delta":
        raise _illegal(f"{where}: files", "empty in a delta", len(manifest.files))
    previous = ""
    for index, file in enumerate(manifest.files):
        place = f"{where}: files[{index}]"
        names.check_file(file.path, f"{place}.path")
        if file.path <= previous:
            raise _illegal(f"{place}.path", f"after {previous!r} in code point order", file.path)
        _check_integer(file.size_bytes, 0, names.MAX_INTEGER, f"{place}.size_bytes")
        _check_sha256(file.sha256, f"{place}.sha256")
        previous = file.path


def _check_tensors(manifest: Manifest, where: str) -> None:
    previous = ""
    for index, entry in enumerate(manifest.tensors):
        place = f"{where}: tensors[{index}]"
        names.check_tensor(entry.meta.name, f"{place}.name")
        if entry.meta.name <= previous:
            raise _illegal(
                f"{place}.name", f"after {previous!r} in code point order", entry.meta.name
            )
        if len(entry.meta.shape) > MAX_DIMENSIONS or entry.meta.nbytes > names.MAX_INTEGER:
            raise _illegal(
                f"{place}.shape",
                f"at most {MAX_DIMENSIONS} dimensions and {names.MAX_INTEGER} bytes",
                entry.meta.shape,
            )
        _check_fingerprint(entry.fingerprint, f"{place}.fingerprint")
        if manifest.kind == "full":
            _check_full_entry(entry, place)
        else:
            _check_delta_entry(entry, manifest.encoding, place)
        if entry.part is not None:
            _check_integer(entry.part, 0, len(manifest.parts) - 1, f"{place}.part")
        previous = entry.meta.name


def _check_full_entry(entry: TensorEntry, place: str) -> None:
    if entry.encoding not in FULL_ENCODINGS:
        raise _illegal(
            f"{place}.encoding", f"one of {FULL_ENCODINGS} in a full version", entry.encoding
        )
    if entry.part is None:
        raise _illegal(f"{place}.part", "the index of a part in a full version", entry.part)
    if entry.changed is not None:
        raise _illegal(f"{place}.changed", "null in a full version", entry.changed)


def _check_delta_entry(entry: TensorEntry, asked: str, place: str) -> None:
    if entry.encoding is None:
        if entry.part is not None or entry.changed is not None:
            raise _illegal(f"{place}.encoding", "there where part or changed is", entry.encoding)
        return
    allowed = (asked,) if asked in INTERCHANGE_ENCODINGS else ENCODINGS
    if entry.encoding not in allowed:
        raise _illegal(f"{place}.encoding", f"one of {allowed}", entry.encoding)
    if entry.part is None:
        raise _illegal(f"{place}.part", "the index of a part where encoding is there", entry.part)
    _check_integer(entry.changed, 1, entry.meta.unit_count, f"{place}.changed")


def _check_part_sizes(manifest: Manifest, where: str) -> None:
    raw_bytes = [MIN_PART_BYTES] * len(manifest.parts)
    for entry in manifest.tensors:
        if entry.encoding == "full" and entry.part is not None:
            raw_bytes[entry.part] += entry.meta.nbytes
    for index, (part, least) in enumerate(zip(manifest.parts, raw_bytes, strict=True)):
        if part.size_bytes < least:
            raise _illegal(
                f"{where}: parts[{index}].size_bytes",
                f"at least {least} to hold its tensors of encoding full",
                part.size_bytes,
            )


def _check_sum(manifest: Manifest, where: str) -> None:
    total = sum((entry.fingerprint for entry in manifest.tensors), ZERO)
    if manifest.fingerprint != total:
        raise _illegal(
            f"{where}: fingerprint",
            f"{total.hex()}, the sum over the tensors",
            manifest.fingerprint.hex(),
        )


def _check_integer(value: int | None, minimum: int, maximum: int, place: str) -> None:
    if value is None or not minimum <= value <= maximum:
        raise _illegal(place, f"an integer from {minimum} to {maximum}", value)


def _check_sha256(value: str | None, place: str) -> None:
    if value is None or _SHA256.fullmatch(value) is None:
        raise _illegal(place, "64 lowercase hexadecimal digits", value)


def _check_fingerprint(value: Fingerprint, place: str) -> None:
    if not (0 <= value.a < 1 << 64 and 0 <= value.b < 1 << 64):
        raise _illegal(place, "two lanes of 64 bits", value)


def _illegal(place: str, expected: str, found: object) -> FormatError:
    return FormatError(f"{place} must be {expected}, found {found!r:.80}")
