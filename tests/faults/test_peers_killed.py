"""SIGKILL of a host, a worker, a joiner or the server at every step: the others end whole, and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from syncline import MemoryEngine, Publisher, Receiver, open_store
from syncline.channels.lobby import Lobby
from syncline.errors import CommitError, PeerLostError
from syncline.hosts import Fleet, ParameterServer
from syncline.peers import TcpPeer

CHILD = textwrap.dedent(
    """
    import json, os, signal, sys, time
    from hashlib import sha256
    from pathlib import Path
    from hosting import ports_of
    from syncline import MemoryEngine, Receiver, open_store
    from syncline.channels import lobby
    from syncline.errors import SynclineError
    from syncline.hosts import Fleet, ParameterServer, VersionHost, Worker, join, messages
    from syncline.peers import SharedPeer, TcpPeer

    role, store, address, name, number, step, nth = sys.argv[1:8]
    left = int(nth)

    def observe(at):
        global left
        if at == step or getattr(at, "name", "") == step:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def say(**fields):
        print(json.dumps(fields), flush=True)

    def at(version):
        engine = MemoryEngine()
        Receiver(open_store(store), engine).sync(version)
        return engine

    def bits(engine):
        parts = b"".join(engine.view(n).tobytes() for n in sorted(engine.tensors()))
        return sha256(parts).hexdigest()

    peer = TcpPeer()
    error, engine = "", None
    try:
        if role == "host":
            host = VersionHost(name, [SharedPeer(), peer])
            say(offer=host.register(at(2)).dump().decode())
            sys.stdin.read()
        elif role == "worker":
            engine = at(1)
            channel = lobby.join(address, "parameter-server", name, 60)
            worker = Worker(name, engine, [peer], fleet=Fleet(engines=3), number=int(number), observe=observe)
            worker.take(channel, 60)
        elif role == "joiner":
            engine = at(1)
            join(engine, [raw.encode() for raw in json.loads(Path(address).read_text())], [peer],
                 timeout_s=60, name=name, bucket_bytes=4096, observe=observe)
        else:
            plain = messages.say
            def killed(channel, update, word, **fields):
                observe(word)
                plain(channel, update, word, **fields)
            messages.say = killed
            meeting = lobby.Lobby(address, "parameter-server", 30)
            say(listening=True)
            meeting.wait(3, 60)
            offers = [raw.encode() for raw in json.loads(sys.stdin.readline())]
            ParameterServer([peer], Fleet(engines=3), limit_bytes=4096).broadcast(
                offers, meeting.members(), timeout_s=60)
    except SynclineError as caught:
        error = f"{type(caught).__name__}: {caught}"
    peer.close()
    time.sleep(0.05)
    say(error=error, held=engine and engine.held().version, bits=engine and bits(engine),
        ports=ports_of(os.getpid()))
    """
)


def drawn(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        f"t{i}": rng.integers(0, 1 << 32, (40, 60), np.uint32).view(np.float32) for i in range(4)
    }


class World:
    """A run with two versions, and processes that are all ended at the end."""

    def __init__(self, directory: Path) -> None:
        self.store = directory / "store"
        self.address = str(directory / "ps.sock")
        self.directory = directory
        self.processes: list[subprocess.Popen] = []
        publisher = Publisher(open_store(self.store))
        self.bits = {}
        for version in (1, 2):
            publisher.publish(drawn(version))
            engine = MemoryEngine()
            Receiver(open_store(self.store), engine).sync(version)
            raw = b"".join(engine.view(n).tobytes() for n in sorted(engine.tensors()))
            self.bits[version] = sha256(raw).hexdigest()

    def start(self, role, name="", number=0, step="", nth=1, address=None) -> subprocess.Popen:
        tests = str(Path(__file__).parents[1])
        place = self.address if address is None else address
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                CHILD,
                role,
                self.store,
                place,
                name,
                str(number),
                step,
                str(nth),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([tests, *sys.path])},
        )
        self.processes.append(process)
        return process

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()


@pytest.fixture
def world(tmp_path):
    segments = set(Path("/dev/shm").iterdir())
    world = World(tmp_path)
    yield world
    world.end()
    left = set(Path("/dev/shm").iterdir()) - segments
    assert [path for path in left if "syncline" in path.name] == []


def heard(process) -> dict:
    """Return the next thing that a process says; empty if it was killed."""
    line = process.stdout.readline()
    return json.loads(line) if line else {}


def whole(world, said, version) -> None:
    assert (said["held"], said["bits"], said["ports"]) == (version, world.bits[version], [])


def update(world, workers, offers, meeting, peer):
    meeting.wait(3, 120)
    server = ParameterServer([peer], Fleet(engines=3), limit_bytes=4096)
    return server.broadcast(offers, meeting.members(), timeout_s=60)


@pytest.mark.parametrize(
    ("step", "nth"),
    [("update.begun", 1), ("update.met", 1), ("take.bucket_read", 3), ("update.prepared", 1)],
)
def test_a_killed_worker_is_named_and_the_others_are_whole(world, step, nth):
    host = world.start("host", "h0")
    workers = [world.start("worker", f"w{n}", n, step if n == 1 else "", nth) for n in range(3)]
    offer = heard(host)["offer"].encode()
    peer, meeting = TcpPeer(), Lobby(world.address, "parameter-server", 30)
    try:
        with pytest.raises((PeerLostError, CommitError), match="w1") as caught:
            update(world, workers, [offer], meeting, peer)
        committed = "committed by ['w0', 'w2']" in str(caught.value)
        assert step == "update.prepared" or not committed
        for number in (0, 2):
            said = heard(workers[number])
            whole(world, said, 2 if committed else 1)
            assert committed or "w1" in said["error"]
        assert workers[1].wait(30) == -signal.SIGKILL
    finally:
        meeting.close()
        peer.close()
    assert not Path(world.address).exists()


@pytest.mark.parametrize(("step", "nth"), [("size", 2), ("read", 3), ("commit", 1), ("commit", 2)])
def test_a_killed_server_leaves_every_worker_at_one_version_or_the_other(world, step, nth):
    host = world.start("host", "h0")
    server = world.start("server", "ps", 0, step, nth)
    assert heard(server)["listening"]
    workers = [world.start("worker", f"w{n}", n) for n in range(3)]
    server.stdin.write(json.dumps([heard(host)["offer"]]) + "\n")
    server.stdin.flush()
    held = []
    for worker in workers:
        said = heard(worker)
        held.append(said["held"])
        whole(world, said, said["held"])
        if said["held"] == 1:
            assert "server" in said["error"] and "nothing was written" in said["error"]
    assert sorted(held) == ([1, 1, 2] if (step, nth) == ("commit", 2) else [1, 1, 1])
    assert server.wait(30) == -signal.SIGKILL


def test_a_killed_host_is_replaced_and_named(world):
    hosts = [world.start("host", f"h{n}") for n in range(2)]
    offers = [heard(host)["offer"] for host in hosts]
    listing = world.directory / "offers.json"
    listing.write_text(json.dumps(offers))
    hosts[0].kill()
    hosts[0].wait()
    joiner = world.start("joiner", "e0", address=str(listing))
    said = heard(joiner)
    whole(world, said, 2)
    hosts[1].kill()
    hosts[1].wait()
    said = heard(world.start("joiner", "e1", address=str(listing)))
    whole(world, said, 1)
    assert "PeerLostError" in said["error"] and "h0" in said["error"] and "h1" in said["error"]


@pytest.mark.parametrize(("step", "nth"), [("join.met", 1), ("take.bucket_read", 4)])
def test_a_killed_joiner_disturbs_nobody(world, step, nth):
    host = world.start("host", "h0")
    listing = world.directory / "offers.json"
    listing.write_text(json.dumps([heard(host)["offer"]]))
    killed = world.start("joiner", "e0", 0, step, nth, str(listing))
    assert killed.wait(120) == -signal.SIGKILL
    whole(world, heard(world.start("joiner", "e1", address=str(listing))), 2)
    host.stdin.close()
    assert heard(host) == {"error": "", "held": None, "bits": None, "ports": []}
    host.stdin = open(os.devnull)  # noqa: SIM115, PTH123 - closed again with the others
