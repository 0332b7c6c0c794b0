"""An engine takes a version from the memory of others: whole, proved, and without disturbing them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from hosting import Run, exchange_of, together
from syncline import CheckpointDir, MemoryEngine, Receiver
from syncline.errors import (
    ConfigError,
    CoverageError,
    LayoutError,
    MovedOnError,
    PeerLostError,
    TransportError,
    VerifyError,
)
from syncline.hosts import LiveEngine, VersionHost, join
from syncline.peers import SharedPeer, TcpPeer
from syncline.types import Read, TensorMeta


@pytest.fixture
def run() -> Run:
    run = Run()
    run.publish(1)
    run.publish(2)
    return run


@pytest.fixture
def peers():
    made = []

    def peer(kind=TcpPeer):
        made.append(kind())
        return made[-1]

    yield peer
    for one in made:
        one.close()


@pytest.fixture
def hosted():
    hosts = []
    yield hosts.append
    for host in hosts:
        host.close()


def started(run, hosted, *names, **arguments):
    hosts = [run.host(name, **arguments) for name in names]
    for host in hosts:
        hosted(host)
    return hosts


@pytest.mark.parametrize("bucket_bytes", [256, 5000, 1 << 20])
def test_an_empty_engine_is_filled(run, hosted, peers, bucket_bytes):
    (host,) = started(run, hosted, "h0")
    engine = MemoryEngine()
    report = join(engine, [host.first.dump()], [peers()], timeout_s=60, bucket_bytes=bucket_bytes)
    run.check(engine, 2)
    assert (report.version, report.lost) == (2, ())


def test_an_engine_at_another_version_follows_and_takes_the_next_delta(run, hosted, peers):
    (host,) = started(run, hosted, "h0")
    engine = run.engine(1)
    join(engine, [host.first.dump()], [peers()], timeout_s=60)
    run.check(engine, 2)
    run.publish(3)
    assert Receiver(run.store, engine).sync().applied == (3,)
    run.check(engine, 3)


def test_a_checkpoint_directory_is_served_and_stays_and_one_is_filled(run, hosted, peers, tmp_path):
    source = CheckpointDir(tmp_path / "source")
    Receiver(run.store, source).sync()
    before = {p: p.read_bytes() for p in sorted((tmp_path / "source").rglob("*")) if p.is_file()}
    host = VersionHost("h0", [TcpPeer()])
    hosted(host)
    offer = host.register(source, files={"config.json": b"{}"})
    target = CheckpointDir(tmp_path / "target")
    join(target, [offer.dump()], [peers()], timeout_s=60)
    run.check(CheckpointDir(tmp_path / "target"), 2)
    assert (tmp_path / "target" / "config.json").read_bytes() == b"{}"
    after = {p: p.read_bytes() for p in sorted((tmp_path / "source").rglob("*")) if p.is_file()}
    assert after == before


def test_shares_of_several_hosts_make_the_whole(run, hosted, peers):
    hosts = [
        run.host("h0", names={"a.embed", "c.norm", "f.empty"}),
        run.host("h1", names={"b.proj", "d.big", "e.scale", "g.bytes", "c.norm"}),
    ]
    for host in hosts:
        hosted(host)
    engine = MemoryEngine()
    join(engine, [h.first.dump() for h in hosts], [peers()], timeout_s=60, bucket_bytes=4096)
    run.check(engine, 2)
    with pytest.raises(CoverageError, match=r"a\.embed"):
        join(MemoryEngine(), [hosts[1].first.dump()], [peers()], timeout_s=60)


def test_a_live_engine_serves_its_own_memory(run, hosted, peers):
    host = VersionHost("h0", [TcpPeer()])
    hosted(host)
    live = LiveEngine(host, run.engine(1))
    stale = live.offer().dump()
    engine = MemoryEngine()
    join(engine, [stale], [peers()], timeout_s=60)
    run.check(engine, 1)
    Receiver(run.store, live).sync()
    with pytest.raises(MovedOnError, match="generation|taken back"):
        join(MemoryEngine(), [stale], [peers()], timeout_s=60)
    join(engine, [live.offer().dump()], [peers()], timeout_s=60)
    run.check(engine, 2)


def test_a_live_engine_that_fails_to_take_a_version_goes_on_offering(run, hosted, peers):
    host = VersionHost("h0", [TcpPeer()])
    hosted(host)
    live = LiveEngine(host, run.engine(1))
    offer = live.offer()

    def broken():
        yield from ()
        raise VerifyError("broken on purpose")

    with pytest.raises(VerifyError):
        live.apply(broken(), live.held())
    assert live.offer() == offer
    engine = MemoryEngine()
    join(engine, [offer.dump()], [peers()], timeout_s=60)
    run.check(engine, 1)


def test_an_engine_that_shows_copies_is_not_served_live(run, hosted, tmp_path):
    class Copying(MemoryEngine):
        def view(self, name):
            return super().view(name).copy()

    engine = Copying()
    Receiver(run.store, engine).sync()
    directory = CheckpointDir(tmp_path / "d")
    Receiver(run.store, directory).sync()
    host = VersionHost("h0", [TcpPeer()])
    hosted(host)
    for wrong in (engine, directory):
        with pytest.raises(ConfigError, match="register"):
            LiveEngine(host, wrong)


def test_workers_of_one_machine_share_the_memory(run, hosted, peers):
    host = VersionHost("h0", [SharedPeer(), TcpPeer()])
    hosted(host)
    live = LiveEngine(host, run.engine(2, allocate=host.bits))
    for memories in ([SharedPeer], [SharedPeer, TcpPeer], [TcpPeer]):
        engine = MemoryEngine()
        join(engine, [live.offer().dump()], [peers(kind) for kind in memories], timeout_s=60)
        run.check(engine, 2)


def test_the_same_version_twice_is_refused_and_the_first_stays(run, hosted, peers):
    """checkpoint-engine 0.4.2: a duplicate registration deletes the first, good one."""
    (host,) = started(run, hosted, "h0")
    with pytest.raises(ConfigError, match="stays so"):
        host.register(run.engine(2))
    engine = MemoryEngine()
    join(engine, [host.first.dump()], [peers()], timeout_s=60)
    run.check(engine, 2)


def test_weights_that_are_not_the_version_are_never_offered(run, hosted):
    engine = run.engine(2)
    engine.bits("a.embed")[5] ^= 1
    host = VersionHost("h0", [TcpPeer()])
    hosted(host)
    with pytest.raises(VerifyError, match=r"a\.embed"):
        host.register(engine)
    with pytest.raises(ConfigError):
        host.offer(engine.held().sha256)
    host.register(run.engine(2))


@pytest.mark.parametrize("empty", [True, False])
def test_what_was_read_is_proved_before_a_bit_is_written(run, hosted, peers, empty):
    host = VersionHost("h0", [TcpPeer()])
    hosted(host)
    source = run.engine(2)
    live = LiveEngine(host, source)
    source.bits("d.big")[77] ^= 1  # behind everybody's back
    engine = MemoryEngine() if empty else run.engine(1)
    with pytest.raises(VerifyError, match=r"d\.big"):
        join(engine, [live.offer().dump()], [peers()], timeout_s=60)
    if empty:
        assert not engine.tensors()
    else:
        run.check(engine, 1)


def test_a_buffer_that_moved_on_in_between_is_noticed(run, hosted, peers, monkeypatch):
    """The memory of the version that is read is used for the next one, bucket by bucket mixed."""
    (host,) = started(run, hosted, "h0", version=1)
    old = host.first
    peer = peers()
    reads = 0
    plain_read = TcpPeer.read

    def read(self, described, wanted, timeout_s):
        nonlocal reads
        reads += len(wanted)
        if reads > 12 and host.first is old:
            host.unregister(old.sha256)
            host.first = host.register(run.engine(2))
        plain_read(self, described, wanted, timeout_s)

    monkeypatch.setattr(TcpPeer, "read", read)
    engine = MemoryEngine()
    with pytest.raises(TransportError, match="generation"):
        join(engine, [old.dump()], [peer], timeout_s=60, bucket_bytes=2048)
    assert host.first is not old and not engine.tensors()
    assert host.first.header == old.header  # it was the same memory
    join(engine, [host.first.dump()], [peer], timeout_s=60)
    run.check(engine, 2)


def test_a_host_that_goes_is_replaced_by_one_that_has_the_same(run, hosted, peers, monkeypatch):
    first, second = started(run, hosted, "h0", "h1")
    offers = [first.first.dump(), second.first.dump()]
    engine = MemoryEngine()
    seen = []

    def observe(step):
        seen.append(step.name)
        if seen.count("take.bucket_read") == 3:
            first.close()

    report = join(engine, offers, [peers()], timeout_s=60, bucket_bytes=2048, observe=observe)
    run.check(engine, 2)
    assert [name for name, _ in report.lost] == ["h0"]
    report = join(MemoryEngine(), offers, [peers()], timeout_s=60)
    assert [name for name, _ in report.lost] == ["h0"]
    second.close()
    with pytest.raises(TransportError, match=r"h0.*h1"):
        join(MemoryEngine(), offers, [peers()], timeout_s=60)


def test_the_only_host_goes(run, hosted, peers):
    (host,) = started(run, hosted, "h0")
    engine = run.engine(1)

    def observe(step):
        if step.name == "join.met":
            host.close()

    with pytest.raises(PeerLostError, match="h0"):
        join(engine, [host.first.dump()], [peers()], timeout_s=60, observe=observe)
    run.check(engine, 1)


def test_offers_that_do_not_go_together(run, hosted, peers):
    one, other = run.host("h0", 1), run.host("h1", 2)
    hosted(one)
    hosted(other)
    with pytest.raises(ConfigError, match="one version"):
        join(MemoryEngine(), [one.first.dump(), other.first.dump()], [peers()], timeout_s=60)
    with pytest.raises(ConfigError):
        join(MemoryEngine(), [], [peers()], timeout_s=60)
    meta = TensorMeta("other", "U8", (3,))
    stranger = MemoryEngine({"other": (meta, np.zeros(3, np.uint8))})
    with pytest.raises(LayoutError):
        join(stranger, [one.first.dump()], [peers()], timeout_s=60)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_engines_that_join_together_pass_pieces_on(run, hosted, peers, count, monkeypatch):
    (host,) = started(run, hosted, "h0")
    engines = [MemoryEngine() for _ in range(count)]
    sent = dict.fromkeys(range(count + 1), 0)
    own = [peers() for _ in range(count)]
    served = [host._memories[0], *own]
    plain_find = TcpPeer._find

    def find(self, items):
        sent[served.index(self)] += sum(n for _, _, n in items if n > 512)
        return plain_find(self, items)

    monkeypatch.setattr(TcpPeer, "_find", find)
    exchanges = exchange_of(count)
    reports = together(
        *(
            partial(
                join,
                engines[n],
                [host.first.dump()],
                [own[n]],
                timeout_s=60,
                name=f"e{n}",
                exchange=exchanges[n],
                bucket_bytes=8192,
            )
            for n in range(count)
        )
    )
    for engine, report in zip(engines, reports, strict=True):
        assert getattr(report, "lost", report) == ()
        run.check(engine, 2)
    model = reports[0].nbytes
    # Each reads the catalog, too; the weights leave the host as often as the fairest split says, not `count` times.
    catalogs = count * host.first.catalog_bytes
    assert sent[0] - catalogs <= 1.3 * model
    assert sum(sent.values()) - catalogs <= count * model


def test_a_receiver_that_dies_is_replaced_by_the_host(run, hosted, peers):
    (host,) = started(run, hosted, "h0")
    engines = [MemoryEngine() for _ in range(3)]
    own = [peers() for _ in range(3)]
    exchanges = exchange_of(3)

    def one(number):
        def observe(step):
            if number == 1 and step.name == "take.bucket_read":
                own[1].close()
                raise KeyboardInterrupt

        try:
            return join(
                engines[number],
                [host.first.dump()],
                [own[number]],
                timeout_s=60,
                name=f"e{number}",
                exchange=exchanges[number],
                bucket_bytes=8192,
                observe=observe,
            )
        except KeyboardInterrupt:
            return "died"

    reports = together(*(partial(one, number) for number in range(3)))
    assert reports[1] == "died"
    for number in (0, 2):
        run.check(engines[number], 2)
        assert [name for name, _ in reports[number].lost] == ["e1"]
    assert not engines[1].tensors()


def test_nothing_stays_registered(run, hosted, peers):
    (host,) = started(run, hosted, "h0")
    peer = peers()
    for _ in range(3):
        join(MemoryEngine(), [host.first.dump()], [peer], timeout_s=60)
    with pytest.raises(ConfigError):
        peer.read(host.first.ways[0].described, [Read("1.data", 0, "join", 0, 1)], 1.0)
    assert b'"regions":{}' in peer.describe()


@pytest.mark.parametrize("kind", [SharedPeer, TcpPeer])
def test_no_memory_is_kept_from_one_join_or_version_to_the_next(run, hosted, peers, kind):
    host = VersionHost("h0", [kind()])
    hosted(host)
    peer, engine, open_files, maps = peers(kind), MemoryEngine(), [], []
    for turn in range(4):
        version = 1 + turn % 2
        offer = host.register(run.engine(version))
        join(engine, [offer.dump()], [peer], timeout_s=60, bucket_bytes=9000)
        run.check(engine, version)
        host.unregister(offer.sha256)
        open_files.append(len(list(Path("/proc/self/fd").iterdir())))
        maps.append(Path("/proc/self/maps").read_text().count("memfd:syncline"))
    assert len(set(open_files[1:])) == 1 and len(set(maps[1:])) == 1, (open_files, maps)


def test_memory_is_used_again_and_a_stale_offer_is_refused(run, hosted, peers):
    (host,) = started(run, hosted, "h0", version=1)
    old = host.first
    host.unregister(old.sha256)
    new = host.register(run.engine(2))
    assert new.header == old.header and new.generation > old.generation
    with pytest.raises(MovedOnError):
        join(MemoryEngine(), [old.dump()], [peers()], timeout_s=60)
    with pytest.raises(ConfigError):
        host.unregister(old.sha256)


def test_no_memory_of_another_kind_is_named(run, hosted, peers):
    (host,) = started(run, hosted, "h0")
    with pytest.raises(TransportError, match="no transport in common"):
        join(MemoryEngine(), [host.first.dump()], [peers(SharedPeer)], timeout_s=60)
