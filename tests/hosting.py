"""Versions, hosts and groups that tests of peer-to-peer and of the parameter server start from."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from syncline import MemoryEngine, MemoryStore, Publisher, Receiver
from syncline.hosts import VersionHost
from syncline.peers import TcpPeer

Weights = dict[str, np.ndarray]


def weights(seed: int, scale: int = 1) -> Weights:
    """Weights of several dtypes, NaN payloads among their bits, a scalar and an empty one."""
    rng = np.random.default_rng(seed)
    sizes = {
        "a.embed": (64, 96 * scale),
        "b.proj": (48, 32),
        "c.norm": (96,),
        "d.big": (700 * scale, 33),
    }
    found = {
        name: rng.integers(0, 1 << 32, shape, np.uint32).view(np.float32)
        for name, shape in sizes.items()
    }
    found["e.scale"] = np.array(np.float16(seed))
    found["f.empty"] = np.zeros((0, 4), np.float32)
    found["g.bytes"] = rng.integers(0, 256, 1001, np.uint8)
    return found


class Run:
    """A run in memory, and engines at its versions."""

    def __init__(self, scale: int = 1) -> None:
        self.store = MemoryStore()
        self.publisher = Publisher(self.store)
        self.scale = scale
        self.states: list[Weights] = []

    def publish(self, seed: int) -> int:
        self.states.append(weights(seed, self.scale))
        return self.publisher.publish(self.states[-1]).version

    def engine(self, version: int | None = None, **arguments) -> MemoryEngine:
        engine = MemoryEngine(**arguments)
        Receiver(self.store, engine).sync(version)
        return engine

    def check(self, engine, version: int) -> None:
        """Every bit of the engine is the version's."""
        assert engine.held().version == version
        for name, array in self.states[version - 1].items():
            assert engine.view(name).tobytes() == array.tobytes(), name

    def host(self, name: str, version: int | None = None, names=None, **arguments) -> VersionHost:
        host = VersionHost(name, [TcpPeer()], **arguments)
        host.first = host.register(self.engine(version), names)
        return host


def exchange_of(count: int) -> list[Callable[[bytes], Sequence[bytes]]]:
    """Return an all-gather for each of `count` threads."""
    barrier = threading.Barrier(count)
    box: list[bytes] = [b""] * count

    def one(number: int) -> Callable[[bytes], Sequence[bytes]]:
        def exchange(mine: bytes) -> Sequence[bytes]:
            box[number] = mine
            barrier.wait(30)
            found = list(box)
            barrier.wait(30)
            return found

        return exchange

    return [one(number) for number in range(count)]


def together(*calls: Callable[[], object], timeout_s: float = 120.0) -> list[object]:
    """Run calls on threads of their own; return what each returned, or its error."""
    results: list[object] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            results[number] = calls[number]()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            results[number] = error

    workers = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(len(calls))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout_s)
        assert not worker.is_alive()
    return results


def ports_of(pid: int) -> list[str]:
    """Return the local addresses on which a process listens."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(link.readlink())
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append(fields[1])
    return found
