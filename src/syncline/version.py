"""What a version is: the frozen values behind `HEAD.json` and `manifest.json`, and versions of others.

`syncline.format` reads and writes them; nothing here touches bytes. A version's identity is the SHA-256
of its manifest, never its number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from syncline.types import Fingerprint, ObjectInfo, TensorMeta

Kind = Literal["full", "delta"]


@dataclass(frozen=True, slots=True)
class Head:
    """The current version of a run, as `HEAD.json` holds it.

    Attributes:
        run_id: 32 hex digits, drawn when the run was created.
        epoch: counts publishers; each takes the next one by compare-and-swap.
        version: number of the current version; None before the first commit.
        manifest_sha256: digest of that version's `manifest.json`; None before the first commit.
    """

    run_id: str
    epoch: int
    version: int | None
    manifest_sha256: str | None


@dataclass(frozen=True, slots=True)
class PartEntry:
    """One file of a version: its name inside the version directory, size and digest."""

    path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a version.

    Attributes:
        meta: name, dtype, shape.
        fingerprint: of the tensor's bits at this version.
        encoding: codec that made the payload in this version; None if the version carries none,
            because the tensor is the same as in the base version.
        part: index into `Manifest.parts` of the part with the payload; None with `encoding` None.
        changed: number of units that differ from the base version; None in a full version.
    """

    meta: TensorMeta
    fingerprint: Fingerprint
    encoding: str | None
    part: int | None
    changed: int | None


@dataclass(frozen=True)
class Manifest:
    """Everything that a receiver needs to know of one version, and to check it by.

    Attributes:
        run_id, epoch, version: whose version this is, and its number (from 1, rising).
        kind: `full` needs nothing; `delta` needs exactly the version that `base_sha256` names.
        base_version, base_sha256: the version before this one (also of a full version, so that the
            history is one hash chain); None for the first.
        encoding: the name under which the publisher chose codecs (`auto` included).
        parts: the safetensors files with the payloads.
        files: further files of a checkpoint (config, tokenizer); full versions only.
        tensors: every tensor of the model, changed or not, sorted by name.
        fingerprint_before, fingerprint: sum over all tensors at the base version (None without one)
            and at this version.
    """

    run_id: str
    epoch: int
    version: int
    kind: Kind
    base_version: int | None
    base_sha256: str | None
    encoding: str
    parts: tuple[PartEntry, ...]
    files: tuple[PartEntry, ...]
    tensors: tuple[TensorEntry, ...]
    fingerprint_before: Fingerprint | None
    fingerprint: Fingerprint

    @cached_property
    def by_name(self) -> Mapping[str, TensorEntry]:
        """The tensor entries by canonical name."""
        return {entry.meta.name: entry for entry in self.tensors}

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes of all parts together."""
        return sum(part.size_bytes for part in self.parts)

    @cached_property
    def model_bytes(self) -> int:
        """Bytes of the model's weights when written out raw."""
        return sum(entry.meta.nbytes for entry in self.tensors)


@dataclass(frozen=True, slots=True)
class HeldVersion:
    """The version that an engine holds, verified: its manifest and the digest that identifies it."""

    manifest: Manifest
    sha256: str

    @property
    def version(self) -> int:
        """The version's number."""
        return self.manifest.version


@dataclass(frozen=True, slots=True)
class ForeignTensor:
    """One tensor that a version of a foreign layout carries.

    Attributes:
        name: canonical name.
        dtype: safetensors dtype name; None where the layout leaves it to the base.
        shape: full shape; None where the layout leaves it to the base.
        payload_bytes: bytes that the version spends on it.
        digest: of its new bytes, hexadecimal, by the version's `checksum`; None where there is none.
    """

    name: str
    dtype: str | None
    shape: tuple[int, ...] | None
    payload_bytes: int
    digest: str | None = None


@dataclass(frozen=True)
class ForeignVersion:
    """One version that another project's publisher wrote, as far as its layout says it.

    Attributes:
        layout: name of the layout, as in `syncline.interchange.NAMES`.
        identity: what its publisher calls it; opaque: no order follows from it.
        base: identity of the version that a delta is made on; None of a full version, or where the
            layout does not say it (then `missing` does).
        kind: `full` or `delta`.
        encoding: the layout's own word for how payloads are coded; `raw` of a full version.
        checksum: name of the digest that every tensor comes with; None if it comes with none.
        tensors: what it carries, sorted by name: all of the model in a full version, else the changed.
        missing: guarantees that the layout, or this directory, does not give; short sentences.
        objects: what belongs to it in the store, sorted by key, the index or manifest among them.
        digest: SHA-256 over what is cheap to read of the objects (index and headers, or what
            `interchange.evidence.digest` takes): another digest under the same identity means that the
            version was rewritten.
    """

    layout: str
    identity: str
    base: str | None
    kind: Kind
    encoding: str
    checksum: str | None
    tensors: tuple[ForeignTensor, ...] = ()
    missing: tuple[str, ...] = ()
    objects: tuple[ObjectInfo, ...] = ()
    digest: str = ""

    @property
    def payload_bytes(self) -> int:
        """Bytes that the version spends on its tensors."""
        return sum(tensor.payload_bytes for tensor in self.tensors)
