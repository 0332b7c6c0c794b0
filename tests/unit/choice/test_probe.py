"""Probes: bounded bytes, by a deadline, nothing left behind; speeds that a throttled link really has."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

import pytest

from syncline import MemoryChannel, MemoryStore
from syncline.abc import Buffer
from syncline.choice import answer_probe, probe_channel, probe_store
from syncline.choice.probe import PROBE_BYTES
from syncline.errors import ConfigError, FormatError, StoreError, TransportTimeoutError


class Counting(MemoryStore):
    """Counts, and takes as long as a link of a given speed."""

    def __init__(self, bytes_per_s: float) -> None:
        super().__init__()
        self.bytes_per_s = bytes_per_s
        self.put_bytes = 0

    def put(self, key: str, chunks: Iterable[Buffer]) -> None:
        data = b"".join(bytes(chunk) for chunk in chunks)
        self.put_bytes += len(data)
        time.sleep(len(data) / self.bytes_per_s)
        super().put(key, [data])


def test_a_probe_is_bounded_and_leaves_nothing() -> None:
    store = Counting(1e12)
    link = probe_store(store)
    assert store.put_bytes < 1.2 * PROBE_BYTES
    assert store.list() == []
    assert link.up_bytes_per_s > 0
    assert link.down_bytes_per_s > 0
    assert "measured" in link.origin


def test_a_slow_store_is_asked_for_little() -> None:
    """At 1 MB/s the first object takes a tenth of the deadline, and the larger ones stay away."""
    store = Counting(1e6)
    link = probe_store(store, timeout_s=0.5)
    assert store.put_bytes == PROBE_BYTES // 64
    assert link.up_bytes_per_s <= 1.0e6
    assert store.list() == []


def test_a_store_that_hangs_is_given_up_by_the_deadline() -> None:
    released = threading.Event()

    class Hanging(MemoryStore):
        def put(self, key: str, chunks: Iterable[Buffer]) -> None:
            released.wait()
            super().put(key, chunks)

    with pytest.raises(TransportTimeoutError, match=r"was not over in 0\.05 s"):
        probe_store(Hanging(), timeout_s=0.05)
    released.set()


def test_a_store_that_fails_says_so_and_keeps_nothing() -> None:
    class Failing(MemoryStore):
        def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
            raise StoreError("it broke")

    store = Failing()
    with pytest.raises(StoreError, match="it broke"):
        probe_store(store)
    assert store.list() == []


def test_a_channel_is_measured_in_both_directions() -> None:
    here, there = MemoryChannel.pair()
    answering = threading.Thread(target=answer_probe, args=(there,))
    answering.start()
    link = probe_channel(here)
    answering.join()
    assert link.up_bytes_per_s > 0
    assert link.down_bytes_per_s > 0


def test_nobody_is_made_to_send_more_than_a_probe_needs() -> None:
    here, there = MemoryChannel.pair()
    here.send(b"r" + (1 << 40).to_bytes(8, "little"))
    with pytest.raises(FormatError, match="to return up to"):
        answer_probe(there)
    here.send(b"what else")
    with pytest.raises(FormatError, match="expected to send"):
        answer_probe(there)


def test_a_channel_that_is_silent_is_given_up() -> None:
    here, _ = MemoryChannel.pair()
    with pytest.raises(TransportTimeoutError):
        probe_channel(here, timeout_s=0.05)


def test_a_probe_has_bytes() -> None:
    with pytest.raises(ConfigError, match="at least 1 byte"):
        probe_store(MemoryStore(), nbytes=0)
