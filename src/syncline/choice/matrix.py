"""The table of DESIGN section 7: how versions of each kind reach engines in each place, or why they do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from syncline.choice.values import Topology, Updater
from syncline.version import Kind

Place = Literal["joining", "colocated", "fabric", "apart"]

PLACES: tuple[Place, ...] = ("joining", "colocated", "fabric", "apart")
"""From the nearest: what serves the first place that a topology has is the table's answer."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line: for engines in `place`, a version of `kind` goes by `updater`.

    Attributes:
        updater: None: refused.
        why: the reason, in either case.
    """

    place: Place
    kind: Kind
    updater: Updater | None
    why: str


MATRIX: tuple[Row, ...] = (
    Row(
        "joining",
        "full",
        "peers",
        "whoever has the version lets those that join read it; nobody else is disturbed",
    ),
    Row(
        "joining",
        "delta",
        None,
        "an engine that joins holds no base that a delta would fit; it takes a full version",
    ),
    Row(
        "colocated",
        "full",
        "shared-memory",
        "flat buckets in memory that both sides map: nothing crosses a network or a disk",
    ),
    Row(
        "colocated",
        "delta",
        None,
        "nothing is saved: all weights cross at the speed of memory, and finding what changed reads all of "
        "them, too; leave the kind out, or use another transport",
    ),
    Row(
        "fabric",
        "full",
        "collective",
        "one broadcast in double-buffered buckets reaches all engines",
    ),
    Row(
        "fabric",
        "delta",
        "collective",
        "one broadcast of the changes reaches all engines; on a quick fabric `indices` cost the least to code",
    ),
    Row(
        "apart",
        "full",
        "store",
        "a full version in a store, which engines pull when they can",
    ),
    Row(
        "apart",
        "delta",
        "store",
        "a delta in a store: on a slow link its few bytes are what counts",
    ),
)


def against(updater: str, kind: Kind) -> str | None:
    """Return why an updater does not carry a kind of version; None if it does.

    Example:
        >>> against("shared-memory", "delta").partition(":")[0]
        'nothing is saved'
        >>> against("collective", "delta") is None
        True
    """
    places = {row.place for row in MATRIX if row.updater == updater}
    rows = [row for row in MATRIX if row.place in places and row.kind == kind]
    return None if any(row.updater == updater for row in rows) or not rows else rows[0].why


def out_of_reach(place: Place, topology: Topology) -> str | None:
    """Return why engines of a topology cannot be served as those in `place` are; None if they can."""
    return _CONDITIONS[place](topology)


def _joining(topology: Topology) -> str | None:
    if not topology.joining:
        return "no engine joins a running fleet"
    if not topology.holders:
        return "nobody who holds the version offers it to those that join"
    return None


def _live(topology: Topology) -> str | None:
    if topology.joining:
        return "no version is made for engines that join, and a round would take in the whole fleet"
    return None


def _colocated(topology: Topology) -> str | None:
    if not topology.colocated:
        return "not all engines are on the trainer's machine"
    return _live(topology)


def _fabric(topology: Topology) -> str | None:
    if not topology.fabric:
        return "trainer and engines are not on one fabric"
    return _live(topology)


def _apart(topology: Topology) -> str | None:
    return None if topology.store else "there is no store that the trainer may write into"


_CONDITIONS: Mapping[Place, Callable[[Topology], str | None]] = MappingProxyType(
    {"joining": _joining, "colocated": _colocated, "fabric": _fabric, "apart": _apart}
)
