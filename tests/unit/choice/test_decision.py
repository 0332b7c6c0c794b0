"""The decision: pure, printable, and moved by density, speed and topology in the direction that they should."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from syncline.choice import (
    REFERENCE,
    Density,
    Link,
    Links,
    Terms,
    Topology,
    decide,
    measure_machine,
)
from syncline.errors import ConfigError

MODEL = Density(2_000_000_000, 0.01)
QUICK = Links(store=Link.of(5e9, 0.0001), fabric=Link.of(10e9, 0.0001))


def test_the_same_figures_give_the_same_decision_and_it_is_plain_json() -> None:
    topology = Topology(engines=4, hosts=2, fabric=True)
    first, second = (decide(topology, MODEL, QUICK) for _ in range(2))
    assert first == second
    plain = json.loads(json.dumps(first.as_dict(), allow_nan=False))
    assert plain["transport"] == "collective"
    terms = plain["chosen"]["terms"]
    parts = [terms[f"{name}_s"] for name in ("encode", "wire", "decode", "apply", "pause")]
    assert terms["total_s"] == pytest.approx(sum(parts))


def test_every_row_is_the_choice_or_an_alternative_and_the_quickest_come_first() -> None:
    decision = decide(Topology(colocated=True, fabric=True), MODEL, QUICK)
    assert len(decision.alternatives) == 7
    legal = [option.predicted_s for option in decision.alternatives if option.terms is not None]
    assert legal == sorted(legal)
    refused = [option for option in decision.alternatives if option.terms is None]
    assert decision.alternatives[len(legal) :] == tuple(refused)
    assert all(option.why for option in refused)
    with pytest.raises(ConfigError, match="colocated, delta: refused: nothing is saved"):
        _ = next(o for o in refused if o.place == "colocated").predicted_s


def test_few_changes_travel_as_a_delta_and_very_many_as_all_weights() -> None:
    topology = Topology(engines=2, fabric=True)
    kinds = [
        decide(topology, Density(2_000_000_000, share), QUICK).chosen.kind
        for share in (0.0, 0.01, 0.05, 0.6, 1.0)
    ]
    assert kinds[:2] == ["delta", "delta"]
    assert kinds[-1] == "full"
    assert kinds == sorted(kinds)  # once it is full it stays so


def test_the_slower_the_link_the_smaller_the_encoding() -> None:
    names = [
        decide(Topology(), MODEL, Links(store=Link.of(speed))).chosen.encoding
        for speed in (1e11, 3e8, 1e6)
    ]
    assert names == ["indices", "packed", "tight"]


def test_integers_are_never_coded_by_exponents() -> None:
    slow = Links(store=Link.of(1e6))
    assert decide(Topology(), Density(10**9, 0.01, "I8"), slow).chosen.encoding == "packed"


def test_a_far_quicker_way_beats_the_table_and_the_decision_says_so() -> None:
    """A fabric of 1 MB/s beside a store of 1 GB/s: the table would say collective."""
    links = Links(store=Link.of(1e9), fabric=Link.of(1e6))
    decision = decide(Topology(engines=2, fabric=True), MODEL, links)
    assert decision.transport == "store"
    assert any("fabric, delta: collective would take" in line for line in decision.why)
    near = replace(links, fabric=Link.of(0.2e9))
    decision = decide(Topology(engines=2, fabric=True), MODEL, near)
    assert decision.transport == "collective"
    assert any("apart, delta: store might take" in line for line in decision.why)


def test_what_is_assumed_beats_nothing() -> None:
    links = Links(store=Link.of(1e9), fabric=Link.of(1e6, origin=Links().fabric.origin))
    assert decide(Topology(engines=2, fabric=True), MODEL, links).transport == "collective"


def test_engines_on_one_host_share_its_link_and_hosts_do_not() -> None:
    links = Links(store=Link.of(1e8))
    wire = [
        decide(Topology(engines=8, hosts=hosts), MODEL, links).chosen.terms.wire_s
        for hosts in (1, 2, 8)
    ]
    assert all(more > less for more, less in pairwise(wire))


def test_what_was_assumed_is_said() -> None:
    assert "link assumed" in decide(Topology(), MODEL).why[-1]
    assert "density given; link given; machine recorded" in decide(Topology(), MODEL, QUICK).why[-1]


def test_a_pause_counts_for_every_way_that_writes_into_an_engine() -> None:
    slow = replace(REFERENCE, pause_s=0.5)
    for topology in (Topology(), Topology(colocated=True), Topology(joining=1, holders=1)):
        assert decide(topology, MODEL, machine=slow).chosen.terms.pause_s == 0.5


def test_terms_add_up() -> None:
    assert Terms(1, 2, 3, 4, 5) + Terms(wire_s=1) == Terms(1, 3, 3, 4, 5)
    assert Terms(1, 2, 3, 4, 5).total_s == 15


@pytest.mark.parametrize(
    "make",
    [
        lambda: Link.of(0.0),
        lambda: Link.of(float("inf")),
        lambda: Link(1.0, 1.0, -1.0),
        lambda: Density(0, 0.1),
        lambda: Density(1, 1.1),
        lambda: replace(REFERENCE, codings=()),
        lambda: replace(REFERENCE, copy_bytes_per_s=0.0),
    ],
)
def test_figures_that_cannot_be_are_refused(make) -> None:
    with pytest.raises(ConfigError, match=r"expected|must be"):
        make()


def test_a_measured_machine_has_every_figure() -> None:
    machine = measure_machine(pause_s=0.25)
    assert {coding.name for coding in machine.codings} == {"indices", "packed", "tight"}
    assert machine.pause_s == 0.25
    assert machine.change_s > 0
    assert "measured" in machine.origin
    tight = next(coding for coding in machine.codings if coding.name == "tight")
    assert tight.encode_unit_s + tight.encode_change_s > 0


def test_a_transport_that_does_not_exist_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="one of shared-memory, .*found 'smem'"):
        decide(Topology(colocated=True), MODEL, QUICK, transport="smem")
