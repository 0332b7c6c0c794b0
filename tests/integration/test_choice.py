"""What `auto` chooses is what then runs: a trainer here, engines in processes of their own, the same bits."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import syncline
from syncline import MemoryEngine, MemoryStore, Publisher, Receiver, Topology, config
from syncline.choice import Density, Link, Links, decide
from syncline.errors import ConfigError
from syncline.format import live, names

WAIT_S = 60.0
STEPS = 3
TENSORS = {"a": 40_000, "b": 7, "c": 0}

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")


def trained(step: int) -> dict[str, np.ndarray]:
    """Return the weights after so many steps, each of which changes every hundredth element."""
    rng = np.random.default_rng(1)
    made = {name: rng.standard_normal(count).astype(np.float32) for name, count in TENSORS.items()}
    for array in made.values():
        for done in range(step):
            array[done::100] += np.float32(1e-3)
    return made


def digest(name: str, array: np.ndarray) -> str:
    return hashlib.sha256(name.encode() + array.tobytes()).hexdigest()


def engine(store: str, count: int) -> list[tuple[str, str, int, list[str]]]:
    """Follow a run by what its publisher chose; say how every version came, and its bits."""
    held = MemoryEngine()
    receiver = Receiver(syncline.open_store(store), held, transport="auto", verify="full")
    found = []
    try:
        while len(found) < count:
            receiver.wait(WAIT_S)
            applied = receiver.sync()
            if not applied.applied:
                continue  # pulled before there was a new one
            transport = applied.moved.transport
            bits = [digest(name, held.view(name)) for name in sorted(TENSORS)]
            found.append((transport, applied.moved.kind, applied.version, bits))
            if transport == "store":
                break
    finally:
        receiver.close()
    return found


@contextmanager
def engines(store: Path, count: int, versions: int) -> Iterator[list[Future]]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, mp_context=context) as pool:
        yield [pool.submit(engine, str(store), versions) for _ in range(count)]


@pytest.mark.parametrize(
    ("topology", "transport", "kinds"),
    [
        (Topology(colocated=True), "shared-memory", ["full"] * STEPS),
        pytest.param(
            Topology(engines=2, fabric=True),
            "collective",
            ["full", "delta", "delta"],
            marks=needs_torch,
        ),
    ],
    ids=["colocated", "fabric"],
)
def test_auto_takes_the_live_path_of_the_topology(tmp_path, topology, transport, kinds):
    store = tmp_path / "run"
    publisher = Publisher(syncline.open_store(store), transport="auto", topology=topology)
    assert publisher.decision.transport == transport
    with engines(store, topology.engines, STEPS) as running:
        publisher.wait(WAIT_S)
        for step in range(STEPS):
            report = publisher.publish(trained(step))
            report.delivery.require()
            assert report.delivery.transport == transport
            assert len(report.delivery.committed) == topology.engines
        found = [future.result(WAIT_S) for future in running]
    for said in found:
        assert [(how, kind, version) for how, kind, version, _ in said] == [
            (transport, kind, 1 + step) for step, kind in enumerate(kinds)
        ]
        for step, (_, _, _, bits) in enumerate(said):
            assert bits == [digest(name, array) for name, array in sorted(trained(step).items())]
    publisher.close()
    assert not (config.runtime_dir() / f"syncline-{os.getuid()}" / run_id(store)).exists()
    assert live.load(publisher_store(store).get(names.LIVE)).transport is None


def run_id(path: Path) -> str:
    return live.load(publisher_store(path).get(names.LIVE)).run_id


def publisher_store(path: Path):
    return syncline.open_store(path)


@pytest.mark.parametrize("share", [0.01, 1.0])
def test_auto_takes_the_store_otherwise(tmp_path, share):
    store = syncline.open_store(tmp_path / "run")
    density = Density(1 << 20, share)
    topology = Topology(engines=2, hosts=2)
    # Given, not probed: over a link that a busy machine makes slow, even a delta of everything is quicker.
    links = Links(store=Link.of(5e9, latency_s=0.0001))
    decision = syncline.choose(topology, store, density=density, links=links)
    publisher = Publisher(store, transport=decision)
    publisher.wait(0.0)  # nobody joins a store
    for step in range(STEPS):
        report = publisher.publish(trained(step))
        assert report.delivery is None
    assert report.kind == ("full" if share == 1.0 else "delta") == decision.chosen.kind
    with engines(tmp_path / "run", 2, 1) as running:
        found = [future.result(WAIT_S) for future in running]
    for ((transport, _, version, bits),) in found:
        assert (transport, version) == ("store", STEPS)
        assert bits == [digest(name, array) for name, array in sorted(trained(STEPS - 1).items())]


def test_a_run_that_is_carried_on_is_chosen_for_by_what_changed_in_it(tmp_path):
    store = syncline.open_store(tmp_path / "run")
    first = Publisher(store)
    for step in range(STEPS):
        report = first.publish(trained(step))
    density = syncline.choose(Topology(), store).density
    assert density.share == pytest.approx(report.density)
    assert (density.model_bytes, density.dtype) == (report.full_bytes, "F32")
    assert "last 2 deltas" in density.origin


def test_a_probe_of_the_store_leaves_nothing(tmp_path):
    store = syncline.open_store(tmp_path / "run")
    decision = syncline.choose(Topology(), store)
    assert "measured" in decision.links.store.origin
    assert store.list() == []


def test_an_engine_does_not_join_what_an_earlier_publisher_opened(tmp_path):
    """The first trainer was killed and left LIVE.json; the second one lets engines pull."""
    store = syncline.open_store(tmp_path / "run")
    killed = Publisher(store, transport="auto", topology=Topology(colocated=True))
    left = store.get(names.LIVE)
    killed.close()
    store.compare_and_swap(names.LIVE, store.get(names.LIVE), left)
    Publisher(store).publish(trained(0))
    engine = MemoryEngine()
    applied = Receiver(store, engine, transport="auto").sync()
    assert (applied.version, applied.moved.transport) == (1, "store")


def test_nothing_else_than_what_was_asked_for_is_opened():
    store = MemoryStore()
    with pytest.raises(ConfigError, match="nothing is saved"):
        Publisher(
            store, transport="shared-memory", topology=Topology(colocated=True), live_kind="delta"
        )
    with pytest.raises(ConfigError, match=r"syncline\.hosts\.enter"):
        Publisher(store, transport="auto", topology=Topology(joining=1, holders=1))
    with pytest.raises(ConfigError, match="expected a topology beside it"):
        Publisher(store, transport="auto")
    with pytest.raises(ConfigError, match="beside a store"):
        Receiver(store, MemoryEngine(), transport="store")
    assert not any(info.key == names.LIVE for info in store.list())


def test_a_fabric_between_machines_needs_an_address():
    decision = decide(
        Topology(engines=2, hosts=2, fabric=True), Density(10**9, 0.01), Links(fabric=Link.of(1e10))
    )
    with pytest.raises(ConfigError, match="live_address: expected host:port"):
        Publisher(MemoryStore(), transport=decision)


def test_a_live_path_of_several_ranks_is_not_opened_by_one_of_them():
    topology = Topology(colocated=True, writers=2)
    with pytest.raises(ConfigError, match="ShardedPublisher with live=outlet"):
        Publisher(MemoryStore(), transport="auto", topology=topology)
