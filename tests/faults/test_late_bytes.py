"""A transport says that all is there before it is: the byte that comes late is noticed, or right, never written wrong."""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from syncline import MemoryEngine, MemoryStore, Publisher, Receiver, kernels
from syncline.channels import MemoryInlet, MemoryOutlet
from syncline.errors import VerifyError
from syncline.hosts import VersionHost, join
from syncline.peers import TcpPeer

WAIT_S = 20.0
OLD = {"w": np.arange(1, 5001, dtype=np.uint32)}
NEW = {"w": np.where(np.arange(5000) % 500 == 0, np.uint32(7), OLD["w"])}


class Late:
    """Holds one byte of every place back until somebody looks at the bits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, comes: bool) -> None:
        self.waiting: list[tuple[np.ndarray, np.ndarray]] = []
        self.comes = comes
        self.looks = 0
        real = kernels.fingerprint

        def fingerprint(bits: Any, *rest: Any) -> Any:
            self.looks += bool(self.waiting)
            self.arrive()
            return real(bits, *rest)

        monkeypatch.setattr(kernels, "fingerprint", fingerprint)
        monkeypatch.setenv("SYNCLINE_THREADS", "1")

    def hold(self, place: np.ndarray) -> None:
        self.waiting.append((place, place.copy()))
        place[place.size // 2] ^= 0xFF

    def arrive(self) -> None:
        for place, whole in self.waiting:
            if self.comes:
                place[:] = whole
        self.waiting.clear()


def joined(late: Late) -> Callable[[MemoryEngine], None]:
    """Return what brings an engine to NEW from the memory of a host."""

    class LatePeer(TcpPeer):
        def read(self, peer: bytes, reads: Any, timeout_s: float) -> None:
            super().read(peer, reads, timeout_s)
            for read in reads:
                if ".data" in read.region:
                    late.hold(self._regions.places([read])[0])

    def bring(engine: MemoryEngine) -> None:
        store, there = MemoryStore(), MemoryEngine()
        publisher = Publisher(store)
        publisher.publish(OLD)
        Receiver(store, engine).sync()
        publisher.publish(NEW)
        Receiver(store, there).sync()
        host, peer = VersionHost("h0", [TcpPeer()]), LatePeer()
        try:
            join(engine, [host.register(there).dump()], [peer], timeout_s=WAIT_S)
        finally:
            peer.close()
            host.close()

    return bring


def delivered(late: Late) -> Callable[[MemoryEngine], None]:
    """Return what brings an engine to NEW over a live path, in full."""

    class LateInlet(MemoryInlet):
        is_late = False

        def buckets(self, sizes: Any) -> Generator[np.ndarray, None, None]:
            for bucket in super().buckets(sizes):
                mine = bucket.copy()
                if self.is_late:
                    late.hold(mine)
                yield mine

    def bring(engine: MemoryEngine) -> None:
        outlet = MemoryOutlet()
        inlet = LateInlet(outlet, name="e", timeout_s=WAIT_S)
        inlet.channel()
        publisher = Publisher(MemoryStore(), live=outlet, live_kind="full", live_timeout_s=WAIT_S)
        try:
            with ThreadPoolExecutor() as pool:
                for weights in (OLD, NEW):
                    taking = pool.submit(Receiver(inlet, engine).sync)
                    publisher.publish(weights)
                    taking.result(WAIT_S)
                    inlet.is_late = True
        finally:
            inlet.close()
            outlet.close()

    return bring


@pytest.mark.parametrize("way", [joined, delivered])
def test_a_byte_that_comes_while_the_bits_are_proved_is_not_missed(way, monkeypatch):
    """The change was found before the bits were proved, and the late byte was then committed wrong."""
    late, engine = Late(monkeypatch, comes=True), MemoryEngine()
    way(late)(engine)
    assert late.looks
    assert engine.view("w").tobytes() == NEW["w"].tobytes()


@pytest.mark.parametrize("way", [joined, delivered])
def test_a_byte_that_never_comes_is_refused(way, monkeypatch):
    late, engine = Late(monkeypatch, comes=False), MemoryEngine()
    with pytest.raises(VerifyError, match="'w'"):
        way(late)(engine)
    assert late.looks
    assert engine.view("w").tobytes() == OLD["w"].tobytes()
