"""The first part of the next version, asked for before it is known: what it may hold in memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from syncline import MemoryEngine, MemoryStore, Publisher, Receiver
from syncline.format import names
from syncline.stores.passing import PassingStore
from syncline.sync import early
from syncline.sync.early import EarlyPart
from syncline.version import HeldVersion

PIECE_BYTES = 1000


class Remote(PassingStore):
    """A store far away, that hands out pieces of 1000 bytes and notes how much it was asked for in one."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.is_remote = True
        self.most_bytes = 0

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        found = super().get(key, start, stop)
        self.most_bytes = max(self.most_bytes, len(found))
        return found

    def pieces(self, key: str, size_bytes: int) -> Iterator[bytes]:
        for start in range(0, size_bytes, PIECE_BYTES):
            piece = self.get(key, start, min(start + PIECE_BYTES, size_bytes))
            if not piece:
                return
            yield piece


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Remote:
    monkeypatch.setenv("SYNCLINE_THREADS", "4")
    monkeypatch.setattr(early, "_MORE_BYTES", PIECE_BYTES)
    return Remote(MemoryStore())


@pytest.fixture
def held(store: Remote) -> HeldVersion:
    """Return a delta with one part, from which a receiver goes on."""
    publisher, engine = Publisher(store), MemoryEngine()
    for value in range(2):
        publisher.publish({"w": np.full(1000, value, np.float32)})
        Receiver(store, engine).sync()
    return engine.held()


@pytest.mark.parametrize("more_bytes", [-1, 0, 1, 100 * PIECE_BYTES])
def test_the_rest_of_a_larger_first_part_never_comes_in_one_piece(
    store: Remote, held: HeldVersion, more_bytes: int
) -> None:
    limit_bytes = 2 * held.manifest.parts[0].size_bytes + PIECE_BYTES
    content = bytes(number % 251 for number in range(limit_bytes + more_bytes))
    key = names.key(held.version + 1, names.part_name(0, 1))
    store.put(key, [content])
    store.most_bytes = 0
    with EarlyPart(store, held) as ahead:
        assert b"".join(ahead.pieces(key, len(content))) == content
    assert 0 < store.most_bytes <= PIECE_BYTES
