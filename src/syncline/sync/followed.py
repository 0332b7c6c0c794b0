"""Versions of a foreign layout in our own terms: which to apply in turn, and what an engine then holds."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from syncline.errors import BaseVersionError, ConfigError, VerifyError
from syncline.format import names
from syncline.interchange import chain
from syncline.sync.writer import model_fingerprint
from syncline.types import Fingerprint
from syncline.version import ForeignVersion, HeldVersion, Manifest, TensorEntry

FIRST_NUMBER = 2
"""Number of the first version that an engine takes; 1 stands for whatever the engine had before."""


def mark(layout: str, identity: str) -> str:
    """Return the `run_id` under which an engine holds a foreign version: 32 digits of its name's SHA-256.

    An identity may be any text, so it is told by digest; what lies under it is `ForeignVersion.digest`.
    """
    return hashlib.sha256(f"{layout}\0{identity}".encode()).hexdigest()[:32]


def holds(held: HeldVersion | None, at: ForeignVersion) -> bool:
    """Tell whether an engine holds a version of this name, whatever lies under it."""
    return held is not None and held.manifest.run_id == mark(at.layout, at.identity)


def record(
    at: ForeignVersion,
    held: HeldVersion | None,
    table: Mapping[str, TensorEntry],
    before: Fingerprint,
) -> HeldVersion:
    """Return what an engine holds once it has a foreign version: every tensor and its fingerprint.

    The manifest has no parts: it says what the engine holds, not how that came. The number counts the
    versions that the engine has followed.
    """
    number = FIRST_NUMBER if held is None else held.version + 1
    base_name = f"{at.layout}\0{at.base}".encode()
    entries = tuple(table[name] for name in sorted(table))
    manifest = Manifest(
        run_id=mark(at.layout, at.identity),
        epoch=1,
        version=number,
        kind="delta",
        base_version=number - 1,
        base_sha256=hashlib.sha256(base_name).hexdigest() if held is None else held.sha256,
        encoding="auto",
        parts=(),
        files=(),
        tensors=entries,
        fingerprint_before=before,
        fingerprint=model_fingerprint(entries),
    )
    return HeldVersion(manifest, at.digest)


def path(
    versions: Sequence[ForeignVersion],
    target: ForeignVersion,
    held: HeldVersion | None,
    *,
    has_weights: bool,
) -> list[ForeignVersion]:
    """Return the versions to apply in turn: from a full one, or from what the engine holds, to `target`.

    Raises:
        VerifyError: the version that the engine holds was rewritten under the same name.
        BaseVersionError: no way leads from what the engine holds to `target`.
    """
    steps: list[ForeignVersion] = []
    for at in chain.back(versions, target):
        if held is not None and holds(held, at):
            _check_same(at, held)
            return steps
        steps.insert(0, at)
        if at.kind == "full":
            return steps
    first = steps[0]
    if held is None:
        if has_weights and first.base is not None:
            return steps
        raise BaseVersionError(
            f"version {target.identity!r} cannot be rebuilt: its chain begins with {first.identity!r}, a delta "
            f"on {first.base!r}, which is not there; start from the base checkpoint: copy it, then follow "
            "with adopt (syncline pull --adopt)"
        )
    if first.base is not None and held.manifest.run_id == mark(first.layout, first.base):
        return steps
    raise BaseVersionError(_no_way(versions, target, first, held), version=held.version)


def number_of(version: int | str | None) -> int | None:
    """Return the number of a version of a run of our own, given as one or as its directory's name.

    Raises:
        ConfigError: it is neither.
    """
    if version is None or isinstance(version, int):
        return version
    if version.isdecimal():
        return int(version)
    number = names.version_of(version)
    if number is None:
        raise ConfigError(
            "version: expected a number (7, or weight_v000007) in a run of Syncline's own, found "
            f"{version!r}"
        )
    return number


def _check_same(at: ForeignVersion, held: HeldVersion) -> None:
    if at.digest != held.sha256:
        raise VerifyError(
            f"version {at.identity!r} is not the one that the engine holds under this name: its files were "
            "rewritten, as by a run that was started again and counts from the beginning; nothing was "
            "written; follow the new run with a fresh copy of its base checkpoint, or repair=True (syncline "
            "pull --repair) if it has a full version",
            version=held.version,
        )


def _no_way(
    versions: Sequence[ForeignVersion],
    target: ForeignVersion,
    first: ForeignVersion,
    held: HeldVersion,
) -> str:
    there = next((at for at in versions if holds(held, at)), None)
    if there is None:
        what = "a version that is not in this directory (of another run, or removed)"
    else:
        what = f"version {there.identity!r}, on which {target.identity!r} is not made"
    return (
        f"the engine holds {what}; the chain of {target.identity!r} begins with {first.identity!r}, a delta "
        f"on {first.base!r}; nothing was written; start from a fresh copy of the base checkpoint"
    )
