"""Small legal manifests, with made-up digests, for tests that change one thing at a time."""

from __future__ import annotations

from dataclasses import replace

from syncline.format.names import part_name
from syncline.types import ZERO, Fingerprint, TensorMeta
from syncline.version import Manifest, PartEntry, TensorEntry

RUN_ID = "00112233445566778899aabbccddeeff"
SHA = "5a" * 32


def entry(
    name: str, encoding: str | None = "packed", part: int | None = 0, changed: int | None = 3
) -> TensorEntry:
    """Return an entry of a BF16 tensor of 12 elements, 24 bytes."""
    fingerprint = Fingerprint(len(name), 1 << 63)
    return TensorEntry(TensorMeta(name, "BF16", (4, 3)), fingerprint, encoding, part, changed)


def parts(count: int) -> tuple[PartEntry, ...]:
    """Return the entries of so many parts."""
    return tuple(PartEntry(part_name(index, count), 1000 + index, SHA) for index in range(count))


def with_sum(manifest: Manifest) -> Manifest:
    """Return the manifest with the fingerprint that its tensors have."""
    return replace(
        manifest, fingerprint=sum((entry.fingerprint for entry in manifest.tensors), ZERO)
    )


FULL = with_sum(
    Manifest(
        run_id=RUN_ID,
        epoch=1,
        version=1,
        kind="full",
        base_version=None,
        base_sha256=None,
        encoding="auto",
        parts=parts(2),
        files=(PartEntry("config.json", 7, SHA), PartEntry("tokenizer.json", 0, SHA)),
        tensors=(
            entry("a", "full", 0, None),
            entry("b", "planes", 1, None),
            entry("é", "full", 1, None),
        ),
        fingerprint_before=None,
        fingerprint=ZERO,
    )
)

DELTA = with_sum(
    replace(
        FULL,
        epoch=2,
        version=5,
        kind="delta",
        base_version=4,
        base_sha256=SHA,
        files=(),
        tensors=(entry("a"), entry("b", None, None, None), entry("c", "xor", 1, 12)),
        fingerprint_before=Fingerprint(1, 2),
    )
)
