"""`model.safetensors.index.json`: what Hugging Face and slime-family readers need to follow along.

It says nothing that the manifest does not say, no digest covers it, and Syncline's own receiver never reads
it. Reading what others wrote is the business of `syncline.interchange`.
"""

from __future__ import annotations

from collections.abc import Mapping

from syncline.format import strict_json
from syncline.format.rules import INTERCHANGE_ENCODINGS
from syncline.version import Manifest

CHECKSUM = "xxh3-128"
"""What a publisher digests new bytes with if nobody asks for another."""


def dump(manifest: Manifest, checksum: str = CHECKSUM) -> bytes:
    """Return the index of a version, as `docs/reference/format.md`, section 4, says it.

    A full version of raw tensors becomes an ordinary checkpoint's index. Every other version says a
    `delta_encoding`, so that no reader takes its payloads for weights; a map that only Syncline could
    follow is left empty, since names cost as much as a hundredth of a small model's delta.

    Args:
        checksum: of the digests in the parts, where there are any.
    """
    is_checkpoint = _is_checkpoint(manifest)
    is_interchange = manifest.kind == "delta" and manifest.encoding in INTERCHANGE_ENCODINGS
    weight_map = {
        entry.meta.name: manifest.parts[entry.part].path
        for entry in manifest.tensors
        if entry.part is not None and (is_checkpoint or is_interchange)
    }
    if is_checkpoint:
        return dump_full(weight_map, manifest.model_bytes)
    base = manifest.base_version
    return dump_delta(
        weight_map,
        version=f"{manifest.version:06d}",
        base_version="" if base is None else f"{base:06d}",
        encoding=manifest.encoding if is_interchange else "syncline",
        checksum=checksum if is_interchange else "none",
    )


def dump_full(
    weight_map: Mapping[str, str], total_size_bytes: int, checksum: str | None = None
) -> bytes:
    """Return the index of a full checkpoint: tensor name -> file name.

    Args:
        checksum: name of the digests in the files' `__metadata__`; None if there are none.
    """
    metadata: dict[str, int | str] = {"total_size": total_size_bytes}
    if checksum is not None:
        metadata["checksum_format"] = checksum
    return strict_json.dump({"metadata": metadata, "weight_map": dict(weight_map)})


def dump_delta(
    weight_map: Mapping[str, str], *, version: str, base_version: str, encoding: str, checksum: str
) -> bytes:
    """Return the index of a delta: changed tensor's name -> file name."""
    metadata = {
        "version": version,
        "base_version": base_version,
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": checksum,
    }
    return strict_json.dump({"metadata": metadata, "weight_map": dict(weight_map)})


def _is_checkpoint(manifest: Manifest) -> bool:
    return manifest.kind == "full" and all(entry.encoding == "full" for entry in manifest.tensors)
