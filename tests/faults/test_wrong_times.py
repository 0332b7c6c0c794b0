"""Times to wait that are no times: refused at every door, where NaN waited for ever and infinity broke a system call."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from syncline import FilesystemStore, MemoryEngine, MemoryStore, Publisher, Receiver
from syncline.channels import (
    MemoryChannel,
    MemoryInlet,
    MemoryOutlet,
    SharedMemoryInlet,
    SharedMemoryOutlet,
)
from syncline.channels.lobby import join as join_lobby
from syncline.errors import ConfigError
from syncline.hosts import ParameterServer, Worker, join, meet_in_directory
from syncline.peers import TcpPeer
from syncline.stores import LaggingStore
from syncline.types import LONGEST_S, Read


def waits_for_engines(time_s: float) -> None:
    with tempfile.TemporaryDirectory(prefix="wait-") as folder:
        outlet = SharedMemoryOutlet(f"{folder}/path")
        try:
            outlet.wait(1, time_s)
        finally:
            outlet.close()


def with_peer(use: Callable[[TcpPeer, float], object]) -> Callable[[float], None]:
    def door(time_s: float) -> None:
        peer = TcpPeer()
        try:
            use(peer, time_s)
        finally:
            peer.close()

    return door


DOORS: dict[str, Callable[[float], object]] = {
    "outlet": lambda t: SharedMemoryOutlet("/nonexistent/path", timeout_s=t),
    "outlet.wait": waits_for_engines,
    "inlet": lambda t: SharedMemoryInlet("/nonexistent/path", timeout_s=t),
    "inlet in memory": lambda t: MemoryInlet(MemoryOutlet(), timeout_s=t),
    "lobby": lambda t: join_lobby("/nonexistent/path", "x", "name", t),
    "publisher, live": lambda t: Publisher(
        MemoryStore(), live=MemoryOutlet(), live_timeout_s=t
    ),
    "publisher, notify": lambda t: Publisher(MemoryStore(), notify_timeout_s=t),
    "receiver.wait": lambda t: Receiver(MemoryStore(), MemoryEngine()).wait(t),
    "filesystem": lambda t: FilesystemStore("/nonexistent", lock_timeout_s=t),
    "lagging": lambda t: LaggingStore(MemoryStore(), t),
    "meeting": lambda t: meet_in_directory(Path("/nonexistent"), "a", ["a"], timeout_s=t),
    "peer.read": with_peer(lambda peer, t: peer.read(b"", [Read("a", 0, "b", 0, 0)], t)),
    "join": with_peer(lambda peer, t: join(MemoryEngine(), [b""], [peer], timeout_s=t)),
    "join, patience": with_peer(
        lambda peer, t: join(MemoryEngine(), [b""], [peer], timeout_s=1.0, patience_s=t)
    ),
    "update": with_peer(
        lambda peer, t: ParameterServer([peer]).broadcast(
            [b""], {"w0": MemoryChannel.pair()[0]}, timeout_s=t
        )
    ),
    "worker": with_peer(lambda peer, t: Worker("w", MemoryEngine(), [peer], patience_s=t)),
    "worker.take": with_peer(
        lambda peer, t: Worker("w", MemoryEngine(), [peer]).take(MemoryChannel.pair()[0], t)
    ),
}  # fmt: skip


@pytest.mark.parametrize("time_s", [float("nan"), float("inf"), -1, LONGEST_S + 1, None, "5", True])
@pytest.mark.parametrize("door", sorted(DOORS))
def test_a_time_that_is_none_is_refused(door, time_s):
    with pytest.raises(ConfigError, match="seconds"):
        DOORS[door](time_s)


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 300, "\ud800"])
def test_a_name_that_a_trainer_would_refuse_is_refused_by_the_engine(name):
    """The engine was cut off without a word, and tried again until its timeout."""
    with pytest.raises(ConfigError, match="name must be"):
        SharedMemoryInlet("/nonexistent/path", name=name, timeout_s=60.0).channel()
