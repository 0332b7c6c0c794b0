"""`model.safetensors.index.json`: what Hugging Face and slime-family readers need to follow along.

It says nothing that the manifest does not say, no digest covers it, and Syncline never reads it.
"""

from __future__ import annotations

from syncline.format import strict_json
from syncline.format.rules import INTERCHANGE_ENCODINGS
from syncline.version import Manifest


def dump(manifest: Manifest) -> bytes:
    """Return the index of a version, as `docs/reference/format.md`, section 4, says it.

    A full version of raw tensors becomes an ordinary checkpoint's index. Every other version says a
    `delta_encoding`, so that no reader takes its payloads for weights; a map that only Syncline could
    follow is left empty, since names cost as much as a hundredth of a small model's delta.
    """
    metadata: dict[str, int | str]
    is_checkpoint = _is_checkpoint(manifest)
    is_interchange = manifest.kind == "delta" and manifest.encoding in INTERCHANGE_ENCODINGS
    if is_checkpoint:
        metadata = {"total_size": manifest.model_bytes}
    else:
        base = manifest.base_version
        metadata = {
            "version": f"{manifest.version:06d}",
            "base_version": "" if base is None else f"{base:06d}",
            "delta_encoding": manifest.encoding if is_interchange else "syncline",
            "compression_format": "zstd",
            "checksum_format": "xxh3-128" if is_interchange else "none",
        }
    weight_map = {
        entry.meta.name: manifest.parts[entry.part].path
        for entry in manifest.tensors
        if entry.part is not None and (is_checkpoint or is_interchange)
    }
    return strict_json.dump({"metadata": metadata, "weight_map": weight_map})


def _is_checkpoint(manifest: Manifest) -> bool:
    return manifest.kind == "full" and all(entry.encoding == "full" for entry in manifest.tensors)
