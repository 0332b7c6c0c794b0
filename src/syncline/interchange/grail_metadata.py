"""`metadata.json` and `delta_metadata.json` of PULSE/grail, read strictly."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from syncline.abc import Store
from syncline.errors import FormatError
from syncline.format import strict_json
from syncline.interchange import grail_codec
from syncline.types import ObjectInfo

_MAX_BYTES = 1 << 26
_NEEDED = ("window", "file_manifest", "checkpoint_type")
_REMARKS = (
    "parent_window",
    "prev_window",
    "anchor_window",
    "training_config",
    "git_commit",
    "created_at",
    "model_name",
    "weights_hash",
    "config_hash",
    "env_id",
    "env_params",
    "generation_params",
)
_DELTA_KEYS = (
    "format",
    "threshold",
    "prev_window",
    "anchor_window",
    "shapes",
    "total_params",
    "nonzero_params",
    "sparsity_ratio",
)
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Metadata:
    """What `metadata.json` says: the window, its kind, the window before it, and digests by file name."""

    where: str
    window: int
    kind: str
    previous: int | None
    manifest: Mapping[str, str]

    def sha256(self, name: str) -> str:
        """Return the digest of a file.

        Raises:
            FormatError: the manifest does not list it.
        """
        if name not in self.manifest:
            raise FormatError(f"{self.where}: file_manifest does not list {name!r}")
        return self.manifest[name]

    def check(self, window: int, folder: str, found: Collection[str]) -> None:
        """Check that it is the metadata of this directory, and lists exactly the files in it.

        Raises:
            FormatError: another window or kind, a file that is not listed, or one that is not there.
        """
        if self.window != window:
            raise FormatError(
                f"{self.where}: window must be that of its directory, {window}, found {self.window}: the "
                "directory was copied or renamed"
            )
        if self.kind != folder:
            raise FormatError(
                f"{self.where}: checkpoint_type must be {folder!r} here, found {self.kind!r}"
            )
        for name in sorted(set(found) ^ self.manifest.keys()):
            fault = "is not there" if name in self.manifest else "is there, but not listed"
            raise FormatError(f"{self.where}: file_manifest: {name!r} {fault}")


def load(store: Store, info: ObjectInfo) -> Metadata:
    """Return what `metadata.json` says.

    Raises:
        FormatError: an unknown or a missing key, or a value that is not allowed.
    """
    document = _document(store, info)
    _check_keys(document, info.key, _NEEDED, _REMARKS)
    kind = document["checkpoint_type"]
    if kind not in ("FULL", "DELTA"):
        raise FormatError(
            f"{info.key}: checkpoint_type must be 'FULL' or 'DELTA', found {kind!r:.80}"
        )
    manifest = strict_json.members(document["file_manifest"], f"{info.key}: file_manifest")
    for name, text in manifest.items():
        if not isinstance(text, str) or _SHA256.fullmatch(text) is None:
            raise FormatError(
                f"{info.key}: file_manifest[{name!r:.80}] must be 64 lowercase hexadecimal digits, found "
                f"{text!r:.80}"
            )
    previous = document.get("prev_window")
    if previous is not None:
        previous = strict_json.integer(previous, f"{info.key}: prev_window")
    window = strict_json.integer(document["window"], f"{info.key}: window")
    return Metadata(info.key, window, kind, previous, manifest)


def load_delta(store: Store, info: ObjectInfo, metadata: Metadata) -> tuple[str, int]:
    """Return the name of the codec and the window that a delta is made on.

    Raises:
        FormatError: an unknown key or codec, a threshold above 0, or a window that `metadata.json` calls
            otherwise.
    """
    document = _document(store, info)
    _check_keys(document, info.key, _DELTA_KEYS, ())
    codec = document["format"]
    if codec not in grail_codec.VERSIONS:
        raise FormatError(
            f"{info.key}: format must be one of {', '.join(grail_codec.VERSIONS)}, found {codec!r:.80}"
        )
    if document["threshold"] not in (0, 0.0) or isinstance(document["threshold"], bool):
        raise FormatError(
            f"{info.key}: threshold must be 0, found {document['threshold']!r:.80}: smaller changes were "
            "left out, so the weights are not the trainer's"
        )
    previous = strict_json.integer(document["prev_window"], f"{info.key}: prev_window")
    if previous != metadata.previous or previous == metadata.window:
        raise FormatError(
            f"{info.key}: prev_window must be a window before {metadata.window} and the one in "
            f"{metadata.where}, {metadata.previous}, found {previous}"
        )
    return str(codec), previous


def _document(store: Store, info: ObjectInfo) -> dict[str, object]:
    text = store.get(info.key, 0, _MAX_BYTES + 1)
    return strict_json.members(strict_json.parse(text, info.key, limit_bytes=_MAX_BYTES), info.key)


def _check_keys(
    document: Mapping[str, object], where: str, needed: Collection[str], remarks: Collection[str]
) -> None:
    for key in needed:
        if key not in document:
            raise FormatError(f"{where}: {key} is missing")
    for key in document:
        if key not in needed and key not in remarks:
            raise FormatError(
                f"{where}: {key:.80} is not a known key; known are {', '.join((*needed, *remarks))}"
            )
