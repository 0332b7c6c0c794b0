"""The two processes of `bench_transports`: one has the weights, the other copies them to memory of its own."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from syncline.abc import Inlet
from syncline.channels import (
    CollectiveInlet,
    CollectiveOutlet,
    SharedMemoryInlet,
    SharedMemoryOutlet,
)
from syncline.format.digest import sha256
from syncline.peers import TcpPeer
from syncline.stores import FilesystemStore
from syncline.types import Bits, Read

T = TypeVar("T")

NAMES = ("shared-memory", "collective", "store", "peers")

_WAIT_S = 120.0
_KEY = "weights"
_LOCAL = "127.0.0.1"


class Trainer(Protocol):
    """The side that has the weights; both acts return the seconds that passed on it."""

    def move(self, bucket_bytes: int) -> float:
        """Move the weights over the transport."""

    def bare(self, bucket_bytes: int) -> float:
        """Move them by the bare loop."""

    def close(self) -> None:
        """Give back what was opened."""


def tell(to: Connection, said: Any) -> None:
    """Send plain values to the other process."""
    to.send_bytes(json.dumps(said).encode())


def hear(other: Connection) -> Any:
    """Return the next values from there."""
    return json.loads(other.recv_bytes())


def held() -> int:
    """Return the bytes of memory that this process has now; 0 where nobody counts."""
    return _status("VmRSS")


@contextmanager
def peak(before: int) -> Iterator[list[int]]:
    """Yield a list that holds, afterwards, how many bytes more than `before` this process had at most."""
    found = [0]
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # lets the kernel count its peak anew
    yield found
    found[0] = max(0, _status("VmHWM") - before)


def _status(name: str) -> int:
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return 1024 * int(line.split()[1])
    return 0


def trainer(name: str, bits: Bits, far: Connection, folder: Path) -> Trainer:
    """Open one side of a transport, and tell the other one how to reach it."""
    made: dict[str, Callable[[Bits, Connection, Path], Trainer]] = {
        "shared-memory": _Shared,
        "collective": _Collective,
        "store": _Store,
        "peers": _Peers,
    }
    return made[name](bits, far, folder)


def engine(name: str, near: Connection) -> None:
    """Be the other process until the first one closes the connection."""
    setup = hear(near)
    own = np.zeros(setup["nbytes"], np.uint8)
    acts: dict[str, Callable[[dict[str, Any], Bits, Connection], _Acts]] = {
        "shared-memory": _shared_engine,
        "collective": _collective_engine,
        "store": _store_engine,
        "peers": _peer_engine,
    }
    own[:] = 1  # so that all of it is there before it is counted
    found = acts[name](setup, own, near)
    before = held()
    with suppress(EOFError):
        while True:
            what, bucket_bytes = hear(near)
            own[:] = 0
            with peak(before) as grown:
                seconds = found[what](bucket_bytes)
            is_same = what not in setup["proved"] or sha256(own.data) == setup["sha256"]
            tell(near, [is_same, seconds, grown[0]])


_Acts = dict[str, Callable[[int], float]]


def _cuts(nbytes: int, bucket_bytes: int) -> list[slice]:
    return [
        slice(start, min(start + bucket_bytes, nbytes)) for start in range(0, nbytes, bucket_bytes)
    ]


def _setup(bits: Bits, proved: tuple[str, ...] = ("move", "bare"), **more: Any) -> dict[str, Any]:
    """Return what the other process must know; `proved`: after which acts it has the weights."""
    return {"nbytes": bits.nbytes, "sha256": sha256(bits.data), "proved": proved, **more}


def _timed(call: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def _timed_each(call: Callable[[T], object], items: Iterable[T]) -> float:
    start_s = time.perf_counter()
    for item in items:
        call(item)
    return time.perf_counter() - start_s


class _Live:
    """A trainer on a live path."""

    def __init__(self, bits: Bits, outlet: SharedMemoryOutlet | CollectiveOutlet) -> None:
        self.bits = bits
        self.outlet = outlet

    def move(self, bucket_bytes: int) -> float:
        cuts = _cuts(self.bits.nbytes, bucket_bytes)

        def act() -> None:
            sizes = [cut.stop - cut.start for cut in cuts]
            with self.outlet.round(["engine"], sizes, _WAIT_S) as send:
                for cut in cuts:
                    send([(0, self.bits[cut])])

        return _timed(act)

    def close(self) -> None:
        self.outlet.close()


class _Shared(_Live):
    def __init__(self, bits: Bits, far: Connection, folder: Path) -> None:
        super().__init__(bits, SharedMemoryOutlet(str(folder / "path")))
        self._copy = bits.copy()
        tell(far, _setup(bits, ("move",), address=self.outlet.address))
        self.outlet.wait(1, _WAIT_S)

    def bare(self, bucket_bytes: int) -> float:
        cuts = _cuts(self.bits.nbytes, bucket_bytes)
        return _timed_each(lambda cut: np.copyto(self._copy[cut], self.bits[cut]), cuts)


class _Collective(_Live):
    def __init__(self, bits: Bits, far: Connection, folder: Path) -> None:
        super().__init__(bits, CollectiveOutlet(f"{_LOCAL}:0"))
        with socket.create_server((_LOCAL, 0)) as free:
            port = free.getsockname()[1]
        tell(far, _setup(bits, address=self.outlet.address, port=port))
        self._group = _Group(port, 0)
        self.outlet.wait(1, _WAIT_S)

    def bare(self, bucket_bytes: int) -> float:
        return self._group.broadcast(self.bits, bucket_bytes)

    def close(self) -> None:
        self._group.close()
        super().close()


class _Group:
    """Both processes as ranks of a plain group."""

    def __init__(self, port: int, rank: int) -> None:
        import torch

        self._torch, self._dist = torch, torch.distributed
        where = f"tcp://{_LOCAL}:{port}"
        self._dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2)

    def broadcast(self, bits: Bits, bucket_bytes: int) -> float:
        whole = self._torch.from_numpy(bits)
        cuts = _cuts(bits.nbytes, bucket_bytes)
        return _timed_each(lambda cut: self._dist.broadcast(whole[cut], 0), cuts)

    def close(self) -> None:
        self._dist.destroy_process_group()


class _Store:
    def __init__(self, bits: Bits, far: Connection, folder: Path) -> None:
        self._bits, self._far = bits, far
        self._store = FilesystemStore(folder / "store")
        self._path = folder / "bare"
        tell(far, _setup(bits, store=str(folder / "store"), path=str(self._path)))

    def move(self, bucket_bytes: int) -> float:
        cuts = _cuts(self._bits.nbytes, bucket_bytes)
        self._store.delete(_KEY)
        seconds = _timed(lambda: self._store.put(_KEY, (self._bits[cut].data for cut in cuts)))
        tell(self._far, "there")
        return seconds

    def bare(self, bucket_bytes: int) -> float:
        def act() -> None:
            with self._path.open("wb", buffering=0) as file:
                for cut in _cuts(self._bits.nbytes, bucket_bytes):
                    file.write(self._bits[cut].data)
                os.fsync(file.fileno())

        seconds = _timed(act)
        tell(self._far, "there")
        return seconds

    def close(self) -> None:
        """Nothing is open; the folder goes with its owner."""


class _Peers:
    def __init__(self, bits: Bits, far: Connection, folder: Path) -> None:
        self._bits = bits
        self._peer = TcpPeer(_LOCAL)
        self._peer.register(_KEY, bits)
        self._server = socket.create_server((_LOCAL, 0))
        described = self._peer.describe().hex()
        tell(far, _setup(bits, peer=described, port=self._server.getsockname()[1]))

    def move(self, bucket_bytes: int) -> float:
        return 0.0  # the other side reads, and says how long it took

    def bare(self, bucket_bytes: int) -> float:
        connected, _ = self._server.accept()
        with connected:
            for cut in _cuts(self._bits.nbytes, bucket_bytes):
                connected.sendall(self._bits[cut].data)
        return 0.0

    def close(self) -> None:
        self._server.close()
        self._peer.close()


def _taking(inlet: Inlet, own: Bits) -> Callable[[int], float]:
    def take(bucket_bytes: int) -> float:
        cuts = _cuts(own.nbytes, bucket_bytes)
        sizes = [cut.stop - cut.start for cut in cuts]
        for cut, bucket in zip(cuts, inlet.buckets(sizes), strict=True):
            np.copyto(own[cut], bucket)
        return 0.0  # the trainer's round ends with this side's last copy

    return take


def _shared_engine(setup: dict[str, Any], own: Bits, _near: Connection) -> _Acts:
    inlet = SharedMemoryInlet(setup["address"], name="engine", timeout_s=_WAIT_S)
    inlet.channel()
    return {"move": _taking(inlet, own), "bare": lambda _: 0.0}


def _collective_engine(setup: dict[str, Any], own: Bits, _near: Connection) -> _Acts:
    inlet = CollectiveInlet(setup["address"], name="engine", timeout_s=_WAIT_S)
    group = _Group(setup["port"], 1)
    inlet.channel()

    def bare(bucket_bytes: int) -> float:
        group.broadcast(own, bucket_bytes)
        return 0.0

    return {"move": _taking(inlet, own), "bare": bare}


def _store_engine(setup: dict[str, Any], own: Bits, near: Connection) -> _Acts:
    store = FilesystemStore(setup["store"])

    def move(bucket_bytes: int) -> float:
        hear(near)

        def act() -> None:
            for cut in _cuts(own.nbytes, bucket_bytes):
                own[cut] = np.frombuffer(store.get(_KEY, cut.start, cut.stop), np.uint8)

        return _timed(act)

    def bare(bucket_bytes: int) -> float:
        hear(near)

        def act() -> None:
            with Path(setup["path"]).open("rb", buffering=0) as file:
                for cut in _cuts(own.nbytes, bucket_bytes):
                    file.readinto(own[cut].data)

        return _timed(act)

    return {"move": move, "bare": bare}


def _peer_engine(setup: dict[str, Any], own: Bits, _near: Connection) -> _Acts:
    peer = TcpPeer(_LOCAL)
    peer.register(_KEY, own)
    described = bytes.fromhex(setup["peer"])

    def move(bucket_bytes: int) -> float:
        cuts = _cuts(own.nbytes, bucket_bytes)
        reads = [Read(_KEY, cut.start, _KEY, cut.start, cut.stop - cut.start) for cut in cuts]
        return _timed_each(lambda read: peer.read(described, [read], _WAIT_S), reads)

    def bare(bucket_bytes: int) -> float:
        with socket.create_connection((_LOCAL, setup["port"])) as connected:

            def act() -> None:
                done = 0
                while done < own.nbytes:
                    done += connected.recv_into(own[done : done + bucket_bytes].data)

            return _timed(act)

    return {"move": move, "bare": bare}
