"""A puller behind a gate: what is put back, what is refused afterwards, and what Prometheus sees."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from gate_pair import PROBES, Pair
from syncline.errors import VerifyError
from syncline.gate import Gate, Limits
from syncline.serving import Puller, Replica, ScoredPuller
from syncline.serving.metrics import text


class Pulling:
    """The engine of a pair, as a puller; it may change a bit of what it was told to take."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.spoils: set[int] = set()
        self.pulled: list[int] = []

    def sync(self, version: int | None, *, repair: bool = False) -> object:
        self.pulled.append(version)
        self.pair.receiver.sync(version, repair=True)
        self.pair.sync(version)
        if version in self.spoils:
            self.pair.live["head"][3, PROBES[0].continuation[0]] += 9
        return None

    def held(self):
        return self.pair.receiver._engine.held()

    def is_serving(self) -> bool:
        return True

    def figures(self):
        return {"syncline_pause_seconds": 0.5}


@pytest.fixture
def pair() -> Pair:
    pair = Pair()
    pair.publish()
    return pair


def scored(pair: Pair, action: str, limits: Path | None = None) -> tuple[Pulling, ScoredPuller]:
    pulling = Pulling(pair)
    gate = Gate(pair.scorer, pair.store, action=action, wait_s=0)
    return pulling, ScoredPuller(pulling, pair.store, gate, limits)


def test_it_is_a_puller_that_learns_and_writes_its_limits(pair: Pair, tmp_path: Path) -> None:
    limits = tmp_path / "limits.json"
    _, puller = scored(pair, "flag", limits)
    assert isinstance(puller, Puller)
    assert puller.figures() == {"syncline_pause_seconds": 0.5}
    puller.sync(None)
    assert puller.held().version == 1
    assert Limits.load(limits.read_bytes(), "limits").max_difference > 0
    figures = puller.figures()
    assert figures["syncline_gate_is_flagged"] == 0
    assert figures["syncline_pause_seconds"] == 0.5
    assert 0 < figures["syncline_gate_max_difference_nats"] < 1e-4


def test_a_flagged_version_stays_where_flagging_is_all(pair: Pair) -> None:
    pulling, puller = scored(pair, "flag")
    puller.sync(1)
    second = pair.step()
    pulling.spoils.add(second.version)
    puller.sync(None)
    assert puller.held().version == 2
    assert puller.figures()["syncline_gate_is_flagged"] == 1


def test_a_flagged_version_is_put_back_and_refused_until_another_comes(pair: Pair) -> None:
    pulling, puller = scored(pair, "rollback")
    puller.sync(1)
    pulling.spoils.add(pair.step().version)
    with pytest.raises(VerifyError, match="put back to 1"):
        puller.sync(None)
    assert puller.held().version == 1
    pulled = list(pulling.pulled)
    for version in (None, 2):
        with pytest.raises(VerifyError, match="was flagged by the gate and put back"):
            puller.sync(version)
    assert pulling.pulled == pulled
    pair.step()
    puller.sync(None)
    assert puller.held().version == 3
    pulling.spoils.clear()
    puller.sync(2, repair=True)
    assert puller.held().version == 2


def test_a_replica_serves_the_old_version_on_and_says_why(pair: Pair) -> None:
    pulling, puller = scored(pair, "rollback")
    with Replica(pair.store, puller, follow_s=0.01) as replica:
        wait_for(lambda: replica.status().readiness)
        pulling.spoils.add(2)
        pair.resets_cache = True
        publish_only(pair)
        wait_for(lambda: "gate" in str(replica.status()))
        assert puller.held().version == 1
        assert 'syncline_gate_is_flagged{replica="0"} 1' in text([replica])
        publish_only(pair)
        wait_for(lambda: puller.held().version == 3)


def publish_only(pair: Pair) -> None:
    """Publish a version and its scores, and leave it to the replica to follow."""
    pair.sync = lambda version=None: None
    pair.step()
    del pair.sync


def wait_for(is_so) -> None:
    until_s = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.005)
