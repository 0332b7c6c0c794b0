"""Foreign directories held against their own digests: a checkpoint against a version, and all versions."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from syncline import kernels
from syncline.abc import Interchange, Observe, Store, ignore
from syncline.engines import CheckpointDir
from syncline.errors import FormatError, SynclineError
from syncline.format import checksum as checksums
from syncline.interchange import chain
from syncline.sources import CheckpointSource
from syncline.sync.follow import Follower
from syncline.sync.followed import mark
from syncline.sync.fsck import Finding
from syncline.sync.snapshot import Snapshot
from syncline.sync.verify import Mismatch
from syncline.types import Bits, Span, Step, TensorMeta
from syncline.version import ForeignTensor, ForeignVersion


@dataclass(frozen=True)
class ForeignVerdict:
    """What a checkpoint directory is against a version of a foreign layout.

    Attributes:
        version: the version.
        mismatches: where the directory differs.
        unproved: tensors of which nothing says what they must be: no version of the chain carries them, or
            only one without digests, and no full version leads up to it.
        total: tensors in the directory.
    """

    version: ForeignVersion
    mismatches: tuple[Mismatch, ...]
    unproved: tuple[str, ...]
    total: int


def verify_foreign(
    store: Store, layout: Interchange, directory: Path, version: str | None, observe: Observe
) -> ForeignVerdict:
    """Compare a checkpoint directory with a version: every tensor with the newest that is known of it.

    That is the digest out of the last version that carries the tensor, or its bits in a full version. Only
    where deltas have no digests is the version rebuilt from a full one, in unnamed temporary files. Reads the
    directory once.

    Raises:
        SynclineError: the store or the directory cannot be read.
    """
    versions = layout.versions(store)
    target = chain.find(versions, version)
    steps = chain.back(versions, target)
    carriers = {tensor.name: at for at in reversed(steps) for tensor in at.tensors}
    shapes = {tensor.name: tensor for tensor in steps[-1].tensors if tensor.shape is not None}
    source = CheckpointSource(directory)
    metas = source.metas()
    is_known = steps[-1].kind == "full"
    problems = {
        name: Mismatch(
            name, "missing", f"in version {carriers[name].identity!r}, not in the directory"
        )
        for name in carriers.keys() - metas.keys()
    }
    unproved = []
    done_bytes = 0
    for meta, bits in source.tensors():
        carrier = carriers.get(meta.name)
        if carrier is not None:
            problem = _problem(carrier, shapes.get(meta.name), meta, bits)
            if problem is not None:
                problems[meta.name] = problem
        elif is_known:
            detail = "in the directory, not in the version"
            problems[meta.name] = Mismatch(meta.name, "extra", detail)
        else:
            unproved.append(meta.name)
        done_bytes += meta.nbytes
        observe(Step("verify.tensor", done_bytes, sum(item.nbytes for item in metas.values())))
    bare = {name for name, at in carriers.items() if at.kind == "delta" and at.checksum is None}
    bare = (bare & metas.keys()) - problems.keys()
    if is_known and bare:
        problems |= _rebuilt_differences(store, layout, target, source, bare)
    else:
        unproved += bare
    if is_known and steps[-1].checksum is None:
        wanted = {name for name, at in carriers.items() if at is steps[-1]} - problems.keys()
        problems |= _differing(store, layout, steps[-1], source, wanted)
    mismatches = tuple(problems[name] for name in sorted(problems))
    return ForeignVerdict(target, mismatches, tuple(sorted(unproved)), len(metas))


def _problem(
    at: ForeignVersion, shape: ForeignTensor | None, meta: TensorMeta, bits: Bits
) -> Mismatch | None:
    if shape is not None and (shape.dtype, shape.shape) != (meta.dtype, meta.shape):
        wanted = f"{shape.dtype} {list(shape.shape or ())}"
        detail = f"expected {wanted}, found {meta.dtype} {list(meta.shape)}"
        return Mismatch(meta.name, "layout", detail)
    tensor = next(tensor for tensor in at.tensors if tensor.name == meta.name)
    if at.checksum is None or tensor.digest is None:
        return None
    digest = checksums.new(at.checksum)
    checksums.update(digest, bits)
    if digest.hexdigest() == tensor.digest:
        return None
    return Mismatch(
        meta.name,
        "bits",
        f"expected {at.checksum} {tensor.digest} by version {at.identity!r}, found {digest.hexdigest()}",
    )


def _rebuilt_differences(
    store: Store,
    layout: Interchange,
    target: ForeignVersion,
    source: CheckpointSource,
    names: set[str],
) -> dict[str, Mismatch]:
    """Compare tensors with a version that is rebuilt from a full one, bit by bit."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="syncline-verify-") as directory:
        truth = Snapshot(Path(directory))
        Follower(store, layout, truth, verify="changed", observe=ignore).sync(target.identity)
        for name in sorted(names):
            if truth.view(name).size != source.bits(name).size:
                continue
            offsets, _, _ = kernels.diff(truth.view(name), source.bits(name))
            if offsets.size:
                detail = f"other bits than in version {target.identity!r}"
                found[name] = Mismatch(name, "bits", detail, offsets.size)
    return found


def _differing(
    store: Store,
    layout: Interchange,
    full: ForeignVersion,
    source: CheckpointSource,
    names: set[str],
) -> dict[str, Mismatch]:
    """Compare tensors with a full version that has no digests, bit by bit."""
    found = {}
    for meta, pieces in layout.read(store, full, None):
        changed = 0
        for piece in pieces:
            if meta.name in names and isinstance(piece, Span):
                there = source.bits(meta.name)[piece.start : piece.start + piece.bits.size]
                changed += int(np.count_nonzero(there != piece.bits))
        if changed:
            detail = f"other bits than in version {full.identity!r}"
            found[meta.name] = Mismatch(meta.name, "bits", detail, changed)
    return found


def check_foreign(
    store: Store, layout: Interchange, *, deep: bool, observe: Observe
) -> tuple[int, list[Finding]]:
    """Check every version of a foreign directory; return how many there are, and findings.

    What the layout does not guarantee, and what belongs to no version that is whole, are remarks.

    Args:
        deep: also rebuild every version that a full one leads to, in temporary files, so that every payload
            is decoded and every digest proved.
    """
    findings: list[Finding] = []
    versions: list[ForeignVersion] = []
    with _noting(findings, layout.name):
        versions = layout.versions(store)
        _remark(store, versions, findings)
    if deep:
        _rebuild(store, layout, versions, findings, observe)
    return len(versions), findings


def _remark(store: Store, versions: Sequence[ForeignVersion], findings: list[Finding]) -> None:
    known = {info.key for at in versions for info in at.objects}
    for info in store.list():
        if info.key not in known:
            remark = "of no version that is whole: not finished, or not of this run"
            findings.append(Finding(info.key, remark, is_fault=False))
    identities = {at.identity for at in versions}
    for at in versions:
        if at.kind == "delta" and at.base not in identities:
            remark = f"its base {at.base!r} is not here: only a copy of it can follow"
            findings.append(Finding(at.identity, remark, is_fault=False))
    sentences = dict.fromkeys(sentence for at in versions for sentence in at.missing)
    findings += [Finding("guarantees", sentence, is_fault=False) for sentence in sentences]


def _rebuild(
    store: Store,
    layout: Interchange,
    versions: Sequence[ForeignVersion],
    findings: list[Finding],
    observe: Observe,
) -> None:
    with tempfile.TemporaryDirectory(prefix="syncline-fsck-") as directory:
        engine = Snapshot(Path(directory))
        for number, at in enumerate(versions):
            if chain.back(versions, at)[-1].kind == "full":
                held = engine.held()
                if held is None or held.manifest.run_id != mark(layout.name, str(at.base)):
                    engine = Snapshot(Path(directory))
                with _noting(findings, at.identity):
                    Follower(store, layout, engine, verify="full", observe=ignore).sync(at.identity)
            observe(Step("fsck.version", number + 1, len(versions)))


@contextmanager
def _noting(findings: list[Finding], where: str) -> Iterator[None]:
    """Turn an error inside into a finding; the check goes on with what comes next."""
    try:
        yield
    except SynclineError as error:
        findings.append(Finding(where, str(error)))


@contextmanager
def rebuilt(store: Store, layout: Interchange) -> Iterator[tuple[ForeignVersion, CheckpointSource]]:
    """Yield the newest version of a foreign directory, and a temporary checkpoint that holds it."""
    with tempfile.TemporaryDirectory(prefix="syncline-diff-") as directory:
        target = Path(directory) / "checkpoint"
        applied = Follower(
            store, layout, CheckpointDir(target), verify="changed", observe=ignore
        ).sync()
        versions = layout.versions(store)
        if applied.identity is None:
            raise FormatError(f"layout {layout.name}: nothing was followed")
        yield chain.find(versions, applied.identity), CheckpointSource(target)
