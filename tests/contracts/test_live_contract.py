"""What every live path promises, over every one there is; ends in threads of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any

import numpy as np
import pytest

from live_paths import PATHS, WAIT_S, MakeInlet, live_path
from syncline import MemoryEngine, MemoryStore, Publisher, Receiver
from syncline.abc import Channel, Inlet, Outlet
from syncline.errors import (
    CodecError,
    CommitError,
    ConfigError,
    FormatError,
    PeerLostError,
    SynclineError,
    TransportError,
    TransportTimeoutError,
    VerifyError,
)
from syncline.sync.reports import Delivery

SIZES = [1000, 1, 70_000, 4096, 333]


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> Iterator[tuple[Outlet, MakeInlet]]:
    with live_path(request.param) as made:
        yield made


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread brings about."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def bucket(number: int, nbytes: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, nbytes, np.uint8)


def taken(inlet: Inlet, sizes: list[int]) -> list[np.ndarray]:
    """Take part in a round and return copies of what came."""
    return [np.array(each) for each in inlet.buckets(sizes)]


def given(outlet: Outlet, members: list[str], buckets: list[np.ndarray]) -> None:
    sent(outlet, members, buckets, WAIT_S)


def sent(outlet: Outlet, members: list[str], buckets: list[np.ndarray], timeout_s: float) -> None:
    with outlet.round(members, [each.nbytes for each in buckets], timeout_s) as send:
        for each in buckets:
            send([(0, each)])


def joined(outlet: Outlet, make: MakeInlet, *names: str) -> list[Inlet]:
    inlets = [make(name) for name in names]
    for inlet in inlets:
        inlet.channel()
    until(lambda: len(outlet.members()) == len(names))
    return inlets


def test_all_members_get_all_buckets_in_order(path):
    outlet, make = path
    inlets = joined(outlet, make, "a", "b")
    for first in range(3):
        buckets = [bucket(first + i, nbytes) for i, nbytes in enumerate(SIZES)]
        with ThreadPoolExecutor() as pool:
            found = [pool.submit(taken, inlet, SIZES) for inlet in inlets]
            given(outlet, ["a", "b"], buckets)
            for one in found:
                for got, wanted in zip(one.result(WAIT_S), buckets, strict=True):
                    assert np.array_equal(got, wanted)


def test_pieces_lie_at_their_offsets(path):
    outlet, make = path
    (inlet,) = joined(outlet, make, "a")
    first, second = bucket(1, 100), np.arange(40, dtype=np.uint32)
    with ThreadPoolExecutor() as pool:
        found = pool.submit(taken, inlet, [256 + 160])
        with outlet.round(["a"], [256 + 160], WAIT_S) as send:
            send([(0, first), (256, second)])
        (got,) = found.result(WAIT_S)
    assert np.array_equal(got[:100], first)
    assert np.array_equal(got[256:].view(np.uint32), second)


def test_a_bucket_that_is_in_use_is_never_filled_again(path):
    outlet, make = path
    (inlet,) = joined(outlet, make, "a")
    sizes = [5000] * 8

    def hold() -> np.ndarray:
        with closing(inlet.buckets(sizes)) as buckets:
            held = next(buckets)
            before = np.array(held)
            failed.wait(WAIT_S)
            assert np.array_equal(held, before)
            return before

    failed = threading.Event()
    with ThreadPoolExecutor() as pool:
        found = pool.submit(hold)
        try:
            with pytest.raises((TransportTimeoutError, PeerLostError)):
                sent(outlet, ["a"], [bucket(number, 5000) for number in range(len(sizes))], 0.5)
        finally:
            failed.set()
        assert np.array_equal(found.result(WAIT_S), bucket(0, 5000))


def test_nobody_can_write_into_what_came(path):
    outlet, make = path
    (inlet,) = joined(outlet, make, "a")

    def attempt() -> None:
        for got in inlet.buckets([8]):
            with pytest.raises(ValueError, match="read-only"):
                got[0] = 1

    with ThreadPoolExecutor() as pool:
        found = pool.submit(attempt)
        given(outlet, ["a"], [bucket(0, 8)])
        found.result(WAIT_S)


def test_who_leaves_is_no_member_and_the_rest_goes_on(path):
    outlet, make = path
    gone, stays = joined(outlet, make, "a", "b")
    gone.close()
    until(lambda: list(outlet.members()) == ["b"])
    with pytest.raises(PeerLostError, match="'a'"):
        sent(outlet, ["a", "b"], [bucket(0, 10)], 1.0)
    with ThreadPoolExecutor() as pool:
        found = pool.submit(taken_at_last, stays, [10])
        given(outlet, ["b"], [bucket(1, 10)])
        assert np.array_equal(found.result(WAIT_S)[0], bucket(1, 10))


def taken_at_last(inlet: Inlet, sizes: list[int]) -> list[np.ndarray]:
    """Take part in the first round that is not broken off."""
    while True:
        try:
            return taken(inlet, sizes)
        except TransportError:
            continue


def test_a_member_that_dies_in_a_round_ends_it(path):
    outlet, make = path
    dying, other = joined(outlet, make, "a", "b")

    def die() -> None:
        buckets = dying.buckets([4000] * 6)
        next(buckets)
        dying.close()
        buckets.close()

    with ThreadPoolExecutor() as pool:
        dead = pool.submit(die)
        alive = pool.submit(taken_at_last, other, [4000] * 6)
        with pytest.raises(TransportError):
            sent(outlet, ["a", "b"], [bucket(number, 4000) for number in range(6)], WAIT_S)
        dead.result(WAIT_S)
        until(lambda: list(outlet.members()) == ["b"])
        given(outlet, ["b"], [bucket(number, 4000) for number in range(6)])
        assert np.array_equal(alive.result(WAIT_S)[5], bucket(5, 4000))


def test_a_member_that_does_not_come_is_named(path):
    outlet, make = path
    joined(outlet, make, "sleeper")
    with pytest.raises((TransportTimeoutError, PeerLostError), match="sleeper|group of 2"):
        sent(outlet, ["sleeper"], [bucket(0, 10)], 0.3)


def test_a_name_is_taken_once(path):
    outlet, make = path
    joined(outlet, make, "a")
    with pytest.raises(ConfigError, match="'a'"):
        make("a").channel()


def test_words_go_both_ways_beside_the_buckets(path):
    outlet, make = path
    (inlet,) = joined(outlet, make, "a")
    outlet.members()["a"].send(b"offer")
    assert inlet.channel().receive(WAIT_S) == b"offer"
    inlet.channel().send(b"answer")
    assert outlet.members()["a"].receive(WAIT_S) == b"answer"


def test_closing_a_channel_makes_the_engine_leave(path):
    outlet, make = path
    (inlet,) = joined(outlet, make, "a")
    first = inlet.channel()
    outlet.members()["a"].close()
    assert not outlet.members()
    with pytest.raises(PeerLostError):
        first.receive(WAIT_S)
    inlet.channel()
    until(lambda: list(outlet.members()) == ["a"])


def test_a_trainer_that_closes_lets_its_engines_go(path):
    outlet, make = path
    (inlet,) = joined(outlet, make, "a")

    def take() -> None:
        with pytest.raises(PeerLostError):
            taken(inlet, [10] * 3)

    def give() -> None:
        with outlet.round(["a"], [10] * 3, WAIT_S) as send:
            send([(0, bucket(0, 10))])
            outlet.close()
            outlet.close()
            raise _StopError

    with ThreadPoolExecutor() as pool:
        found = pool.submit(take)
        with pytest.raises(_StopError):
            give()
        found.result(WAIT_S)


class _StopError(Exception):
    """What ends a trainer in the middle of a round."""


def test_an_error_in_the_trainer_ends_the_round_for_its_engines(path):
    outlet, make = path
    (inlet,) = joined(outlet, make, "a")

    def give() -> None:
        with outlet.round(["a"], [10] * 3, WAIT_S) as send:
            send([(0, bucket(0, 10))])
            raise _StopError

    with ThreadPoolExecutor() as pool:
        found = pool.submit(taken, inlet, [10] * 3)
        with pytest.raises(_StopError):
            give()
        with pytest.raises(TransportError):
            found.result(WAIT_S)
        found = pool.submit(taken, inlet, [10])
        given(outlet, ["a"], [bucket(1, 10)])
        assert np.array_equal(found.result(WAIT_S)[0], bucket(1, 10))


def test_an_error_in_an_engine_ends_the_round_for_the_trainer(path):
    outlet, make = path
    one, other = joined(outlet, make, "a", "b")

    def fail() -> None:
        with closing(one.buckets([4000] * 9)) as buckets:
            next(buckets)

    with ThreadPoolExecutor() as pool:
        failed, broken = pool.submit(fail), pool.submit(taken, other, [4000] * 9)
        with pytest.raises(TransportError):
            given(outlet, ["a", "b"], [bucket(number, 4000) for number in range(9)])
        failed.result(WAIT_S)
        with pytest.raises(TransportError):
            broken.result(WAIT_S)
        found = [pool.submit(taken, inlet, [10]) for inlet in (one, other)]
        given(outlet, ["a", "b"], [bucket(1, 10)])
        for each in found:
            assert np.array_equal(each.result(WAIT_S)[0], bucket(1, 10))


def test_after_a_version_that_an_engine_refused_the_next_is_taken(path):
    """On a collective it was lost, too: the engine had left a group that the trainer kept."""
    outlet, make = path

    class Refusing(MemoryEngine):
        is_refusing = False

        def apply(self, records: Any, at: Any) -> None:
            for _ in records if self.is_refusing else ():
                raise CodecError("refused at the first record")
            super().apply(records, at)

    engines = {name: Refusing() for name in ("a", "b")}
    inlets = joined(outlet, make, *engines)
    receivers = [Receiver(*each) for each in zip(inlets, engines.values(), strict=True)]
    publisher = Publisher(MemoryStore(), live=outlet, live_kind="full", live_timeout_s=WAIT_S)
    model = {"w": np.arange(1000, dtype=np.float32)}
    with ThreadPoolExecutor() as pool:
        for version in range(1, 5):
            engines["a"].is_refusing = version == 2
            taking = [pool.submit(receiver.sync) for receiver in receivers]
            delivery = publisher.publish(model).delivery
            if version == 2:
                assert "refused at the first record" in delivery.missed["a"]
                with pytest.raises(CodecError):
                    taking[0].result(WAIT_S)
                with pytest.raises(CommitError):
                    taking[1].result(WAIT_S)
            else:
                assert delivery.missed == {}
                assert [found.result(WAIT_S).version for found in taking] == [version] * 2
            model["w"][version::3] += 1


def test_a_late_engine_is_told_by_its_own_deadline(path):
    outlet, make = path
    (inlet,) = joined(outlet, make, "a")
    inlet.timeout_s = 0.2
    with pytest.raises(TransportTimeoutError):
        taken(inlet, [10])


def test_an_inlet_that_another_thread_closes_ends_its_round_with_a_transport_error(path):
    """It was an IndexError on a collective, and a ValueError in shared memory."""
    outlet, make = path
    (inlet,) = joined(outlet, make, "a")
    sizes = [4000] * 4

    def close_then_ask() -> None:
        with closing(inlet.buckets(sizes)) as buckets:
            next(buckets)
            inlet.close()
            next(buckets)

    with ThreadPoolExecutor() as pool:
        taking = pool.submit(close_then_ask)
        with suppress(TransportError), outlet.round(["a"], sizes, 3.0) as send:
            for _ in sizes:
                send([(0, np.zeros(4000, np.uint8))])
        with pytest.raises(TransportError):
            taking.result(WAIT_S)
    with pytest.raises(TransportError):
        inlet.buckets(sizes)


def test_an_inlet_closed_while_it_waits_for_a_bucket(path):
    outlet, make = path
    (inlet,) = joined(outlet, make, "a")
    inlet.timeout_s = 3.0  # a collective notices no sooner
    with ThreadPoolExecutor() as pool:
        taking = pool.submit(taken, inlet, [4000] * 4)
        with suppress(TransportError), outlet.round(["a"], [4000] * 4, 3.0) as send:
            send([(0, np.zeros(4000, np.uint8))])
            inlet.close()
            for _ in range(3):
                send([(0, np.zeros(4000, np.uint8))])
        with pytest.raises(TransportError):
            taking.result(WAIT_S)


def test_an_engine_that_leaves_while_a_round_begins_takes_nobody_with_it(path, monkeypatch):
    """The others waited for the group to form as long as the trainer waited for them, and were lost, too."""
    outlet, make = path
    stays, leaves = joined(outlet, make, "stays", "leaves")
    engine = MemoryEngine()
    begin = outlet._open

    def leaving(*arguments: Any) -> None:
        if hasattr(outlet, "_lobby"):
            here = outlet.members()
            monkeypatch.setattr(outlet._lobby, "members", lambda: here)
        leaves.close()
        try:
            begin(*arguments)
        finally:
            monkeypatch.undo()

    monkeypatch.setattr(outlet, "_open", leaving)
    publisher = Publisher(MemoryStore(), live=outlet, live_timeout_s=4.0)
    with ThreadPoolExecutor() as pool:
        taking = pool.submit(Receiver(stays, engine).sync)
        gone = pool.submit(Receiver(leaves, MemoryEngine()).sync)
        report = publisher.publish({"w": np.ones(3, np.float32)})
        assert taking.result(WAIT_S).version == 1
        with pytest.raises(SynclineError):
            gone.result(WAIT_S)
    assert report.delivery.committed == ("stays",)
    assert set(report.delivery.missed) == {"leaves"}


class FlippingInlet(Inlet):
    """Passes everything on, and once changes one bit of the last bucket of a round."""

    def __init__(self, inlet: Inlet) -> None:
        self.inlet = inlet
        self.name = inlet.name
        self.timeout_s = inlet.timeout_s
        self.flips = 0

    def channel(self) -> Channel:
        return self.inlet.channel()

    def buckets(self, sizes: Sequence[int]) -> Generator[np.ndarray, None, None]:
        for number, bucket in enumerate(self.inlet.buckets(sizes), 1):
            if self.flips and number == len(sizes):
                self.flips -= 1
                bucket = np.array(bucket)  # noqa: PLW2901 - what comes may not be written to
                bucket[len(bucket) // 2] ^= 1
            yield bucket

    def close(self) -> None:
        self.inlet.close()


@pytest.mark.parametrize("kind", ["full", "delta"])
def test_a_bit_that_changed_on_the_way_is_noticed_and_nobody_commits(path, kind):
    outlet, make = path
    if kind not in outlet.kinds:
        pytest.skip(f"{outlet.name} carries no {kind}")
    flipping, sound = FlippingInlet(make("flipping")), make("sound")
    engines = [MemoryEngine(), MemoryEngine()]
    receivers = [
        Receiver(inlet, engine) for inlet, engine in zip([flipping, sound], engines, strict=True)
    ]
    joined_here = [flipping.channel(), sound.channel()]
    until(lambda: len(outlet.members()) == len(joined_here))
    weights = np.random.default_rng(0).standard_normal(50_000, np.float32)
    publisher = Publisher(MemoryStore(), live=outlet, encoding="indices", bucket_bytes=4096)
    with ThreadPoolExecutor() as pool:

        def step(*, full: bool) -> tuple[Delivery, list[BaseException | None]]:
            syncing = [pool.submit(receiver.sync) for receiver in receivers]
            delivery = publisher.publish({"w": weights}, full=full).delivery
            return delivery, [one.exception(WAIT_S) for one in syncing]

        assert step(full=True)[0].committed == ("flipping", "sound")
        before = [engine.view("w").copy() for engine in engines]
        flipping.flips = 1
        weights[::50] += 1
        delivery, errors = step(full=kind == "full")
        assert flipping.flips == 0
        assert delivery.committed == ()
        assert delivery.missed.keys() == {"flipping", "sound"}
        assert isinstance(errors[0], VerifyError | CodecError | FormatError)
        assert isinstance(errors[1], CommitError)
        for engine, bits in zip(engines, before, strict=True):
            assert np.array_equal(engine.view("w"), bits)
        weights[::50] += 1
        assert step(full=False)[0].committed == ("flipping", "sound")
        for engine in engines:
            assert np.array_equal(engine.view("w"), weights.view(np.uint32))
