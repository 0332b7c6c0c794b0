"""What a way of moving a version would take, in the terms in which reports count it afterwards.

Terms are added up as if nothing overlapped, at the speed of one core: so a prediction is rather too long,
and is made to compare ways with each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from syncline import codecs
from syncline.choice.machine import Coding, Machine
from syncline.choice.matrix import Row
from syncline.choice.values import Density, Link, Links, Topology
from syncline.codecs import exponents
from syncline.codecs.tight import Tight
from syncline.errors import ConfigError

_PUTS = 6
"""Objects that publishing a version writes or swaps one after the other, looks at the owner included."""

_GETS = 4
_WORDS = 5
"""Messages each way of a delivery on a live path: offer to verdict."""

_MANIFEST_BYTES = 20_000


@dataclass(frozen=True, slots=True)
class Terms:
    """Seconds of one way, from weights in the trainer to all engines serving them.

    Attributes:
        encode_s: finding the changes and coding them.
        wire_s: getting bytes into the store, and to all engines.
        decode_s: proving and decoding in the engine.
        apply_s: writing what changed.
        pause_s: stopping, flushing and going on; the writes are inside the pause, too.
    """

    encode_s: float = 0.0
    wire_s: float = 0.0
    decode_s: float = 0.0
    apply_s: float = 0.0
    pause_s: float = 0.0

    @property
    def total_s(self) -> float:
        """All of them, one after the other."""
        return self.encode_s + self.wire_s + self.decode_s + self.apply_s + self.pause_s

    def __add__(self, other: Terms) -> Terms:
        return Terms(
            self.encode_s + other.encode_s,
            self.wire_s + other.wire_s,
            self.decode_s + other.decode_s,
            self.apply_s + other.apply_s,
            self.pause_s + other.pause_s,
        )


@dataclass(frozen=True, slots=True)
class Predicted:
    """One way: its terms, bytes that every engine gets, and the encoding, None where weights go as they are."""

    terms: Terms
    wire_bytes: int
    encoding: str | None


def predict(
    row: Row, topology: Topology, density: Density, links: Links, machine: Machine
) -> Predicted:
    """Foretell what a row of the table takes that is not refused.

    Whatever way a version goes to the engines, the publisher first finds what changed and commits it to its
    store; engines that are served live do not wait for anything else of the store.

    Raises:
        ConfigError: the row is a refusal.
    """
    if row.updater is None:
        raise ConfigError(f"{row.place}, {row.kind}: {row.why}")
    if row.updater == "peers":
        return _joined(topology, density, links, machine)
    if row.kind == "delta":
        ways = [
            _delta(row, coding, topology, density, links, machine)
            for coding in machine.codings
            if coding.name != Tight.name or density.dtype in exponents.FIELDS
        ]
        return min(ways, key=lambda way: way.terms.total_s)
    return _full(row, topology, density, links, machine)


def _delta(
    row: Row, coding: Coding, topology: Topology, density: Density, links: Links, machine: Machine
) -> Predicted:
    nbytes = payload_bytes(coding, density)
    units, changed = density.meta.unit_count, density.changed
    decode_s = coding.decode_unit_s * units + coding.decode_change_s * changed
    terms = _found(density, machine) + _encoded(coding, density) + Terms(decode_s=decode_s)
    terms += _committed(nbytes, topology, links, machine) + _written(changed, machine)
    if row.updater == "store":
        terms += _pulled(nbytes, topology, links.store, machine)
    else:
        terms += _sent(nbytes, topology, links.fabric)
    return Predicted(terms, nbytes, coding.name)


def _full(
    row: Row, topology: Topology, density: Density, links: Links, machine: Machine
) -> Predicted:
    nbytes = density.model_bytes
    terms = _written(density.changed, machine)
    terms += Terms(decode_s=nbytes / machine.prove_bytes_per_s)
    if topology.joining:  # what is there already is pulled
        return Predicted(terms + _pulled(nbytes, topology, links.store, machine), nbytes, None)
    terms += _found(density, machine)
    if row.updater == "store":
        terms += _committed(nbytes, topology, links, machine)
        terms += _pulled(nbytes, topology, links.store, machine)
        return Predicted(terms, nbytes, None)
    terms += min(
        (_kept(coding, topology, density, links, machine) for coding in machine.codings),
        key=lambda kept: kept.total_s,
    )
    if row.updater == "shared-memory":
        terms += Terms(wire_s=2 * nbytes / machine.copy_bytes_per_s)  # in by one, out by the other
    else:
        terms += _sent(nbytes, topology, links.fabric)
    return Predicted(terms, nbytes, None)


def _kept(
    coding: Coding, topology: Topology, density: Density, links: Links, machine: Machine
) -> Terms:
    """What the delta takes that the store gets, also where the engines get all weights."""
    nbytes = min(payload_bytes(coding, density), density.model_bytes)
    return _committed(nbytes, topology, links, machine) + _encoded(coding, density)


def _joined(topology: Topology, density: Density, links: Links, machine: Machine) -> Predicted:
    """Foretell a join: those who join pass on what they have, so the holders send little more than once."""
    nbytes = density.model_bytes
    rounds = math.ceil(math.log2(1 + topology.joining / max(1, topology.holders))) or 1
    wire_s = rounds * nbytes / links.fabric.down_bytes_per_s + _GETS * links.fabric.latency_s
    terms = Terms(
        wire_s=wire_s,
        decode_s=nbytes / machine.prove_bytes_per_s,
        apply_s=nbytes / machine.copy_bytes_per_s,
        pause_s=machine.pause_s,
    )
    return Predicted(terms, nbytes, None)


def payload_bytes(coding: Coding, density: Density) -> int:
    """Return about how many bytes a delta has."""
    foreseen = codecs.get(coding.name).predict_bytes(density.meta, density.changed)
    return round(coding.size_ratio * foreseen)


def _found(density: Density, machine: Machine) -> Terms:
    return Terms(encode_s=density.model_bytes / machine.find_bytes_per_s)


def _encoded(coding: Coding, density: Density) -> Terms:
    units, changed = density.meta.unit_count, density.changed
    return Terms(encode_s=coding.encode_unit_s * units + coding.encode_change_s * changed)


def _committed(nbytes: int, topology: Topology, links: Links, machine: Machine) -> Terms:
    """What the publisher takes to bring a version into its store; nothing where it needs none."""
    if not topology.store:
        return Terms()
    link = links.store
    moved_s = (nbytes + _MANIFEST_BYTES) / (link.up_bytes_per_s * topology.writers)
    digested_s = nbytes / machine.digest_bytes_per_s
    return Terms(encode_s=digested_s, wire_s=moved_s + _PUTS * link.latency_s)


def _pulled(nbytes: int, topology: Topology, link: Link, machine: Machine) -> Terms:
    """What all engines take to get it from there: those on one machine share its link."""
    pullers = topology.joining or topology.engines
    share = math.ceil(pullers / topology.hosts)
    moved_s = share * (nbytes + _MANIFEST_BYTES) / link.down_bytes_per_s
    return Terms(
        wire_s=moved_s + _GETS * link.latency_s, decode_s=nbytes / machine.digest_bytes_per_s
    )


def _sent(nbytes: int, topology: Topology, link: Link) -> Terms:
    """What a broadcast takes: down a tree, in which every rank sends on what it has."""
    depth = math.ceil(math.log2(topology.engines + 1))
    return Terms(wire_s=depth * nbytes / link.up_bytes_per_s + _WORDS * link.latency_s)


def _written(changed: int, machine: Machine) -> Terms:
    return Terms(apply_s=changed * machine.change_s, pause_s=machine.pause_s)
