"""Every transport tells the same phases, and as many bytes as a counter of the test's own saw pass."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from live_paths import PATHS, WAIT_S, live_path
from syncline import MemoryEngine, MemoryStore, Publisher, Ranks, Receiver, ShardedPublisher
from syncline.abc import Buffer, Channel, Inlet, PeerMemory, Store
from syncline.channels import MemoryChannel
from syncline.hosts import Fleet, ParameterServer, VersionHost, Worker, join
from syncline.layouts import Block, Layout, LocalTensor, Placement, plain
from syncline.peers import TcpPeer
from syncline.stores import open_store
from syncline.sync.accounting import PHASES, Moved
from syncline.types import Read, TensorMeta
from vllm_fakes import FakeVllm, changed, tensors

SERIAL = ("apply", "reload", "flush")
"""What only one thread of an engine does."""


class CountingStore(Store):
    """Passes everything on to a store, and counts the bytes of objects in both directions."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.nbytes = 0

    def put(self, key: str, chunks: Iterable[Buffer]) -> None:
        whole = b"".join(bytes(chunk) for chunk in chunks)
        self.nbytes += len(whole)
        self.store.put(key, [whole])

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        data = self.store.get(key, start, stop)
        self.nbytes += len(data)
        return data

    def list(self, prefix: str = "") -> list:
        return self.store.list(prefix)

    def compare_and_swap(self, key: str, expected: bytes | None, new: bytes) -> None:
        self.store.compare_and_swap(key, expected, new)
        self.nbytes += len(new)

    def delete(self, key: str) -> None:
        self.store.delete(key)

    def taken(self) -> int:
        """Return what was counted since the last call."""
        nbytes, self.nbytes = self.nbytes, 0
        return nbytes


class CountingInlet(Inlet):
    """Passes everything on to an inlet; counts buckets, and messages that are no words of the protocol."""

    def __init__(self, inlet: Inlet) -> None:
        self.inlet = inlet
        self.name = inlet.name
        self.timeout_s = inlet.timeout_s
        self.nbytes = 0
        self.listening: CountingChannel | None = None

    def channel(self) -> Channel:
        channel = self.inlet.channel()
        if self.listening is None or self.listening.channel is not channel:
            self.listening = CountingChannel(channel, self)
        return self.listening

    def buckets(self, sizes: Sequence[int]) -> Generator[Any, None, None]:
        for bucket in self.inlet.buckets(sizes):
            self.nbytes += bucket.nbytes
            yield bucket

    def close(self) -> None:
        self.inlet.close()


class CountingChannel(Channel):
    def __init__(self, channel: Channel, owner: CountingInlet) -> None:
        self.channel = channel
        self.owner = owner

    def send(self, message: Buffer, *, timeout_s: float | None = None) -> None:
        self.channel.send(message, timeout_s=timeout_s)

    def receive(self, timeout_s: float) -> bytes:
        raw = self.channel.receive(timeout_s)
        try:
            is_word = bool({"message", "form", "opened"} & json.loads(raw).keys())
        except ValueError:
            is_word = False
        self.owner.nbytes += 0 if is_word else len(raw)
        return raw

    def close(self) -> None:
        self.channel.close()


class CountingPeer(PeerMemory):
    """Passes everything on to a TCP peer, and counts what it reads."""

    name = TcpPeer.name

    def __init__(self) -> None:
        self.peer = TcpPeer()
        self.nbytes = 0

    def register(self, region: str, memory: np.ndarray) -> None:
        self.peer.register(region, memory)

    def unregister(self, region: str) -> None:
        self.peer.unregister(region)

    def describe(self) -> bytes:
        return self.peer.describe()

    def read(self, peer: bytes, reads: Sequence[Read], timeout_s: float) -> None:
        self.nbytes += sum(read.nbytes for read in reads)
        self.peer.read(peer, reads, timeout_s)

    def close(self) -> None:
        self.peer.close()


def model(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    made = {
        "a": rng.standard_normal(50_000).astype(np.float32),
        "b": np.arange(999, dtype=np.uint16),
        "c": np.empty((0, 3), np.float32),
    }
    for array in made.values():
        array[step::50] += array.dtype.type(step)
    return made


MODEL_BYTES = sum(array.nbytes for array in model(0).values())


def check(moved: Moved | None, transport: str, nbytes: int, *, engines: int = 1) -> None:
    """Check what must hold of every report, whatever the transport."""
    assert moved is not None
    assert moved.transport == transport
    assert moved.replicas == engines
    assert tuple(moved.seconds) == PHASES
    assert all(spent_s >= 0 and math.isfinite(spent_s) for spent_s in moved.seconds.values())
    assert moved.total_s > 0
    for name in SERIAL:
        assert moved.seconds[name] <= moved.total_s * engines
    assert moved.seconds["wire"] > 0
    assert moved.wire_bytes == nbytes > 0
    assert moved.busy_s == pytest.approx(sum(moved.seconds.values()))
    assert moved.overlap_s == pytest.approx(max(0.0, moved.busy_s - moved.total_s))
    assert moved.share == pytest.approx(nbytes / moved.model_bytes / engines)
    plain = json.loads(json.dumps(moved.as_dict(), allow_nan=False))
    assert plain["wire_bytes"] == nbytes
    assert plain["busy_s"] == moved.busy_s


@pytest.fixture(params=[1, 4], ids=["one thread", "four threads"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("SYNCLINE_THREADS", str(request.param))
    return int(request.param)


@pytest.mark.parametrize("layout", ["syncline", "slime"])
def test_a_store(threads: int, layout: str) -> None:
    shared = MemoryStore()
    sent, got = CountingStore(shared), CountingStore(shared)
    publisher = Publisher(sent, layout=layout)
    engine = MemoryEngine()
    receiver = Receiver(got, engine)
    sent.taken()
    for step, kind in enumerate(["full", "delta", "delta"]):
        published = publisher.publish(model(step)).moved
        received = receiver.sync().moved
        check(published, "store", sent.taken())
        # Whose layout it is, is asked once, before the first sync is timed.
        asked_bytes = _head_bytes(shared) if step == 0 else 0
        check(received, "store", got.taken() - asked_bytes)
        assert (published.kind, received.kind) == (kind, kind)
        assert published.model_bytes == received.model_bytes == MODEL_BYTES
        if threads == 1:  # nothing goes on beside anything else
            assert published.overlap_s == received.overlap_s == 0


def _head_bytes(store: Store) -> int:
    return len(store.get("HEAD.json"))


def test_a_foreign_store(threads: int) -> None:
    shared = MemoryStore()
    publisher = Publisher(shared, layout="slime")
    publisher.publish(model(0))
    publisher.publish(model(1))
    got = CountingStore(shared)
    receiver = Receiver(got, MemoryEngine(), layout="slime")
    check(receiver.sync().moved, "store", got.taken())


def test_ranks_that_publish_together() -> None:
    meta = TensorMeta("w", "F32", (1000,))
    halves = tuple(
        Placement(
            rank,
            (LocalTensor("w", "F32", (500,)),),
            (Block("w", (500 * rank,), (500,), "w", 0, (1,)),),
        )
        for rank in range(2)
    )
    layout = Layout({"w": plain(meta)}, halves)
    shared = MemoryStore()
    stores = [CountingStore(shared) for _ in halves]
    ranks = Ranks.threads(2)
    ready = threading.Barrier(2)

    def publish(rank: int) -> Moved | None:
        publisher = ShardedPublisher(stores[rank], layout, ranks[rank])
        ready.wait(WAIT_S)
        stores[rank].taken()
        ready.wait(WAIT_S)
        return publisher.publish({"w": np.full(500, rank, np.float32)}).moved

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(publish, range(2)))
    written = [pair for pair in zip(stores, found, strict=True) if pair[0].nbytes]
    assert written  # one rank encodes a tensor, so that the other may have nothing to write
    for store, moved in written:
        check(moved, "store", store.nbytes)
    assert sum(moved.wire_bytes for moved in found) == sum(store.nbytes for store in stores)


@pytest.mark.parametrize("kind", PATHS)
def test_a_live_path(threads: int, kind: str) -> None:
    with live_path(kind) as (outlet, make):
        inlets = [CountingInlet(make(name)) for name in ("a", "b")]
        receivers = [Receiver(inlet, MemoryEngine()) for inlet in inlets]
        publisher = Publisher(MemoryStore(), live=outlet, bucket_bytes=4096, live_timeout_s=WAIT_S)
        for inlet in inlets:
            inlet.channel()
        _until(lambda: len(outlet.members()) == 2)
        for step in range(3):
            for inlet in inlets:
                inlet.nbytes = 0
            with ThreadPoolExecutor(2) as pool:
                waiting = [pool.submit(receiver.sync) for receiver in receivers]
                delivery = publisher.publish(model(step)).delivery
            delivery.require()
            for inlet, applied in zip(inlets, waiting, strict=True):
                check(applied.result().moved, outlet.name, inlet.nbytes)
            total_bytes = sum(inlet.nbytes for inlet in inlets)
            check(delivery.moved, outlet.name, total_bytes, engines=2)


def _until(holds: Callable[[], bool]) -> None:
    ready = threading.Event()
    while not holds():
        assert not ready.wait(0.001)


def _hosted(peer: PeerMemory) -> tuple[VersionHost, bytes]:
    store = MemoryStore()
    publisher = Publisher(store)
    for step in range(2):
        publisher.publish(model(step))
    engine = MemoryEngine()
    Receiver(store, engine).sync()
    host = VersionHost("host", [peer])
    return host, host.register(engine).dump()


@pytest.fixture
def peers() -> Iterator[list[CountingPeer]]:
    made = [CountingPeer() for _ in range(4)]
    yield made
    for peer in made:
        peer.close()


def test_engines_that_join(threads: int, peers: list[CountingPeer]) -> None:
    host, offer = _hosted(peers[0])
    report = join(MemoryEngine(), [offer], [peers[1]], timeout_s=WAIT_S, bucket_bytes=65536)
    check(report.moved, "peers", peers[1].nbytes)
    assert peers[0].nbytes == 0
    host.close()


def test_a_parameter_server(threads: int, peers: list[CountingPeer]) -> None:
    host, offer = _hosted(peers[0])
    fleet = Fleet(engines=2)
    server = ParameterServer([peers[1]], fleet)
    channels = {}
    with ThreadPoolExecutor(2) as pool:
        done = []
        for number, peer in enumerate(peers[2:]):
            name = f"w{number}"
            channels[name], there = MemoryChannel.pair()
            worker = Worker(name, MemoryEngine(), [peer], fleet=fleet, number=number)
            done.append(pool.submit(worker.take, there, WAIT_S))
        report = server.broadcast([offer], channels, timeout_s=WAIT_S)
        assert [future.result(WAIT_S) for future in done] == [2, 2]
    check(report.moved, "peers", sum(peer.nbytes for peer in peers[1:]), engines=2)
    host.close()


def test_vllm_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from syncline.vllm import session
    from syncline.vllm.commit import CommitOptions, bring

    url = str(tmp_path / "run")
    base = tensors(1)
    publisher = Publisher(open_store(url))
    publisher.publish(base)
    publisher.publish(changed(base, 2))
    stores: list[CountingStore] = []

    def opened(where: str) -> Store:
        stores.append(CountingStore(open_store(where)))
        return stores[-1]

    monkeypatch.setattr(session, "open_store", opened)
    vllm = FakeVllm(base, count=2)
    done = bring(vllm, url, 2, CommitOptions(poll_s=0.001))
    heads = len(stores) * _head_bytes(open_store(url))
    check(done.moved, "store", sum(store.nbytes for store in stores) - heads, engines=2)
    assert done.moved.seconds["flush"] >= 0
    assert done.moved.total_s == pytest.approx(done.stage_s + done.pause_s)


def test_an_sglang_server(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    import sglang_scenes

    scene = sglang_scenes.build(tmp_path, "0.5.23")
    store = CountingStore(open_store(str(tmp_path / "run")))
    scene.train(np.random.default_rng(3))
    from syncline.engines import CheckpointDir
    from syncline.sglang.control import SglangHttp
    from syncline.sglang.server import SglangServer

    with closing(scene.fake):
        follower = SglangServer(
            SglangHttp(scene.fake.url),
            store,
            CheckpointDir(tmp_path / "model"),
            tmp_path / "staging",
            options=sglang_scenes.QUICK,
        )
        done = follower.sync()
        check(done.moved, "store", store.nbytes - _head_bytes(store.store))
        assert done.moved.seconds["reload"] == pytest.approx(done.send_s)
        assert done.moved.seconds["flush"] == pytest.approx(done.flush_s)
        scene.check(2)
