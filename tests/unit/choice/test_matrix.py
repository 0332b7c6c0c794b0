"""Every row of the table: what serves whom, what is refused, and with what reason."""

import pytest

from syncline.choice import MATRIX, Density, Topology, against, decide
from syncline.choice.matrix import PLACES
from syncline.errors import ConfigError

MODEL = Density(1_000_000_000, 0.01)
EVERYWHERE = {
    "colocated": Topology(colocated=True, store=False),
    "fabric": Topology(engines=2, fabric=True, store=False),
    "apart": Topology(engines=2, hosts=2),
    "joining": Topology(engines=4, joining=1, holders=1, store=False),
}


def test_the_table_has_one_row_for_every_place_and_kind() -> None:
    rows = [(row.place, row.kind) for row in MATRIX]
    assert sorted(rows) == sorted((place, kind) for place in PLACES for kind in ("full", "delta"))


@pytest.mark.parametrize("row", MATRIX, ids=lambda row: f"{row.place}-{row.kind}")
def test_a_row_is_what_is_chosen_where_nothing_else_is_left(row) -> None:
    topology = EVERYWHERE[row.place]
    if row.updater is None:
        with pytest.raises(ConfigError) as refused:
            decide(topology, MODEL, kind=row.kind)
        assert row.why in str(refused.value)
    else:
        decision = decide(topology, MODEL, kind=row.kind)
        assert (decision.transport, decision.chosen.kind) == (row.updater, row.kind)
        assert decision.why[0] == row.why


def test_a_delta_through_shared_memory_is_refused_because_nothing_is_saved() -> None:
    with pytest.raises(
        ConfigError, match="nothing is saved: all weights cross at the speed of memory"
    ):
        decide(Topology(colocated=True), MODEL, transport="shared-memory", kind="delta")
    assert "nothing is saved" in str(against("shared-memory", "delta"))
    assert "no base" in str(against("peers", "delta"))
    assert against("store", "delta") is against("collective", "full") is None


@pytest.mark.parametrize(
    ("topology", "transport", "reason"),
    [
        (Topology(), "shared-memory", "not all engines are on the trainer's machine"),
        (Topology(), "collective", "not on one fabric"),
        (Topology(fabric=True, store=False), "store", "no store that the trainer may write into"),
        (Topology(fabric=True), "peers", "no engine joins a running fleet"),
        (Topology(joining=2), "peers", "nobody who holds the version offers it"),
        (Topology(fabric=True, joining=1, holders=1), "collective", "take in the whole fleet"),
        (Topology(colocated=True, joining=1), "shared-memory", "take in the whole fleet"),
    ],
)
def test_a_transport_that_cannot_reach_the_engines_is_refused_with_the_reason(
    topology, transport, reason
) -> None:
    with pytest.raises(ConfigError, match=reason):
        decide(topology, MODEL, transport=transport)


def test_several_trainer_ranks_have_live_paths_too() -> None:
    assert decide(Topology(fabric=True, writers=4), MODEL).transport == "collective"
    assert decide(Topology(colocated=True, writers=2), MODEL).transport == "shared-memory"


def test_where_nothing_reaches_the_engines_every_row_says_why() -> None:
    with pytest.raises(ConfigError) as refused:
        decide(Topology(store=False), MODEL)
    assert all(f"{place}, full: " in str(refused.value) for place in PLACES)


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"engines": 0}, "engines must be at least 1"),
        ({"joining": -1}, "joining must be at least 0"),
        ({"engines": 4, "hosts": 2, "colocated": True}, "on one machine, found hosts=2"),
        ({"engines": 1, "hosts": 2}, "cannot be on 2 hosts"),
    ],
)
def test_a_topology_that_cannot_be_is_refused(fields, fault) -> None:
    with pytest.raises(ConfigError, match=fault):
        Topology(**fields)
