"""Chunks that are made in one thread and consumed in another: errors of either side come out once."""

from __future__ import annotations

from collections.abc import Iterator

import obstore
import obstore.store
import pytest

from syncline.stores import ObjectStore
from syncline.stores.pump import pumped


def test_chunks_may_use_the_same_store_while_they_are_made() -> None:
    """A publisher asks for HEAD after its last chunk; inside obstore's own loop that would be refused."""
    store = ObjectStore(obstore.store.MemoryStore(), one_request_bytes=10)
    store.put("HEAD.json", [b"mine"])

    def chunks() -> Iterator[bytes]:
        for _ in range(8):
            yield b"0123456789"
            assert store.get("HEAD.json") == b"mine"

    store.put("v1/part", chunks())
    assert store.get("v1/part") == b"0123456789" * 8


def test_a_consumer_that_fails_stops_the_chunks() -> None:
    made = []

    def chunks() -> Iterator[bytes]:
        for number in range(1000):
            made.append(number)
            yield b"x"

    def consume(items: Iterator[bytes]) -> None:
        next(items)
        raise ValueError("theirs")

    with pytest.raises(ValueError, match="theirs"):
        pumped(chunks(), consume)
    assert len(made) < 10


def test_chunks_that_fail_end_the_consumer() -> None:
    ends = []

    def chunks() -> Iterator[bytes]:
        yield b"x"
        raise OSError(5, "mine")

    def consume(items: Iterator[bytes]) -> None:
        try:
            list(items)
        except Exception as error:
            ends.append(type(error).__name__)
            raise

    with pytest.raises(OSError, match="mine"):
        pumped(chunks(), consume)
    assert ends == ["_Stopped"]
