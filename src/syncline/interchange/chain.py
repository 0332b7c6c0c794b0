"""How versions hang together when nothing but each one's base is known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from syncline.errors import BaseVersionError, FormatError
from syncline.version import ForeignVersion

_LISTED = 8


def ordered(versions: Iterable[ForeignVersion]) -> list[ForeignVersion]:
    """Return versions with each after its base, if that is among them; else as they came.

    Raises:
        FormatError: two have one identity, or the bases go round in a circle.
    """
    by_identity: dict[str, ForeignVersion] = {}
    for version in versions:
        if version.identity in by_identity:
            raise FormatError(
                f"version {version.identity!r} is there twice: {_place(by_identity[version.identity])} and "
                f"{_place(version)}; remove the one that is not of this run"
            )
        by_identity[version.identity] = version
    done: dict[str, ForeignVersion] = {}
    for version in by_identity.values():
        waiting = []
        for at in _back(version, by_identity):
            if at.identity in done:
                break
            waiting.append(at)
        done |= {at.identity: at for at in reversed(waiting)}
    return list(done.values())


def find(versions: Sequence[ForeignVersion], identity: str | int | None) -> ForeignVersion:
    """Return the version of this identity; with None the newest, which no other is made on.

    A number, or digits that are no identity themselves, stand for the identity of digits of this value.

    Raises:
        BaseVersionError: there is none, or no version at all.
        FormatError: several could be the newest; lists them.
    """
    if identity is not None:
        for same in (_is_same, _is_number):
            found = [version for version in versions if same(version.identity, identity)]
            if len(found) == 1:
                return found[0]
        raise BaseVersionError(
            f"version {identity!r} is not there, or not whole yet; there are "
            f"{_listed([version.identity for version in versions])}"
        )
    bases = {version.base for version in versions}
    ends = [version for version in versions if version.identity not in bases]
    if not ends:
        raise BaseVersionError(
            "no version is whole yet: expected one that a publisher has finished"
        )
    if len(ends) > 1:
        raise FormatError(
            "nothing says which version is the current one: "
            f"{_listed([version.identity for version in ends])} are bases of no other; name the one to take"
        )
    return ends[0]


def back(versions: Sequence[ForeignVersion], target: ForeignVersion) -> list[ForeignVersion]:
    """Return `target`, its base, and so on, up to a full version or one whose base is not there.

    Raises:
        FormatError: the bases go round in a circle.
    """
    return list(_back(target, {version.identity: version for version in versions}))


def _back(
    target: ForeignVersion, by_identity: dict[str, ForeignVersion]
) -> Iterable[ForeignVersion]:
    seen: set[str] = set()
    at: ForeignVersion | None = target
    while at is not None:
        if at.identity in seen:
            raise FormatError(
                f"{_place(at)}: the bases of version {at.identity!r} go round in a circle"
            )
        seen.add(at.identity)
        yield at
        at = None if at.base is None else by_identity.get(at.base)


def _is_same(identity: str, wanted: str | int) -> bool:
    return identity == wanted


def _is_number(identity: str, wanted: str | int) -> bool:
    text = str(wanted)
    return text.isdecimal() and identity.isdecimal() and int(identity) == int(text)


def _place(version: ForeignVersion) -> str:
    return version.objects[0].key if version.objects else repr(version.identity)


def _listed(identities: Sequence[str]) -> str:
    more = f" and {len(identities) - _LISTED} more" if len(identities) > _LISTED else ""
    return (", ".join(repr(name) for name in identities[-_LISTED:]) or "none") + more
