"""Ctrl-C at every named step: whoever is interrupted holds whole weights, and nobody waits for it."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from hosting import Run, together
from live_paths import PATHS, WAIT_S, MakeInlet, live_path
from syncline import CheckpointDir, MemoryEngine, MemoryStore, Publisher, Receiver
from syncline.abc import Outlet
from syncline.channels import MemoryChannel
from syncline.channels.sockets import SocketChannel
from syncline.engines import checkpoint_dir
from syncline.errors import SynclineError, TransportTimeoutError
from syncline.hosts import Fleet, ParameterServer, Worker, join, joining, worker
from syncline.hosts import taking as hosts_taking
from syncline.peers import TcpPeer
from syncline.sync import ownership, pull, writer
from syncline.sync.live import deliver, take
from syncline.types import Step


def weights(version: int) -> dict[str, np.ndarray]:
    made = {name: np.arange(3000, dtype=np.uint16) for name in ("a", "b")}
    for array in made.values():
        array[::7] += version
    return made


def holds(engine: MemoryEngine, version: int) -> bool:
    return all(engine.view(n).tobytes() == w.tobytes() for n, w in weights(version).items())


class Interrupt:
    """Raises as Ctrl-C does, once, when a step is reached after `arm`."""

    def __init__(self, step: str) -> None:
        self.step = step
        self.is_armed = False
        self.happened = False

    def __call__(self, at: Step) -> None:
        if self.is_armed and at.name == self.step:
            self.is_armed, self.happened = False, True
            raise KeyboardInterrupt


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> Iterator[tuple[Outlet, MakeInlet]]:
    with live_path(request.param) as made:
        yield made


def syncing(pool: ThreadPoolExecutor, receivers: list[Receiver]) -> list[Future]:
    return [pool.submit(receiver.sync) for receiver in receivers]


@pytest.mark.parametrize("step", deliver.STEPS)
def test_a_trainer_that_is_interrupted_tells_its_engines(path, step):
    """They waited for a verdict that did not come, and meanwhile dropped the offer of the next version."""
    outlet, make = path
    interrupt, engines = Interrupt(step), [MemoryEngine(), MemoryEngine()]
    inlets = [make(name) for name in ("a", "b")]
    receivers = [Receiver(i, e) for i, e in zip(inlets, engines, strict=True)]
    publisher = Publisher(
        MemoryStore(), live=outlet, observe=interrupt, bucket_bytes=1024, live_timeout_s=WAIT_S
    )
    for inlet in inlets:
        inlet.channel()
    with ThreadPoolExecutor() as pool:
        for version in (1, 2, 3):
            waiting = syncing(pool, receivers)
            while len(outlet.members()) < len(inlets):
                pass
            interrupt.is_armed = version == 2
            try:
                report = publisher.publish(weights(version))
            except KeyboardInterrupt:
                assert version == 2
            errors = [future.exception(WAIT_S) for future in waiting]
            for engine, error in zip(engines, errors, strict=True):
                assert not isinstance(error, TransportTimeoutError)
                assert holds(engine, version) == (error is None)
                assert error is None or holds(engine, version - 1)
            assert len({type(error) for error in errors}) == 1  # all or none
    assert interrupt.happened
    assert report.delivery.missed == {}
    assert holds(engines[0], 3) and holds(engines[1], 3)


@pytest.mark.parametrize("step", take.STEPS)
def test_an_engine_that_is_interrupted_keeps_nobody_waiting(path, step):
    outlet, make = path
    interrupt, engines = Interrupt(step), [MemoryEngine(), MemoryEngine()]
    inlets = [make(name) for name in ("a", "b")]
    receivers = [
        Receiver(inlets[0], engines[0]),
        Receiver(inlets[1], engines[1], observe=interrupt),
    ]
    publisher = Publisher(MemoryStore(), live=outlet, bucket_bytes=1024, live_timeout_s=WAIT_S)
    with ThreadPoolExecutor() as pool:
        for version in (1, 2, 3):
            interrupt.is_armed = version == 2
            waiting = syncing(pool, receivers)
            while len(outlet.members()) < len(inlets):
                pass
            report = publisher.publish(weights(version))
            assert waiting[0].exception(WAIT_S) is None
            assert holds(engines[0], version)
            error = waiting[1].exception(WAIT_S)
            if version == 2:
                assert isinstance(error, KeyboardInterrupt)
                assert holds(engines[1], engines[1].held().version)
            else:
                assert error is None and report.delivery.missed == {}
    assert interrupt.happened
    assert holds(engines[1], 3)


@pytest.mark.parametrize("step", [*ownership.STEPS, *writer.STEPS])
def test_a_publisher_that_is_interrupted_goes_on_with_the_next_version(step):
    interrupt, store = Interrupt(step), MemoryStore()
    interrupt.is_armed = step in ownership.STEPS
    try:
        publisher = Publisher(store, observe=interrupt, part_bytes=600)
        publisher.publish(weights(1))
        interrupt.is_armed = True
        publisher.publish(weights(2), full=True)
    except KeyboardInterrupt:
        interrupt.is_armed = False
    engine = MemoryEngine()
    for again in (publisher,) if interrupt.step in writer.STEPS else ():
        again.publish(weights(3))
        Receiver(store, engine, verify="full").sync()
        assert holds(engine, 3)
    Publisher(store).publish(weights(4))
    Receiver(store, engine, verify="full").sync()
    assert holds(engine, 4)


@pytest.mark.parametrize("mode", ["in_place", "swap"])
@pytest.mark.parametrize("step", [*pull.STEPS, *checkpoint_dir.STEPS])
def test_a_pull_that_is_interrupted_is_done_by_the_next(step, mode, tmp_path: Path):
    interrupt, store = Interrupt(step), MemoryStore()
    publisher, directory = Publisher(store), tmp_path / "engine"
    for version in (1, 2):
        publisher.publish(weights(version))
        interrupt.is_armed = True
        engine = CheckpointDir(directory, mode=mode, observe=interrupt)
        try:
            Receiver(store, engine, observe=interrupt).sync()
        except KeyboardInterrupt:
            interrupt.is_armed = False
        held = engine.held()
        if held is not None:
            assert holds(engine, held.version)
        Receiver(store, engine, verify="full").sync()
        assert holds(engine, version)
    assert {each.name for each in tmp_path.iterdir()} <= {"engine", ".engine.syncline"}


@pytest.mark.parametrize("step", [*worker.STEPS, *hosts_taking.STEPS])
def test_a_worker_that_is_interrupted_ends_the_update_for_all(step):
    run, interrupt = Run(), Interrupt(step)
    run.publish(1)
    run.publish(2)
    interrupt.is_armed = True
    host, engines = run.host("h0"), [run.engine(1), run.engine(1)]
    peers = [TcpPeer() for _ in range(3)]
    pairs = [MemoryChannel.pair() for _ in engines]
    fleet = Fleet(engines=2)
    workers = [
        Worker(f"w{n}", engine, [peers[n]], fleet=fleet, number=n, observe=interrupt if n else lambda at: None)
        for n, engine in enumerate(engines)
    ]  # fmt: skip

    def taken(number: int) -> None:
        try:
            workers[number].take(pairs[number][1], WAIT_S)
        except KeyboardInterrupt:
            pairs[number][1].close()

    server = ParameterServer([peers[2]], fleet, limit_bytes=4096)
    channels = {f"w{n}": pair[0] for n, pair in enumerate(pairs)}
    found = together(
        lambda: server.broadcast([host.first.dump()], channels, timeout_s=WAIT_S),
        lambda: taken(0),
        lambda: taken(1),
    )
    host.close()
    for peer in peers:
        peer.close()
    assert interrupt.happened
    assert step == "update.committed" or (
        isinstance(found[0], SynclineError) and "w1" in str(found[0])
    )
    assert not isinstance(found[1], TransportTimeoutError)
    for engine in engines:
        run.check(engine, engine.held().version)


@pytest.mark.parametrize("step", [*joining.STEPS, *hosts_taking.STEPS])
def test_a_join_that_is_interrupted_leaves_the_engine_whole(step):
    run, interrupt = Run(), Interrupt(step)
    run.publish(1)
    run.publish(2)
    interrupt.is_armed = True
    host, engine, peer = run.host("h0"), run.engine(1), TcpPeer()
    try:
        with pytest.raises(KeyboardInterrupt):
            join(engine, [host.first.dump()], [peer], timeout_s=WAIT_S, observe=interrupt)
        run.check(engine, engine.held().version)
        join(engine, [host.first.dump()], [peer], timeout_s=WAIT_S)
        run.check(engine, 2)
    finally:
        peer.close()
        host.close()


def test_a_worker_that_takes_nothing_ends_the_update_by_its_deadline():
    """What a channel may take to send held the update up, not the update's own time; and nobody was told."""
    run = Run()
    run.publish(1)
    host, peer = run.host("h0"), TcpPeer()
    ours, theirs = socket.socketpair()
    stuck = SocketChannel(ours, "a stopped worker", timeout_s=600.0)
    theirs.settimeout(0)
    ours.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            ours.send(bytes(1 << 16))
    here, there = MemoryChannel.pair()
    try:
        server = ParameterServer([peer], Fleet(engines=2))
        with pytest.raises(
            TransportTimeoutError, match=r"worker w1 did not take 'begin' in 0\.5 s"
        ):
            server.broadcast([host.first.dump()], {"w0": here, "w1": stuck}, timeout_s=0.5)
        assert stuck.is_closed
        assert b'"begin"' in there.receive(0.0)
        assert b'"abort"' in there.receive(0.0)
    finally:
        stuck.abort()
        theirs.close()
        peer.close()
        host.close()


@pytest.mark.parametrize(
    "answer", [b"\xff", b"[]", b'{"update":"UPDATE","say":"ready","with":{"wanted_bytes":"many"}}']
)
def test_a_worker_that_talks_nonsense_is_named(answer):
    run = Run()
    run.publish(1)
    host, peer = run.host("h0"), TcpPeer()
    here, there = MemoryChannel.pair()

    def talk() -> None:
        update = json.loads(there.receive(WAIT_S))["update"]
        there.send(answer.replace(b"UPDATE", update.encode()))

    found = together(
        lambda: ParameterServer([peer]).broadcast(
            [host.first.dump()], {"w0": here}, timeout_s=WAIT_S
        ),
        talk,
    )
    peer.close()
    host.close()
    assert isinstance(found[0], SynclineError) and "worker w0" in str(found[0])


@pytest.mark.parametrize("word", ["commit", "abort"])
def test_a_word_that_one_worker_does_not_take_reaches_the_others(word, monkeypatch):
    """Only a closed channel was expected: a stuck one ended the telling, and hid who had committed."""
    run = Run()
    run.publish(1)
    run.publish(2)
    host, engines = run.host("h0"), [run.engine(1), run.engine(1)]
    peers = [TcpPeer() for _ in range(3)]
    pairs = [MemoryChannel.pair() for _ in engines]
    fleet = Fleet(engines=2)
    workers = [
        Worker(f"w{n}", engine, [peers[n]], fleet=fleet, number=n)
        for n, engine in enumerate(engines)
    ]
    real = MemoryChannel.send

    def send(self: MemoryChannel, message: bytes, **more: object) -> None:
        if self is pairs[0][0] and f'"say":"{word}"'.encode() in bytes(message):
            raise TransportTimeoutError("it took nothing")
        if word == "abort" and self is pairs[1][1] and b'"say":"prepared"' in bytes(message):
            message = bytes(message).replace(b"prepared", b"confused")
        real(self, message, **more)

    monkeypatch.setattr(MemoryChannel, "send", send)
    found = together(
        lambda: ParameterServer([peers[2]], fleet).broadcast(
            [host.first.dump()], {f"w{n}": p[0] for n, p in enumerate(pairs)}, timeout_s=2.0
        ),
        lambda: workers[0].take(pairs[0][1], WAIT_S),
        lambda: workers[1].take(pairs[1][1], WAIT_S),
    )
    host.close()
    for peer in peers:
        peer.close()
    if word == "commit":
        assert "committed by ['w1']; not known of w0: it took nothing" in str(found[0])
        assert [engine.held().version for engine in engines] == [1, 2]
    else:
        assert "w1: expected 'prepared'" in str(found[0])
        assert "the update was given up" in str(found[2])
        assert [engine.held().version for engine in engines] == [1, 1]
