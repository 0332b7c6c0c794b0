"""A replica: catches up, follows orders one by one, fails without losing what it serves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hot_load_servers import Run, eventually
from syncline import MemoryEngine, MemoryStore, Publisher
from syncline.abc import Buffer, Store
from syncline.errors import ConfigError, StoreError, TornUpdateError
from syncline.hotload import WeightVersion
from syncline.serving import Replica
from syncline.serving.order import LineageError, Order, UnknownVersionError
from syncline.types import ObjectInfo


class SlowStore(Store):
    """Passes everything on; parts of versions wait until the test lets them go."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.reached = threading.Event()
        self.go = threading.Event()
        self.go.set()
        self.failure: Exception | None = None
        self.holds_everything = False

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        if self.holds_everything or key.endswith(".safetensors"):
            self.reached.set()
            assert self.go.wait(30)
        if self.failure is not None:
            raise self.failure
        return self.store.get(key, start, stop)

    def put(self, key: str, chunks: Iterator[Buffer]) -> None:
        self.store.put(key, chunks)

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        return self.store.list(prefix)

    def compare_and_swap(self, key: str, expected: bytes | None, new: bytes) -> None:
        self.store.compare_and_swap(key, expected, new)

    def delete(self, key: str) -> None:
        self.store.delete(key)

    def hold(self, *, everything: bool = False) -> None:
        self.holds_everything = everything
        self.reached.clear()
        self.go.clear()


@pytest.fixture
def run() -> Run:
    made = Run()
    for _ in range(3):
        made.publish()
    return made


def settled(replica: Replica) -> None:
    eventually(lambda: replica.status().stage != "loading", "the order was followed")


def order(replica: Replica, version: int, **more: Any) -> None:
    replica.check(Order(version, **more))
    replica.take(Order(version, **more))
    settled(replica)


def test_it_catches_up_before_it_is_ready(run: Run) -> None:
    store, engine = SlowStore(run.store), MemoryEngine()
    store.hold()
    with Replica(store, engine) as replica:
        assert store.reached.wait(30)
        status = replica.status()
        assert (status.readiness, status.identity, status.stage) == (False, None, "loading")
        assert "loading the current version" in str(status.reason)
        store.go.set()
        settled(replica)
        assert (replica.status().readiness, replica.status().identity) == (True, "weight_v000003")
    assert run.is_in(engine, 3)


def test_it_waits_for_a_first_version() -> None:
    run = Run(MemoryStore())
    with Replica(run.store, MemoryEngine()) as replica:
        eventually(lambda: replica.status().stage == "error", "it has tried once")
        assert "publish one first" in str(replica.status().reason)
        run.publish()
        eventually(lambda: replica.status().readiness, "it has found it")
        assert replica.status().identity == "weight_v000001"


def test_a_store_of_another_project_is_refused_with_the_way_out() -> None:
    ours, store = MemoryStore(), MemoryStore()
    Publisher(ours, layout="slime").publish({"w": np.zeros(8, np.float32)})
    for name in ("model-00000-of-00001.safetensors", "model.safetensors.index.json"):
        store.put(f"weight_v000001/{name}", [ours.get(f"weight_v000001/{name}")])
    with Replica(store, MemoryEngine()) as replica:
        eventually(lambda: replica.status().stage == "error", "it has tried once")
        status = replica.status()
        assert (status.readiness, status.identity) == (False, None)
        assert "the store is in layout 'slime'" in str(status.reason)
        with pytest.raises(ConfigError, match="syncline convert SRC DST --to syncline"):
            replica.check(Order(1))


def test_it_follows_orders_forwards_and_back(run: Run) -> None:
    engine = MemoryEngine()
    with Replica(run.store, engine) as replica:
        settled(replica)
        run.publish()
        run.publish()
        for version, spelling, said in ((5, "number", "5"), (2, "directory", "weight_v000002")):
            order(replica, version, spelling=spelling)
            assert (replica.status().readiness, replica.status().identity) == (True, said)
            assert run.is_in(engine, version)
        assert replica.take(Order(2)) is False


def test_an_order_is_checked_against_the_store(run: Run) -> None:
    with Replica(run.store, MemoryEngine()) as replica:
        settled(replica)
        replica.check(Order(3, previous=2))
        replica.check(Order(1))
        with pytest.raises(UnknownVersionError, match="version 9 is not in this run"):
            replica.check(Order(9))
        with pytest.raises(LineageError, match="is a delta on version 2; announce it so"):
            replica.check(Order(3, previous=1))
        with pytest.raises(LineageError, match="it is a full version"):
            replica.check(Order(1, previous=3))
        with pytest.raises(ConfigError, match="has no prompt cache"):
            replica.check(Order(3, reset=True))
        assert replica.status().readiness


def test_a_store_that_began_another_run_is_refused(run: Run) -> None:
    store = SlowStore(run.store)
    with Replica(store, MemoryEngine()) as replica:
        settled(replica)
        other = Run()
        other.publish()
        store.store = other.store
        with pytest.raises(LineageError, match="the store is now run"):
            replica.check(Order(1))


def test_a_failed_pull_leaves_the_old_version_and_says_why(run: Run) -> None:
    store, engine = SlowStore(run.store), MemoryEngine()
    with Replica(store, engine) as replica:
        settled(replica)
        run.publish()
        for failure in (StoreError("the disk is gone"), RuntimeError("what is this")):
            replica.check(Order(4))
            store.failure = failure
            order_taken = replica.take(Order(4))
            assert order_taken
            settled(replica)
            status = replica.status()
            assert (status.readiness, status.identity) == (False, "weight_v000003")
            assert (status.stage, status.reason) == (
                "error",
                f"{type(failure).__name__}: {failure}",
            )
            assert run.is_in(engine, 3)
            assert replica.admission.refusal(WeightVersion(exact=3)) is None
            store.failure = None
        order(replica, 4)
        assert replica.status().readiness
        assert run.is_in(engine, 4)


def test_two_orders_at_once_are_followed_in_turn(run: Run) -> None:
    store, engine = SlowStore(run.store), MemoryEngine()
    with Replica(store, engine) as replica:
        settled(replica)
        for _ in range(3):
            run.publish()
        store.hold()
        replica.take(Order(4))
        assert store.reached.wait(30)
        replica.take(Order(5))
        replica.take(Order(6))
        assert replica.status().identity == "weight_v000003"
        store.go.set()
        settled(replica)
        assert replica.status().identity == "weight_v000006"
    assert run.is_in(engine, 6)


def test_orders_from_many_threads_end_with_one_of_them_whole(run: Run) -> None:
    engine = MemoryEngine()
    with Replica(run.store, engine) as replica:
        settled(replica)
        threads = [
            threading.Thread(target=replica.take, args=(Order(1 + n % 3),)) for n in range(30)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        settled(replica)
        assert replica.status().readiness
        assert replica.admission.served in (1, 2, 3)
        assert run.is_in(engine, replica.admission.served)


def test_it_follows_the_store_by_itself(run: Run) -> None:
    store, engine = SlowStore(run.store), MemoryEngine()
    with Replica(store, engine, follow_s=0.01) as replica:
        settled(replica)
        run.publish()
        eventually(lambda: replica.status().identity == "weight_v000004", "it has followed")
        order(replica, 2)
        polls = threading.Event()
        polls.wait(0.1)
        assert replica.status().identity == "weight_v000002", "an order stays until HEAD moves"
        store.failure = StoreError("away")
        polls.wait(0.05)
        assert replica.status().identity == "weight_v000002"
        run.publish()
        store.failure = None
        eventually(lambda: replica.status().identity == "weight_v000005", "it has gone on")


def test_a_store_that_hangs_holds_up_no_answer(run: Run) -> None:
    store = SlowStore(run.store)
    with Replica(store, MemoryEngine(), follow_s=0.01) as replica:
        settled(replica)
        store.hold(everything=True)
        assert store.reached.wait(30)
        assert replica.status().readiness
        assert replica.take(Order(2))
        assert replica.status().stage == "loading"
        store.go.set()
        settled(replica)
        assert replica.admission.served == 2


def test_hooks_run_after_the_weights_and_before_the_report(run: Run) -> None:
    engine = MemoryEngine()
    calls: list[object] = []

    def load(held: Any) -> None:
        assert engine.held() == held
        calls.append((held.version, replica.admission.served))

    replica = Replica(run.store, engine, load=load, reset_cache=calls.append)
    with replica:
        settled(replica)
        assert calls == [(3, None), True]
        for version, reset, expected in (
            (2, None, [(2, 3), True]),
            (1, False, [(1, 2)]),
            (2, "new_session", [(2, 1), "new_session"]),
            (3, True, [(3, 2), True]),
        ):
            calls.clear()
            order(replica, version, reset=reset)
            assert calls == expected
        calls.clear()
        order(replica, 3)
        assert calls == []


@pytest.mark.parametrize("broken", ["load", "reset_cache"])
def test_a_hook_that_fails_leaves_no_version_that_could_be_stale(run: Run, broken: str) -> None:
    failures: list[Exception] = []

    def hook(_: object) -> None:
        if failures:
            raise failures.pop()

    with Replica(run.store, MemoryEngine(), **{broken: hook}) as replica:
        settled(replica)
        failures.append(OSError("engine does not answer"))
        order(replica, 2)
        status = replica.status()
        assert (status.readiness, status.identity, status.stage) == (False, None, "error")
        assert status.reason == "OSError: engine does not answer"
        refusal = replica.admission.refusal(WeightVersion(exact=2))
        assert refusal is not None
        order(replica, 2)
        assert (replica.status().readiness, replica.status().identity) == (True, "weight_v000002")


def test_a_reset_that_is_owed_is_made_by_the_next_commit(run: Run) -> None:
    store = SlowStore(run.store)
    calls: list[object] = []

    def reset(how: object) -> None:
        calls.append(how)
        if len(calls) == 2:
            raise OSError("engine does not answer")

    with Replica(store, MemoryEngine(), reset_cache=reset) as replica:
        settled(replica)
        order(replica, 2)
        assert replica.status().stage == "error"
        order(replica, 2, reset=False)
        assert (calls, replica.status().stage) == ([True] * 3, "done")
        order(replica, 1, reset=False)
        assert len(calls) == 3
        store.hold()
        replica.take(Order(2, reset=False))
        assert store.reached.wait(30)
        replica.take(Order(3, reset="new_session"))
        replica.take(Order(3, reset=False))
        store.go.set()
        settled(replica)
        assert calls[3:] == ["new_session"]


def test_a_torn_engine_serves_nothing_until_it_is_repaired(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = MemoryEngine()
    with Replica(run.store, engine) as replica:
        settled(replica)
        apply = engine.apply

        def tear(records: Any, held: Any) -> None:
            list(records)
            engine.bits("w")[:] = 7
            raise TornUpdateError("half of it is in")

        run.publish()
        monkeypatch.setattr(engine, "apply", tear)
        order(replica, 4)
        assert (replica.status().readiness, replica.status().identity) == (False, None)
        assert "half of it is in" in str(replica.status().reason)
        monkeypatch.setattr(engine, "apply", apply)
        order(replica, 4)
        assert replica.status().readiness
        assert run.is_in(engine, 4)


def test_a_pinned_request_holds_the_commit_and_nothing_else(run: Run) -> None:
    engine = MemoryEngine()
    with Replica(run.store, engine, drain_timeout_s=0.05) as replica:
        settled(replica)
        run.publish()
        pinned = WeightVersion(exact=3)
        assert replica.admission.try_enter(pinned) is True
        order(replica, 4)
        assert replica.status().stage == "error"
        assert "pinned to other versions" in str(replica.status().reason)
        assert run.is_in(engine, 3)
        assert replica.admission.served == 3
        replica.admission.leave(pinned)
        order(replica, 4)
        assert run.is_in(engine, 4)


@pytest.mark.parametrize("stop", ["fetching", "draining", "idle"])
def test_closing_ends_the_thread_and_leaves_a_whole_version(run: Run, stop: str) -> None:
    store, engine = SlowStore(run.store), MemoryEngine()
    before = set(threading.enumerate())
    replica = Replica(store, engine)
    replica.start()
    settled(replica)
    run.publish()
    if stop == "fetching":
        store.hold()
        replica.take(Order(4))
        assert store.reached.wait(30)
        threading.Timer(0.05, store.go.set).start()
    elif stop == "draining":
        assert replica.admission.try_enter(WeightVersion(exact=3)) is True
        replica.take(Order(4))
    replica.close()
    replica.close()
    left = {t for t in threading.enumerate() if not isinstance(t, threading.Timer)} - before
    assert left == set()
    assert run.is_in(engine, 3)


def test_a_replica_is_started_once(run: Run) -> None:
    replica = Replica(run.store, MemoryEngine())
    replica.close()
    with Replica(run.store, MemoryEngine()) as started, pytest.raises(ConfigError, match="before"):
        started.start()
    with pytest.raises(ConfigError, match="follow_s"):
        Replica(run.store, MemoryEngine(), follow_s=0)
    with pytest.raises(ConfigError, match="engine"):
        Replica(run.store, object())  # type: ignore[arg-type]


def test_an_engine_that_holds_a_version_serves_it_while_the_store_is_away(run: Run) -> None:
    store, engine = SlowStore(run.store), MemoryEngine()
    with Replica(store, engine) as replica:
        settled(replica)
    store.failure = StoreError("away")
    with Replica(store, engine) as replica:
        eventually(lambda: replica.status().stage == "error", "it has tried once")
        assert (replica.status().readiness, replica.status().identity) == (False, "weight_v000003")
        assert replica.admission.served == 3
        store.failure = None
        eventually(lambda: replica.status().readiness, "it has caught up")
