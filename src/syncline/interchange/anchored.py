"""Layouts that may hold a version twice: as a delta for those who follow, and whole for those who join."""

from __future__ import annotations

from collections.abc import Mapping

from syncline.version import ForeignVersion


def chosen(
    deltas: Mapping[int, ForeignVersion], fulls: Mapping[int, ForeignVersion]
) -> list[ForeignVersion]:
    """Return one version for every number, in order: the delta, where a full version leads up to it.

    So a follower reads deltas alone, and there is a way to every version to which there is one at all.
    """
    rooted: set[str | None] = set()
    found = []
    for number in sorted(deltas.keys() | fulls.keys()):
        delta, full = deltas.get(number), fulls.get(number)
        at = delta if delta is not None and (full is None or delta.base in rooted) else full
        if at is None:
            continue
        if full is not None or at.base in rooted:
            rooted.add(at.identity)
        found.append(at)
    return found
