"""A checkpoint directory against a version: does it hold exactly these bits?"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from syncline import kernels
from syncline.abc import Observe, Store
from syncline.sources import CheckpointSource
from syncline.sync.checks import fingerprint_all
from syncline.sync.fetch import files_of
from syncline.sync.history import History
from syncline.sync.receiver import Receiver
from syncline.sync.snapshot import Snapshot
from syncline.types import Step
from syncline.version import HeldVersion


@dataclass(frozen=True)
class Mismatch:
    """One thing that a directory holds otherwise than the version says.

    Attributes:
        name: tensor or file.
        problem: `missing`, `extra`, `layout`, `bits` or `file`.
        changed: for `bits`: how many units differ; else None.
        detail: expected and found, in words.
    """

    name: str
    problem: str
    detail: str
    changed: int | None = None


def verify_directory(
    store: Store, directory: Path, version: int | None, observe: Observe
) -> tuple[HeldVersion, list[Mismatch]]:
    """Compare a checkpoint directory with a version, bit by bit; return what differs.

    Reads the directory once. Only if bits differ is the version rebuilt from the store, in unnamed
    temporary files, to count the units that do.

    Raises:
        SynclineError: the store or the directory cannot be read.
    """
    history = History.open(store)
    target = history.target(version)
    source = CheckpointSource(directory)
    found = source.metas()
    wanted = target.manifest.by_name
    mismatches = [
        Mismatch(name, "missing", "in the version, not in the directory")
        for name in sorted(wanted.keys() - found.keys())
    ]
    done_bytes = 0
    for meta, bits in source.tensors():
        entry = wanted.get(meta.name)
        if entry is None:
            mismatches.append(Mismatch(meta.name, "extra", "in the directory, not in the version"))
        elif entry.meta != meta:
            detail = (
                f"expected {entry.meta.dtype} {list(entry.meta.shape)}, "
                f"found {meta.dtype} {list(meta.shape)}"
            )
            mismatches.append(Mismatch(meta.name, "layout", detail))
        else:
            fingerprint = fingerprint_all(meta, bits)
            if fingerprint != entry.fingerprint:
                detail = (
                    f"expected fingerprint {entry.fingerprint.hex()}, found {fingerprint.hex()}"
                )
                mismatches.append(Mismatch(meta.name, "bits", detail))
        done_bytes += meta.nbytes
        observe(Step("verify.tensor", done_bytes, target.manifest.model_bytes))
    mismatches += _file_mismatches(files_of(history), source.files())
    return target, list(_counted(store, target, source, mismatches))


def _file_mismatches(wanted: Mapping[str, bytes], found: Mapping[str, bytes]) -> Iterator[Mismatch]:
    for name, content in sorted(wanted.items()):
        if found.get(name) != content:
            state = "is missing" if name not in found else "has other content"
            yield Mismatch(name, "file", f"the file {state}")


def _counted(
    store: Store, target: HeldVersion, source: CheckpointSource, mismatches: list[Mismatch]
) -> Iterator[Mismatch]:
    """Fill in how many units differ, where bits do."""
    if not any(item.problem == "bits" for item in mismatches):
        yield from mismatches
        return
    with tempfile.TemporaryDirectory(prefix="syncline-verify-") as directory:
        truth = Snapshot(Path(directory))
        Receiver(store, truth).sync(target.version)
        for item in mismatches:
            if item.problem != "bits":
                yield item
                continue
            offsets, _, _ = kernels.diff(truth.view(item.name), source.bits(item.name))
            yield Mismatch(item.name, item.problem, item.detail, offsets.size)
