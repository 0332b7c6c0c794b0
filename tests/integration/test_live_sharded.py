"""Several trainer ranks on one live path: each sends what it owns, and engines get whole versions or none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from live_paths import PATHS, live_path
from random_layouts import empty_shards, random_catalog, random_layout, random_values
from syncline import MemoryEngine, MemoryStore, Ranks, Receiver, ShardedPublisher
from syncline.abc import Inlet, Outlet
from syncline.channels import MemoryInlet, MemoryOutlet, SharedMemoryInlet
from syncline.errors import (
    ConfigError,
    FormatError,
    PeerLostError,
    PlanDisagreementError,
    StoreError,
)
from syncline.layouts import scatter
from syncline.layouts.sharded import Shard, Sharding, dtensor_layout
from syncline.sync.kept import Kept
from syncline.sync.sharded import gathering
from syncline.types import TensorMeta

WAIT_S = 30.0
WORLD = 2
BUCKET_BYTES = 1024

CUT = {
    "rows": ("BF16", (64, 40), 0),
    "columns": ("BF16", (30, 64), 1),
    "wide": ("F32", (8, 600), 1),
    "norm": ("F32", (40,), None),
    "bias": ("F32", (3,), None),
    "empty": ("F32", (0, 4), None),
}
METAS = [TensorMeta(name, dtype, shape) for name, (dtype, shape, _) in CUT.items()]
SHARDINGS = {
    name: Sharding((WORLD,), (None if axis is None else Shard(axis),))
    for name, (_, _, axis) in CUT.items()
}
LAYOUT = dtensor_layout(METAS, SHARDINGS)


class Trainer:
    """Two ranks in threads, and the weights that they train."""

    def __init__(self, outlets: list[Outlet], **options: Any) -> None:
        rng = np.random.default_rng(1)
        self.whole = {
            meta.name: rng.integers(0, 1 << 15, meta.shape).astype(
                np.uint16 if meta.dtype == "BF16" else np.uint32
            )
            for meta in METAS
        }
        self.store = MemoryStore()
        timeout_s = options.pop("timeout_s", WAIT_S)
        options = {"live_timeout_s": timeout_s, "bucket_bytes": BUCKET_BYTES, **options}
        ranks = Ranks.threads(WORLD, timeout_s=timeout_s)
        self.publishers = on_all(
            lambda rank: ShardedPublisher(
                self.store, LAYOUT, ranks[rank], live=outlets[rank], **options
            )
        )

    def shard(self, rank: int) -> dict[str, Any]:
        import ml_dtypes

        found = {}
        for meta in METAS:
            bits, axis = self.whole[meta.name], CUT[meta.name][2]
            if axis is not None:
                bits = np.split(bits, WORLD, axis)[rank]
            dtype = ml_dtypes.bfloat16 if meta.dtype == "BF16" else np.float32
            found[meta.name] = np.ascontiguousarray(bits).view(dtype)
        return found

    def train(self) -> None:
        for bits in self.whole.values():
            bits[..., ::7] += 1

    def publish(self, **how: Any) -> list[Any]:
        return on_all(lambda rank: self.publishers[rank].publish(self.shard(rank), **how))

    def assert_held(self, engine: MemoryEngine) -> None:
        for name, bits in self.whole.items():
            np.testing.assert_array_equal(engine.view(name), bits.ravel())


def on_all(act: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(WORLD) as pool:
        return list(pool.map(act, range(WORLD)))


class Fleet:
    """Engines that take a version each time they are told to."""

    def __init__(self, inlets: dict[str, Inlet]) -> None:
        self.engines = {name: MemoryEngine() for name in inlets}
        self.receivers = {
            name: Receiver(inlet, self.engines[name], verify="full")
            for name, inlet in inlets.items()
        }
        for inlet in inlets.values():
            inlet.channel()

    def taking(self, pool: ThreadPoolExecutor) -> dict[str, Any]:
        return {name: pool.submit(receiver.sync) for name, receiver in self.receivers.items()}


@pytest.fixture(params=PATHS)
def paths(request: pytest.FixtureRequest) -> Iterator[tuple[list[Outlet], Callable[[str], Inlet]]]:
    with ExitStack() as stack:
        made = [stack.enter_context(live_path(request.param)) for _ in range(WORLD)]
        yield [outlet for outlet, _ in made], made[0][1]


def settled(outlet: Outlet, count: int) -> None:
    done = threading.Event()
    for _ in range(1000):
        if len(outlet.members()) == count:
            return
        done.wait(0.02)
    raise AssertionError(f"expected {count} engines, found {list(outlet.members())}")


def test_every_rank_sends_its_own_and_engines_get_whole_versions(paths):
    outlets, make = paths
    trainer = Trainer(outlets)
    fleet = Fleet({name: make(name) for name in ("a", "b")})
    settled(outlets[0], 2)
    with ThreadPoolExecutor() as pool:
        for step in range(4):
            taking = fleet.taking(pool)
            reports = trainer.publish(full=step == 2)
            for report in reports:
                report.delivery.require()
                assert sorted(report.delivery.committed) == ["a", "b"]
            for name, found in taking.items():
                assert found.result(WAIT_S).version == step + 1
                trainer.assert_held(fleet.engines[name])
            is_delta = step in (1, 3) and "delta" in outlets[0].kinds
            assert reports[0].delivery.moved.kind == ("delta" if is_delta else "full")
            assert all(report.delivery.moved.wire_bytes for report in reports)
            trainer.train()


@pytest.mark.parametrize("seed", range(12))
def test_random_layouts_arrive_whole_and_no_rank_waits_in_a_circle(seed):
    import ml_dtypes

    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 5))
    catalog = random_catalog(rng)
    layout = random_layout(catalog, count, rng)
    tensors, shards = random_values(catalog, rng), empty_shards(layout)
    scatter(layout, tensors.values(), shards)
    names = {"BF16": ml_dtypes.bfloat16, "F32": np.float32, "I32": np.int32}
    names |= {"U8": np.uint8, "I64": np.int64}
    outlets, store = [MemoryOutlet() for _ in range(count)], MemoryStore()
    ranks = Ranks.threads(count, timeout_s=WAIT_S)

    def weights(rank: int) -> dict[str, Any]:
        its = next(p.tensors for p in layout.placements if p.rank == rank)
        return {t.name: shards[rank][t.name].view(names[t.dtype]).reshape(t.shape) for t in its}

    def trainer(rank: int) -> Any:
        publisher = ShardedPublisher(
            store,
            layout,
            ranks[rank],
            live=outlets[rank],
            live_timeout_s=WAIT_S,
            bucket_bytes=256,
        )
        return [publisher.publish(weights(rank), full=full) for full in (False, True)]

    fleet = Fleet({"a": MemoryInlet(outlets[0], name="a", timeout_s=WAIT_S)})
    with ThreadPoolExecutor() as pool:
        publishing = [pool.submit(trainer, rank) for rank in range(count)]
        for version in (1, 2):
            assert fleet.receivers["a"].sync(repair=True).version == version
        for found in publishing:
            for report in found.result(WAIT_S):
                report.delivery.require()
    for name, (_, bits) in tensors.items():
        np.testing.assert_array_equal(fleet.engines["a"].view(name), bits)


def test_an_engine_that_joins_late_gets_all_weights_beside_the_deltas_of_others(paths):
    outlets, make = paths
    trainer = Trainer(outlets)
    with ThreadPoolExecutor() as pool:
        first = Fleet({"first": make("first")})
        settled(outlets[0], 1)
        taking = first.taking(pool)
        trainer.publish()[0].delivery.require()
        taking["first"].result(WAIT_S)
        late = Fleet({"late": make("late")})
        settled(outlets[0], 2)
        trainer.train()
        both = {**first.taking(pool), **late.taking(pool)}
        for report in trainer.publish():
            report.delivery.require()
        for found in both.values():
            assert found.result(WAIT_S).version == 2
        trainer.assert_held(first.engines["first"])
        trainer.assert_held(late.engines["late"])


def test_an_engine_that_left_is_named_and_the_rest_is_served(paths):
    outlets, make = paths
    trainer = Trainer(outlets, timeout_s=8.0)
    leaving = make("leaving")
    fleet = Fleet({"stays": make("stays")})
    leaving.channel()
    settled(outlets[0], 2)

    class Dying(MemoryEngine):
        def create(self, *_: Any) -> None:
            leaving.close()
            raise KeyboardInterrupt

    with ThreadPoolExecutor() as pool:
        dying = pool.submit(Receiver(leaving, Dying()).sync)
        taking = fleet.taking(pool)
        reports = trainer.publish()
        with pytest.raises(KeyboardInterrupt):
            dying.result(WAIT_S)
        assert taking["stays"].result(WAIT_S).version == 1
    trainer.assert_held(fleet.engines["stays"])
    for report in reports:
        assert report.delivery.committed == ("stays",)
        assert set(report.delivery.missed) == {"leaving"}


@pytest.mark.parametrize("is_silent", [False, True])
def test_an_engine_that_cannot_join_one_rank_is_left_out_and_the_rest_is_served(
    is_silent, tmp_path
):
    """It stopped the whole fleet, and then waited for a verdict as long as it waits for anything."""
    outlets: list[Outlet] = [MemoryOutlet(), MemoryOutlet()]
    trainer = Trainer(outlets, timeout_s=4.0)
    cut = MemoryInlet(outlets[0], name="cut", timeout_s=WAIT_S)
    fleet = Fleet({"cut": cut, "stays": MemoryInlet(outlets[0], name="stays", timeout_s=WAIT_S)})

    def lane(address: str) -> Inlet:
        if is_silent:
            return SharedMemoryInlet(str(tmp_path / "nobody"), timeout_s=WAIT_S)
        raise PeerLostError("no way to it")

    cut.lane = lane
    with ThreadPoolExecutor() as pool:
        taking = fleet.taking(pool)
        reports = trainer.publish()
        with pytest.raises(PeerLostError):
            taking["cut"].result(WAIT_S / 2)
        assert taking["stays"].result(WAIT_S).version == 1
        for report in reports:
            assert report.delivery.committed == ("stays",)
            why = "no trainer answered" if is_silent else "no way to it"
            assert report.delivery.missed["cut"].startswith(f"trainer rank 1: {why}")
        del cut.lane
        cut.channel()
        settled(outlets[0], 2)
        trainer.train()
        taking = fleet.taking(pool)
        trainer.publish()[0].delivery.require()
        for name, found in taking.items():
            assert found.result(WAIT_S).version == 2
            trainer.assert_held(fleet.engines[name])


def test_a_rank_that_fails_while_it_sends_is_named_and_nobody_commits(paths, monkeypatch):
    outlets, make = paths
    trainer = Trainer(outlets, timeout_s=5.0)
    fleet = Fleet({name: make(name) for name in ("a", "b")})
    settled(outlets[0], 2)
    with ThreadPoolExecutor() as pool:
        taking = fleet.taking(pool)
        trainer.publish()[0].delivery.require()
        before = {name: np.array(bits) for name, bits in trainer.whole.items()}
        for found in taking.values():
            found.result(WAIT_S)
        trainer.train()
        whole = gathering.Gathering.pieces

        def failing(self: Any, *args: Any) -> list[bytes]:
            if threading.current_thread() in victims:
                raise FormatError("rank 1's memory is gone")
            return whole(self, *args)

        victims: set[threading.Thread] = set()
        monkeypatch.setattr(gathering.Gathering, "pieces", failing)
        for publisher in trainer.publishers:
            publisher._live._courier._kinds = ["full"]
        monkeypatch.setattr(
            type(trainer.publishers[1]._live),
            "deliver",
            _noting(type(trainer.publishers[1]._live).deliver, victims),
        )
        taking = fleet.taking(pool)
        reports = trainer.publish()
        for name, engine in fleet.engines.items():
            for report in reports:
                assert "rank 1" in report.delivery.missed[name]
            assert engine.held().version == 1
            for tensor, bits in before.items():
                np.testing.assert_array_equal(engine.view(tensor), bits.ravel())
        monkeypatch.undo()
        trainer.train()
        for report in trainer.publish():
            report.delivery.require()
        for name, found in taking.items():
            assert found.result(WAIT_S).version == 3
            trainer.assert_held(fleet.engines[name])


@pytest.mark.parametrize("victim", range(WORLD))
def test_a_rank_that_cannot_read_what_it_kept_says_so_and_all_go_on(victim, monkeypatch):
    """It raised before anybody knew; the others waited for it, and engines for a round."""
    outlets: list[Outlet] = [MemoryOutlet(), MemoryOutlet()]
    trainer = Trainer(outlets, timeout_s=5.0, live_kind="auto")
    fleet = Fleet({"a": MemoryInlet(outlets[0], name="a", timeout_s=WAIT_S)})
    path = trainer.publishers[victim]._part_writer().path
    whole = Kept.part

    def failing(self: Kept, its: str) -> Any:
        is_encoding = any(each._kept is self for each in trainer.publishers)
        if its == path and not is_encoding:
            raise StoreError("the disk is gone")
        return whole(self, its)

    with ThreadPoolExecutor() as pool:
        for version in range(1, 4):
            if version != 3:  # it still waits
                taking = fleet.taking(pool)
            if version == 2:
                monkeypatch.setattr(Kept, "part", failing)
            reports = trainer.publish()
            monkeypatch.undo()
            if version == 2:
                for report in reports:
                    assert report.version == 2
                    assert "the disk is gone" in report.delivery.missed["a"]
            else:
                for report in reports:
                    report.delivery.require()
                assert taking["a"].result(WAIT_S).version == version
                trainer.assert_held(fleet.engines["a"])
            trainer.train()


def _noting(deliver: Any, victims: set[threading.Thread]) -> Any:
    def noting(self: Any, leader: Any, *args: Any) -> Any:
        if leader is None:
            victims.add(threading.current_thread())
        return deliver(self, leader, *args)

    return noting


def test_ranks_without_an_outlet_of_their_own_are_refused():
    def made(lives: list[Outlet | None], **options: Any) -> list[Any]:
        ranks = Ranks.threads(WORLD, timeout_s=WAIT_S)
        options = {"live_timeout_s": WAIT_S, **options}

        def make(rank: int) -> Any:
            try:
                return ShardedPublisher(
                    MemoryStore(), LAYOUT, ranks[rank], live=lives[rank], **options
                )
            except PlanDisagreementError as error:
                return error

        return on_all(make)

    one, other = MemoryOutlet(), MemoryOutlet()
    for error in made([one, None]):
        assert isinstance(error, PlanDisagreementError)
        assert "ranks [1] have none" in str(error)
    for error in made([one, one]):
        assert "of its own for every rank" in str(error)
    with pytest.raises(ConfigError, match="live_timeout_s"):
        made([one, other], live_timeout_s=2 * WAIT_S)
    with pytest.raises(ConfigError, match=r"ask syncline\.choose"):
        made([None, None], transport="auto")


def test_an_engine_that_cannot_find_the_other_ranks_says_so():
    outlets = [MemoryOutlet(), MemoryOutlet()]
    trainer = Trainer(outlets, timeout_s=5.0)
    inlet = MemoryInlet(outlets[0], name="a", timeout_s=WAIT_S)
    inlet.lane = lambda address: Inlet.lane(inlet, address)
    fleet = Fleet({"a": inlet})
    with ThreadPoolExecutor() as pool:
        taking = fleet.taking(pool)
        reports = trainer.publish()
        with pytest.raises((ConfigError, PeerLostError), match="several ranks"):
            taking["a"].result(WAIT_S)
    assert "several ranks" in reports[0].delivery.missed["a"]
