"""`manifest.json` and its sidecar: the description of one version, and the version's identity.

The digest of the manifest's bytes is what chains and heads refer to, so whoever passes a version on
passes on the bytes that were read: writing a manifest again may compress its sidecar differently.
"""

from __future__ import annotations

from typing import Any, cast

from syncline.errors import FormatError
from syncline.format import digest, names, strict_json, table
from syncline.format.rules import check_manifest
from syncline.types import Fingerprint
from syncline.version import Kind, Manifest, PartEntry, TensorEntry

Tensors = tuple[TensorEntry, ...]

_FORMAT = "syncline-manifest"
_KEYS = (
    "format",
    "format_version",
    "run_id",
    "epoch",
    "version",
    "kind",
    "base_version",
    "base_sha256",
    "encoding",
    "parts",
    "files",
    "tensors",
    "fingerprint_before",
    "fingerprint",
)
_ENTRY_KEYS = ("path", "size_bytes", "sha256")
_LIMIT_BYTES = 1 << 24


def dump(manifest: Manifest) -> tuple[bytes, bytes | None]:
    """Return the canonical bytes of `manifest.json`, and of the sidecar if the table is long.

    Returns:
        What to store as `manifest.json`, and as `tensors.json.zst` (None: there is no such file).
        `load` of both gives the manifest back.

    Raises:
        FormatError: the manifest breaks a rule of the format.
    """
    check_manifest(manifest)
    sidecar = None
    tensors: Any = table.document(manifest.tensors)
    if len(manifest.tensors) > table.MAX_INLINE_TENSORS:
        sidecar = table.pack(manifest.tensors)
        tensors = _row(PartEntry(names.SIDECAR, len(sidecar), digest.sha256(sidecar)))
    before = manifest.fingerprint_before
    data = strict_json.dump(
        {
            "format": _FORMAT,
            "format_version": names.FORMAT_VERSION,
            "run_id": manifest.run_id,
            "epoch": manifest.epoch,
            "version": manifest.version,
            "kind": manifest.kind,
            "base_version": manifest.base_version,
            "base_sha256": manifest.base_sha256,
            "encoding": manifest.encoding,
            "parts": [_row(part) for part in manifest.parts],
            "files": [_row(file) for file in manifest.files],
            "tensors": tensors,
            "fingerprint_before": None if before is None else before.hex(),
            "fingerprint": manifest.fingerprint.hex(),
        }
    )
    return data, sidecar


def wanted_sidecar(data: bytes, where: str = names.MANIFEST) -> PartEntry | None:
    """Return which sidecar these bytes of `manifest.json` need; None if the table is inside.

    Raises:
        FormatError: not a manifest.
    """
    return _sidecar_entry(_document(data, where), where)


def load(data: bytes, sidecar: bytes | None = None, where: str = names.MANIFEST) -> Manifest:
    """Return the manifest that these bytes stand for.

    Args:
        data: the whole content of `manifest.json`.
        sidecar: the content of the file that `wanted_sidecar` names; None if it names none.
        where: what messages call it.

    Raises:
        FormatError: anything that `docs/reference/format.md`, section 3, does not allow.
        VerifyError: the sidecar is not the one that the manifest names.

    Example:
        >>> from syncline.types import ZERO
        >>> empty = Manifest("0" * 32, 1, 1, "full", None, None, "auto", (), (), (), None, ZERO)
        >>> load(*dump(empty)) == empty
        True
    """
    fields = _document(data, where)
    manifest = Manifest(
        run_id=fields.text("run_id"),
        epoch=fields.integer("epoch"),
        version=fields.integer("version"),
        kind=cast(Kind, fields.word("kind", "full", "delta")),
        base_version=None if fields["base_version"] is None else fields.integer("base_version"),
        base_sha256=None if fields["base_sha256"] is None else fields.text("base_sha256"),
        encoding=fields.text("encoding"),
        parts=_entries(fields, "parts", where),
        files=_entries(fields, "files", where),
        tensors=_tensors(fields, sidecar, where),
        fingerprint_before=(
            None
            if fields["fingerprint_before"] is None
            else _fingerprint(fields, "fingerprint_before")
        ),
        fingerprint=_fingerprint(fields, "fingerprint"),
    )
    check_manifest(manifest, where)
    return manifest


def _document(data: bytes, where: str) -> strict_json.Fields:
    return strict_json.document(data, where, _FORMAT, _KEYS, limit_bytes=_LIMIT_BYTES)


def _tensors(fields: strict_json.Fields, sidecar: bytes | None, where: str) -> Tensors:
    entry = _sidecar_entry(fields, where)
    if entry is None:
        if sidecar is not None:
            raise FormatError(
                f"{where}: the tensor table is inside, so {names.SIDECAR} must not be"
            )
        tensors = table.entries_of(fields["tensors"], where)
    else:
        if sidecar is None:
            raise FormatError(f"{where}: the tensor table is in {entry.path}, which was not given")
        digest.check(entry, sidecar)
        tensors = table.unpack(sidecar, names.SIDECAR)
    if (entry is None) != (len(tensors) <= table.MAX_INLINE_TENSORS):
        found = f"{len(tensors)} {'inside' if entry is None else 'beside it'}"
        raise FormatError(
            f"{where}: tensors must be inside the manifest exactly if they are at most "
            f"{table.MAX_INLINE_TENSORS}, found {found}"
        )
    return tensors


def _sidecar_entry(fields: strict_json.Fields, where: str) -> PartEntry | None:
    if isinstance(fields["tensors"], list):
        return None
    row = strict_json.Fields(fields["tensors"], where, _ENTRY_KEYS, "tensors")
    return PartEntry(
        row.word("path", names.SIDECAR),
        row.integer("size_bytes", maximum=table.MAX_SIDECAR_BYTES),
        row.hexadecimal("sha256", 64),
    )


def _entries(fields: strict_json.Fields, key: str, where: str) -> tuple[PartEntry, ...]:
    rows = (
        strict_json.Fields(row, where, _ENTRY_KEYS, f"{key}[{index}]")
        for index, row in enumerate(fields.items(key))
    )
    return tuple(
        PartEntry(row.text("path"), row.integer("size_bytes"), row.text("sha256")) for row in rows
    )


def _fingerprint(fields: strict_json.Fields, key: str) -> Fingerprint:
    return Fingerprint.from_hex(fields.hexadecimal(key, 32))


def _row(entry: PartEntry) -> dict[str, Any]:
    return {"path": entry.path, "size_bytes": entry.size_bytes, "sha256": entry.sha256}
