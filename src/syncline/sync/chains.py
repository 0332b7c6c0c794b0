"""The versions of a run, whatever its layout, as one chain; and what they are called in another layout."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from syncline.abc import Interchange, Store
from syncline.errors import BaseVersionError
from syncline.sync.history import History
from syncline.version import ForeignVersion, Kind

_LAST_NUMBER = re.compile(r"(?:.*[^0-9])?([0-9]{1,18})")


@dataclass(frozen=True, slots=True)
class SourceVersion:
    """One version of a source, whatever its layout."""

    identity: str
    base: str | None
    kind: Kind
    payload_bytes: int
    missing: tuple[str, ...] = ()


def one_chain(source: Store, layout: Interchange | None) -> list[SourceVersion]:
    """Return a source's versions in order, as one chain.

    Raises:
        BaseVersionError: there is none, or one is not made on the one before it.
    """
    found = _own(source) if layout is None else _foreign(layout.versions(source))
    if not found:
        raise BaseVersionError("the source has no version that is whole: nothing to convert")
    for before, at in pairwise(found):
        if at.kind == "delta" and at.base != before.identity:
            raise BaseVersionError(
                f"version {at.identity!r} is made on {at.base!r}, not on {before.identity!r}, which comes "
                "before it: expected one chain; move the versions of other chains elsewhere"
            )
    return found


def _own(source: Store) -> list[SourceVersion]:
    versions = [
        SourceVersion(
            f"{at.version:06d}",
            None if at.manifest.base_version is None else f"{at.manifest.base_version:06d}",
            at.manifest.kind,
            at.manifest.payload_bytes,
        )
        for at in History.open(source).back()
    ][::-1]
    first = next((n for n, at in enumerate(versions) if at.kind == "full"), len(versions))
    return versions[first:]


def _foreign(versions: Sequence[ForeignVersion]) -> list[SourceVersion]:
    return [
        SourceVersion(at.identity, at.base, at.kind, at.payload_bytes, at.missing)
        for at in versions
    ]


def names_in(versions: Sequence[SourceVersion], to: str) -> dict[str, str]:
    """Return what every version, and the base of the first, is called in the target.

    Readers of the slime layout count versions, so there the last number of a name stands for it, if
    those numbers rise.
    """
    identities = [version.identity for version in versions]
    if versions[0].base is not None:
        identities.insert(0, versions[0].base)
    matches = [_LAST_NUMBER.fullmatch(identity) for identity in identities]
    numbers = [int(match[1]) for match in matches if match is not None]
    is_rising = all(a < b for a, b in pairwise(numbers))
    if to != "slime" or len(numbers) != len(versions) + (versions[0].base is not None):
        return {identity: identity for identity in identities}
    if not is_rising:
        return {identity: identity for identity in identities}
    return {identity: f"{number:06d}" for identity, number in zip(identities, numbers, strict=True)}
