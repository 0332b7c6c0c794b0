"""A whole store: every pointer, digest and chain, and on request every payload."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from syncline.abc import Observe, Store
from syncline.errors import FormatError, SynclineError
from syncline.format import checksum as checksums
from syncline.format import index as index_format
from syncline.format import names
from syncline.format import part as part_format
from syncline.sync.checks import check_link, verify_engine
from syncline.sync.fetch import check_objects, fetched, ignore_bytes
from syncline.sync.history import History
from syncline.sync.phases import Phases
from syncline.sync.receiver import Receiver
from syncline.sync.snapshot import Snapshot
from syncline.types import Step
from syncline.version import HeldVersion


@dataclass(frozen=True)
class Finding:
    """One fault, or one remark, about an object of a store."""

    where: str
    problem: str
    is_fault: bool = True


def check_store(store: Store, *, deep: bool, observe: Observe) -> tuple[int, list[Finding]]:
    """Check every pointer, digest and chain of a store; return versions checked and findings.

    Args:
        deep: also rebuild every version in temporary files, so that every payload is decoded and every
            fingerprint is proved.
    """
    findings: list[Finding] = []
    known = {names.HEAD, names.LIVE}
    versions: list[HeldVersion] = []
    history = History.open(store)
    with _noting(findings, f"the chain from {names.HEAD}"):
        versions.extend(history.back())
    for number, at in enumerate(versions):
        prefix = names.version_dir(at.version)
        known |= {info.key for info in store.list(prefix + "/")} | {names.scores_key(at.version)}
        base = versions[number + 1] if number + 1 < len(versions) else None
        _check_version(store, at, base, findings)
        observe(Step("fsck.version", number + 1, len(versions)))
    for info in store.list():
        if info.key not in known:
            version = names.version_of(info.key.split("/")[0])
            remark = "not of this run" if version is None else "of a version that is not committed"
            findings.append(Finding(info.key, remark, is_fault=False))
    if deep and not any(item.is_fault for item in findings):
        _rebuild(store, versions, findings)
    return len(versions), findings


def _check_version(
    store: Store, at: HeldVersion, base: HeldVersion | None, findings: list[Finding]
) -> None:
    manifest = at.manifest
    where = names.version_dir(at.version)
    with _noting(findings, where):
        check_objects(store, manifest)
    with _noting(findings, names.key(at.version, names.INDEX)):
        raw = store.get(names.key(at.version, names.INDEX))
        # The manifest does not say which checksum the publisher was asked for.
        if all(raw != index_format.dump(manifest, checksum) for checksum in checksums.NAMES):
            raise FormatError("the index is not the one that belongs to the manifest")
    for number, entry in enumerate((*manifest.parts, *manifest.files)):
        with _noting(findings, names.key(at.version, entry.path)):
            buffer = fetched(store, manifest, entry, ignore_bytes, Phases())
            if number < len(manifest.parts):
                part_format.load(buffer, manifest, number)
    if base is not None:
        with _noting(findings, where):
            check_link(at.manifest, base.manifest)


def _rebuild(store: Store, versions: list[HeldVersion], findings: list[Finding]) -> None:
    with tempfile.TemporaryDirectory(prefix="syncline-fsck-") as directory:
        rebuilt = Snapshot(Path(directory))
        for at in reversed(versions):
            with _noting(findings, names.version_dir(at.version)):
                Receiver(store, rebuilt).sync(at.version)
                verify_engine(rebuilt, at.manifest)


@contextmanager
def _noting(findings: list[Finding], where: str) -> Iterator[None]:
    """Turn an error inside into a finding; the check goes on with what comes next."""
    try:
        yield
    except SynclineError as error:
        problem = (
            str(error)
            .partition("; syncline fsck")[0]
            .removeprefix(f"{where}/: ")
            .removeprefix(f"{where}: ")
        )
        findings.append(Finding(where, problem))
