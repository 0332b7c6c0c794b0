"""Updates of many workers: all of them or none, each with its own boxes; and the faults of checkpoint-engine 0.4.2."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from hosting import Run
from syncline import MemoryEngine, MemoryStore, Publisher, Receiver
from syncline.abc import WeightSource
from syncline.channels import MemoryChannel
from syncline.errors import (
    CommitError,
    ConfigError,
    PeerLostError,
    TransportError,
    TransportTimeoutError,
    VerifyError,
)
from syncline.hosts import Fleet, ParameterServer, VersionHost, Worker
from syncline.layouts import Block, Layout, LocalTensor, Placement, plain
from syncline.peers import SharedPeer, TcpPeer
from syncline.types import TensorMeta, unsigned


@pytest.fixture
def run() -> Run:
    run = Run()
    run.publish(1)
    run.publish(2)
    return run


@pytest.fixture
def closing():
    things = []

    def keep(thing):
        things.append(thing)
        return thing

    yield keep
    for thing in reversed(things):
        thing.close()


class Fleetful:
    """Engines at a version, a worker for each on a thread, and a server."""

    def __init__(self, closing, engines, fleet=None, *, kind=TcpPeer, limit_bytes=8192, **workers):
        self.engines = engines
        self.fleet = Fleet(engines=len(engines)) if fleet is None else fleet
        self.peers = [closing(kind()) for _ in engines]
        self.server = ParameterServer([closing(kind())], self.fleet, limit_bytes=limit_bytes)
        self.channels = {}
        self.results = {}
        self.threads = []
        self.options = workers

    def start(self, numbers=None, **options):
        """Let workers wait for one update."""
        for number in range(len(self.engines)) if numbers is None else numbers:
            here, there = MemoryChannel.pair()
            name = f"w{number}"
            self.channels[name] = here
            worker = Worker(
                name,
                self.engines[number],
                [self.peers[number]],
                fleet=self.fleet,
                number=number,
                **self.options | options.get(name, {}),
            )
            thread = threading.Thread(target=self._take, args=(name, worker, there), daemon=True)
            thread.start()
            self.threads.append(thread)

    def _take(self, name, worker, channel):
        try:
            self.results[name] = worker.take(channel, 60)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.results[name] = error
        finally:
            channel.close()

    def ended(self):
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive()
        return self.results


@pytest.mark.parametrize("kind", [TcpPeer, SharedPeer])
@pytest.mark.parametrize("limit_bytes", [4096, 1 << 20])
def test_broadcast_to_all(run, closing, kind, limit_bytes):
    host = closing(VersionHost("h0", [kind()]))
    offer = host.register(run.engine(2))
    fleet = Fleetful(
        closing,
        [run.engine(1), MemoryEngine(), run.engine(1)],
        kind=kind,
        limit_bytes=limit_bytes,
    )
    fleet.start()
    report = fleet.server.broadcast([offer.dump()], fleet.channels, timeout_s=60)
    assert fleet.ended() == {"w0": 2, "w1": 2, "w2": 2}
    assert (report.version, report.lost, report.buckets.count) == (2, (), 2)
    for engine in fleet.engines:
        run.check(engine, 2)


def test_p2p_to_some_leaves_the_others_alone(run, closing):
    host = closing(run.host("h0"))
    fleet = Fleetful(closing, [run.engine(1) for _ in range(3)])
    fleet.start([1])
    with pytest.raises(ConfigError, match="p2p"):
        fleet.server.broadcast([host.first.dump()], fleet.channels, timeout_s=60)
    fleet.server.p2p([host.first.dump()], fleet.channels, timeout_s=60)
    assert fleet.ended() == {"w1": 2}
    for number, engine in enumerate(fleet.engines):
        run.check(engine, 2 if number == 1 else 1)


def test_one_bucket_where_memory_is_short(run, closing):
    host = closing(run.host("h0"))
    fleet = Fleetful(closing, [run.engine(1), run.engine(1)], limit_bytes=1 << 20)
    fleet.start(w1={"free_bytes": lambda: 3000})
    report = fleet.server.broadcast([host.first.dump()], fleet.channels, timeout_s=60)
    assert (report.buckets.count, report.buckets.nbytes) == (1, 1280)
    fleet.ended()
    for engine in fleet.engines:
        run.check(engine, 2)


METAS = (
    TensorMeta("cols", "BF16", (6, 8)),
    TensorMeta("norm", "F32", (5,)),
    TensorMeta("rows", "F32", (8, 6)),
    TensorMeta("turned", "U8", (4, 6)),
)


def tensor_parallel() -> Layout:
    """Two ranks: one tensor cut by rows, one by columns, one transposed in memory, one that both have."""
    catalog = {meta.name: plain(meta) for meta in METAS}
    placements = []
    for rank in range(2):
        tensors = (
            LocalTensor("cols", "BF16", (6, 4)),
            LocalTensor("norm", "F32", (5,)),
            LocalTensor("rows", "F32", (4, 6)),
            LocalTensor("turned", "U8", (6, 2)),
        )
        blocks = (
            Block("cols", (0, 4 * rank), (6, 4), "cols", 0, (4, 1)),
            Block("norm", (0,), (5,), "norm", 0, (1,), copies=2),
            Block("rows", (4 * rank, 0), (4, 6), "rows", 0, (6, 1)),
            Block("turned", (2 * rank, 0), (2, 6), "turned", 0, (1, 2)),
        )
        placements.append(Placement(rank, tensors, blocks))
    return Layout(catalog, tuple(placements))


def drawn(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        m.name: rng.integers(0, 256, m.nbytes, np.uint8)
        .view(unsigned(m.unit_bytes))
        .reshape(m.shape)
        for m in METAS
    }


def local(weights, rank) -> dict[str, np.ndarray]:
    """An oracle by slicing."""
    return {
        "cols": weights["cols"][:, 4 * rank : 4 * rank + 4],
        "norm": weights["norm"],
        "rows": weights["rows"][4 * rank : 4 * rank + 4],
        "turned": weights["turned"][2 * rank : 2 * rank + 2].T,
    }


def shard_engine(weights, rank) -> MemoryEngine:
    tensors = {}
    for tensor in tensor_parallel().placements[rank].tensors:
        array = np.ascontiguousarray(local(weights, rank)[tensor.name])
        tensors[tensor.name] = TensorMeta(tensor.name, tensor.dtype, tensor.shape), array
    return MemoryEngine(tensors)


def published(*states):
    store = MemoryStore()
    publisher = Publisher(store)
    for weights in states:
        arrays = {m.name: (m, weights[m.name].reshape(-1)) for m in METAS}
        publisher.publish(Drawn(arrays))
    engine = MemoryEngine()
    Receiver(store, engine).sync()
    return engine


class Drawn(WeightSource):
    is_stable = True

    def __init__(self, arrays):
        self._arrays = arrays

    def tensors(self):
        for meta, bits in self._arrays.values():
            yield meta, np.ascontiguousarray(bits)


@pytest.mark.parametrize("limit_bytes", [256, 1 << 20])
@pytest.mark.parametrize("way", ["broadcast", "p2p", "half"])
def test_each_rank_gets_the_boxes_of_its_placement(closing, way, limit_bytes):
    before, after = drawn(1), drawn(2)
    engine = published(before, after)
    hosts = [closing(VersionHost(f"h{n}", [TcpPeer()])) for n in range(2)]
    offers = [
        hosts[0].register(engine, {"cols", "norm"}).dump(),
        hosts[1].register(engine, {"norm", "rows", "turned"}).dump(),
    ]
    fleet = Fleet(engines=2, layout=tensor_parallel())
    world = Fleetful(
        closing,
        [shard_engine(before, n % 2) for n in range(4)],
        fleet,
        limit_bytes=limit_bytes,
        free_bytes=lambda: 1 << 30,
    )
    taking = [2, 3] if way == "half" else range(4)
    world.start(taking)
    drive = world.server.broadcast if way == "broadcast" else world.server.p2p
    report = drive(offers, world.channels, timeout_s=60)
    assert all(result == 2 for result in world.ended().values())
    whole = sum(meta.nbytes for meta in METAS)
    assert set(report.wanted_bytes.values()) == {(whole + METAS[1].nbytes) // 2}
    for number, one in enumerate(world.engines):
        expected = local(after if number in taking else before, number % 2)
        for name, array in expected.items():
            assert one.view(name).tobytes() == np.ascontiguousarray(array).tobytes(), name


def test_a_wrong_bit_on_one_rank_stops_all(closing):
    before, after = drawn(1), drawn(2)
    engine = published(before, after)
    host = closing(VersionHost("h0", [TcpPeer()]))
    offer = host.register(engine)
    space = host._offers[offer.sha256][0]
    space.data[10] ^= 1  # after it was proved
    world = Fleetful(
        closing,
        [shard_engine(before, n) for n in range(2)],
        Fleet(layout=tensor_parallel()),
    )
    world.start()
    with pytest.raises(VerifyError, match="cols"):
        world.server.broadcast([offer.dump()], world.channels, timeout_s=60)
    assert all(isinstance(result, CommitError) for result in world.ended().values())
    for rank, one in enumerate(world.engines):
        for name, array in local(before, rank).items():
            assert one.view(name).tobytes() == np.ascontiguousarray(array).tobytes()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_bit_that_flips_on_its_way_to_one_rank_is_noticed(closing, rank):
    """A rank alone does not have whole tensors: what it read was committed though nothing proved it."""

    class Flipping(TcpPeer):
        flips = 1

        def read(self, peer, reads, timeout_s):
            super().read(peer, reads, timeout_s)
            for read in reads:
                if ".data" in read.region and self.flips:
                    self.flips -= 1
                    self._regions.places([read])[0][read.nbytes // 2] ^= 1

    before, after = drawn(1), drawn(2)
    host = closing(VersionHost("h0", [TcpPeer()]))
    offer = host.register(published(before, after)).dump()
    world = Fleetful(
        closing,
        [shard_engine(before, n) for n in range(2)],
        Fleet(layout=tensor_parallel()),
        limit_bytes=256,
        free_bytes=lambda: 1 << 30,
    )
    plain = world.peers[rank]
    world.peers[rank] = closing(Flipping())
    world.start([rank])
    with pytest.raises(VerifyError, match="expected fingerprint"):
        world.server.p2p([offer], world.channels, timeout_s=60)
    assert isinstance(world.ended()[f"w{rank}"], CommitError)
    assert world.peers[rank].flips == 0
    for name, array in local(before, rank).items():
        assert world.engines[rank].view(name).tobytes() == np.ascontiguousarray(array).tobytes()
    world.peers[rank] = plain
    world.start([rank])
    world.server.p2p([offer], world.channels, timeout_s=60)
    assert world.ended()[f"w{rank}"] == 2
    for name, array in local(after, rank).items():
        assert world.engines[rank].view(name).tobytes() == np.ascontiguousarray(array).tobytes()


def unharmed(run, fleet, version=1):
    for engine in fleet.engines:
        run.check(engine, version)


def retried(run, closing, fleet, offers):
    """The fleet is whole: the next update goes through."""
    again = Fleetful(closing, fleet.engines)
    again.start()
    again.server.broadcast(offers, again.channels, timeout_s=60)
    again.ended()
    unharmed(run, again, 2)


def test_fault_1_no_mix_after_a_second_update(run, closing):
    """checkpoint-engine: rank 1 registers step 2 in the shared pool while rank 0 still reads step 1."""
    run.publish(3)
    names = {"a.embed", "b.proj", "c.norm"}
    rest = set(run.states[0]) - names
    one, two = closing(run.host("h0", 1, names)), closing(run.host("h1", 1, rest))
    first = Fleetful(closing, [MemoryEngine()])
    first.start()
    first.server.broadcast([one.first.dump(), two.first.dump()], first.channels, timeout_s=60)
    first.ended()
    run.check(first.engines[0], 1)

    def swap(step):
        if step.name == "take.bucket_read" and two.first.version == 1:
            two.unregister(two.first.sha256)
            two.first = two.register(run.engine(2), rest)

    second = Fleetful(closing, [run.engine(3)], limit_bytes=1024)
    second.start(w0={"observe": swap})
    with pytest.raises(CommitError, match="generation"):
        second.server.p2p([one.first.dump(), two.first.dump()], second.channels, timeout_s=60)
    assert isinstance(second.ended()["w0"], TransportError)
    unharmed(run, second, 3)
    # And hosts of two versions are no source at all.
    third = Fleetful(closing, [run.engine(3)])
    third.start()
    with pytest.raises(ConfigError, match="one version"):
        third.server.p2p([one.first.dump(), two.first.dump()], third.channels, timeout_s=60)
    third.channels["w0"].close()
    assert isinstance(third.ended()["w0"], PeerLostError)


@pytest.mark.parametrize(
    "step", ["update.begun", "update.met", "take.bucket_read", "update.prepared"]
)
def test_fault_2_a_dead_engine_ends_the_update_at_once(run, closing, step):
    """checkpoint-engine: the parameter server of an engine that dies waits for ever."""
    host = closing(run.host("h0"))
    fleet = Fleetful(closing, [run.engine(1) for _ in range(3)])

    def die(at):
        if at.name == step:
            fleet.peers[1].close()
            raise SystemExit

    fleet.start(w1={"observe": die})
    # A real process that dies says nothing; this one's last word is kept back.
    original = MemoryChannel.send

    def send(self, message, **more):
        if b'"failed"' not in message:
            original(self, message, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryChannel, "send", send)
        with pytest.raises((PeerLostError, CommitError), match="w1") as caught:
            fleet.server.broadcast([host.first.dump()], fleet.channels, timeout_s=30)
        results = fleet.ended()
    assert isinstance(results["w1"], SystemExit)
    if isinstance(caught.value, PeerLostError):
        assert isinstance(results["w0"], CommitError) and isinstance(results["w2"], CommitError)
        unharmed(run, fleet)
    else:  # it died between its vote and the commit: then the error says who holds what
        assert step == "update.prepared" and "committed by ['w0', 'w2']" in str(caught.value)
        assert [engine.held().version for engine in fleet.engines] == [2, 1, 2]
    retried(run, closing, fleet, [host.first.dump()])


def test_fault_3_a_request_that_fails_ends_the_update(run, closing):
    """checkpoint-engine: the exception of req_func is lost in a thread, and update() hangs."""
    host = closing(run.host("h0"))
    fleet = Fleetful(closing, [run.engine(1)])
    here, _ = MemoryChannel.pair()  # an engine that was never told to take part

    def request():
        raise RuntimeError("HTTP 500")

    with pytest.raises(CommitError, match="HTTP 500"):
        fleet.server.p2p([host.first.dump()], {"w0": here}, timeout_s=30, request=request)
    unharmed(run, fleet)

    end = threading.Event()

    def hangs():
        end.wait(60)

    with pytest.raises(TransportTimeoutError, match="w0"):
        fleet.server.p2p([host.first.dump()], {"w0": here}, timeout_s=0.5, request=hangs)
    end.set()
    done = []
    fleet.start()
    fleet.server.p2p(
        [host.first.dump()], fleet.channels, timeout_s=30, request=lambda: done.append(1)
    )
    assert done == [1]
    unharmed(run, fleet, 2)


def test_fault_4_a_callback_that_raises_leaves_all_whole(run, closing):
    """checkpoint-engine: engines had applied two and three buckets of eight, without a marker."""
    host = closing(run.host("h0"))

    class Broken(MemoryEngine):
        def apply(self, records, held):
            for number, _ in enumerate(records):
                if number == 3:
                    raise RuntimeError("no memory in the engine's loader")

    broken = Broken()
    Receiver(run.store, broken).sync(1)
    fleet = Fleetful(closing, [run.engine(1), broken, run.engine(1)])
    fleet.start()
    with pytest.raises(CommitError, match="worker w1 failed: RuntimeError"):
        fleet.server.broadcast([host.first.dump()], fleet.channels, timeout_s=30)
    assert isinstance(fleet.ended()["w1"], RuntimeError)
    unharmed(run, fleet)


def test_fault_4_a_commit_that_fails_on_one_is_said(run, closing):
    host = closing(run.host("h0"))

    class Late(MemoryEngine):
        def apply(self, records, held):
            for _ in records:
                pass
            raise RuntimeError("after the vote")

    late = Late()
    Receiver(run.store, late).sync(1)
    fleet = Fleetful(closing, [run.engine(1), late])
    fleet.start()
    with pytest.raises(CommitError, match=r"committed by \['w0'\].*w1: .*after the vote"):
        fleet.server.broadcast([host.first.dump()], fleet.channels, timeout_s=30)
    fleet.ended()
    run.check(fleet.engines[0], 2)
    run.check(fleet.engines[1], 1)


def test_fault_5_a_duplicate_registration_changes_nothing(run, closing):
    """checkpoint-engine: the first, good registration is deleted."""
    host = closing(run.host("h0"))
    with pytest.raises(ConfigError, match="stays so"):
        host.register(run.engine(2))
    fleet = Fleetful(closing, [run.engine(1)])
    fleet.start()
    fleet.server.broadcast([host.first.dump()], fleet.channels, timeout_s=30)
    fleet.ended()
    unharmed(run, fleet, 2)


def test_a_server_that_goes_before_commit_leaves_all_whole(run, closing, monkeypatch):
    host = closing(run.host("h0"))
    fleet = Fleetful(closing, [run.engine(1), run.engine(1)])

    def dies(self, version):
        for channel in fleet.channels.values():
            channel.close()
        raise KeyboardInterrupt

    monkeypatch.setattr("syncline.hosts.server._Update.commit", dies)
    fleet.start()
    with pytest.raises(KeyboardInterrupt):
        fleet.server.broadcast([host.first.dump()], fleet.channels, timeout_s=30)
    assert all(isinstance(result, PeerLostError) for result in fleet.ended().values())
    unharmed(run, fleet)


def test_serving_worker_takes_one_update_after_the_other(run, closing):
    run.publish(3)
    engine = run.engine(1)
    here, there = MemoryChannel.pair()
    worker = Worker("w0", engine, [closing(TcpPeer())])
    thread = threading.Thread(target=worker.serve, args=(there,), daemon=True)
    thread.start()
    server = ParameterServer([closing(TcpPeer())])
    host = closing(VersionHost("h0", [TcpPeer()]))
    offers = {version: host.register(run.engine(version)).dump() for version in (2, 3)}
    server.broadcast([offers[2]], {"w0": here}, timeout_s=30)
    run.check(engine, 2)
    with pytest.raises(CommitError):
        server.broadcast([offers[3]], {"w0": here}, timeout_s=30, request=lambda: 1 // 0)
    server.broadcast([offers[3]], {"w0": here}, timeout_s=30)
    run.check(engine, 3)
    here.close()
    thread.join(30)
    assert not thread.is_alive()
