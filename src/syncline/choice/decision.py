"""The decision: of all ways that a topology allows, the table's, unless another one is known to be far quicker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

from syncline.choice.machine import REFERENCE, Machine
from syncline.choice.matrix import MATRIX, PLACES, Place, Row, out_of_reach
from syncline.choice.prediction import Terms, predict
from syncline.choice.values import ASSUMED, Density, Link, Links, Topology, Updater
from syncline.errors import ConfigError
from syncline.version import Kind

MARGIN = 4.0
"""How many times as long the table's way may take before a farther one is chosen.

Two predictions may each be off by a factor of two, and the nearer way depends on fewer others.
"""


@dataclass(frozen=True, slots=True)
class Option:
    """One row of the table for a given topology.

    Attributes:
        place, kind, updater: the row's; `updater` is None where it is refused for good.
        encoding: of a delta; wire_bytes: that every engine gets.
        terms: the prediction; None where it is refused.
        why: why one would take it, or why it is refused.
    """

    place: Place
    kind: Kind
    updater: Updater | None
    why: str
    terms: Terms | None = None
    wire_bytes: int = 0
    encoding: str | None = None

    @property
    def predicted_s(self) -> float:
        """Seconds in all.

        Raises:
            ConfigError: the way is refused.
        """
        if self.terms is None:
            raise ConfigError(f"{self}: {self.why}")
        return self.terms.total_s

    def __str__(self) -> str:
        way = "refused" if self.updater is None else self.updater
        return f"{self.place}, {self.kind}: {way}"


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided, from what, and what else there is.

    Attributes:
        chosen: the way to take; `alternatives`: the other rows of the table, the quickest first, then
            those that are refused.
        why: short sentences.
        topology, density, links, machine: what it was decided from.
    """

    chosen: Option
    alternatives: tuple[Option, ...]
    why: tuple[str, ...]
    topology: Topology
    density: Density
    links: Links
    machine: Machine

    @property
    def transport(self) -> Updater:
        """How versions travel."""
        if self.chosen.updater is None:
            raise ConfigError(f"{self.chosen}: {self.chosen.why}")
        return self.chosen.updater

    @property
    def link_bytes_per_s(self) -> float:
        """How fast deltas go, for the choice of an encoding tensor by tensor."""
        if self.transport == "collective":
            return self.links.fabric.up_bytes_per_s
        if (
            self.transport == "shared-memory"
        ):  # deltas go into the store, and nobody waits for them there
            return self.links.store.up_bytes_per_s
        engines = -(-self.topology.engines // self.topology.hosts)
        return self.links.store.down_bytes_per_s / engines

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, the sums included."""

        def plain(option: Option) -> dict[str, Any]:
            found = asdict(option)
            if option.terms is not None:
                found["terms"]["total_s"] = option.predicted_s
            return found

        return {
            "transport": self.transport,
            "chosen": plain(self.chosen),
            "alternatives": [plain(option) for option in self.alternatives],
            "why": list(self.why),
            "topology": asdict(self.topology),
            "density": asdict(self.density),
            "links": asdict(self.links),
            "machine": asdict(self.machine),
        }


def decide(
    topology: Topology,
    density: Density,
    links: Links | None = None,
    machine: Machine = REFERENCE,
    *,
    transport: Updater | None = None,
    kind: Kind | None = None,
) -> Decision:
    """Choose how versions go to the engines; the same arguments give the same decision.

    Args:
        links: measured or given; None: assumed, which the decision says.
        transport: only this one; kind: only versions of this kind.

    Raises:
        ConfigError: there is no such transport; or no row of the table is left: says why, row by row.

    Example:
        >>> chosen = decide(Topology(engines=8, fabric=True), Density(2_000_000_000, 0.01)).chosen
        >>> str(chosen), chosen.encoding
        ('fabric, delta: collective', 'packed')
    """
    if transport is not None and transport not in get_args(Updater):
        raise ConfigError(
            f"transport: expected 'auto' or one of {', '.join(get_args(Updater))}, found {transport!r}"
        )
    links = Links() if links is None else links
    options = [_option(row, topology, density, links, machine) for row in MATRIX]
    asked = [
        option
        for option in options
        if (transport is None or _serves(option, transport)) and kind in (None, option.kind)
    ]
    legal = [option for option in asked if option.terms is not None]
    if not legal:
        reasons = "; ".join(f"{option.place}, {option.kind}: {option.why}" for option in asked)
        raise ConfigError(f"no way is left to bring a version to the engines: {reasons}")
    home = min((option.place for option in legal), key=PLACES.index)
    near = min((o for o in legal if o.place == home), key=lambda o: o.predicted_s)
    best = min(legal, key=lambda o: o.predicted_s)
    is_known = not any(_link(o, links).origin == ASSUMED for o in (near, best))
    is_far_better = is_known and near.predicted_s > MARGIN * best.predicted_s
    chosen = best if is_far_better else near
    others = sorted(
        (option for option in options if option is not chosen),
        key=lambda o: (o.terms is None, 0.0 if o.terms is None else o.predicted_s),
    )
    why = _reasons(chosen, near, best, legal, density, links, machine)
    return Decision(chosen, tuple(others), why, topology, density, links, machine)


def _link(option: Option, links: Links) -> Link:
    """Return the link whose speed counts for a way: what shared memory leaves is the store's."""
    return links.fabric if option.updater in ("collective", "peers") else links.store


def _serves(option: Option, transport: Updater) -> bool:
    """Tell whether a row is about this transport; a refusal is about the one of its place."""
    return transport in {row.updater for row in MATRIX if row.place == option.place}


def _option(
    row: Row, topology: Topology, density: Density, links: Links, machine: Machine
) -> Option:
    why = out_of_reach(row.place, topology)
    if row.updater is None:
        return Option(row.place, row.kind, None, row.why if why is None else why)
    if why is None and topology.joining and row.kind == "delta":
        why = "an engine that joins holds no base that a delta would fit"
    if why is not None:
        return Option(row.place, row.kind, row.updater, why)
    found = predict(row, topology, density, links, machine)
    return Option(
        row.place,
        row.kind,
        row.updater,
        row.why,
        found.terms,
        found.wire_bytes,
        found.encoding,
    )


def _reasons(
    chosen: Option,
    near: Option,
    best: Option,
    legal: Sequence[Option],
    density: Density,
    links: Links,
    machine: Machine,
) -> tuple[str, ...]:
    """Say why, in the order in which the decision was made."""
    why = [chosen.why]
    if chosen.place != near.place:
        why.append(
            f"{near} would take {near.predicted_s:.3g} s, more than {MARGIN:g} times the "
            f"{chosen.predicted_s:.3g} s of this"
        )
    elif best.place != near.place:
        why.append(
            f"{best} might take {best.predicted_s:.3g} s instead of {near.predicted_s:.3g} s: not sure "
            f"enough, or not {MARGIN:g} times as quick; ask for it to have it"
        )
    other = [o for o in legal if o.place == chosen.place and o is not chosen]
    why += [
        f"{o.kind} instead of {chosen.kind}: {o.predicted_s:.3g} s instead of {chosen.predicted_s:.3g} s, "
        f"with {density.share:.2%} of {density.model_bytes / 1e9:.3g} GB changed"
        for o in other
    ]
    link = _link(chosen, links)
    if chosen.encoding is not None:
        why.append(
            f"`{chosen.encoding}`: at {link.down_bytes_per_s / 1e6:.3g} MB/s its bytes and its coding "
            "together take least"
        )
    why.append(f"density {density.origin}; link {link.origin}; machine {machine.origin}")
    return tuple(why)
