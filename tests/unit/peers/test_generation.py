"""The header beside memory, and reads that look at it."""

from __future__ import annotations

import numpy as np
import pytest

from syncline.errors import ConfigError, MovedOnError, TransportTimeoutError
from syncline.peers import MemoryPeer
from syncline.peers.generation import HEADER_BYTES, Checked, Header
from syncline.types import Read


def bytes_of(nbytes: int) -> np.ndarray:
    return np.zeros(nbytes, np.uint8)


@pytest.fixture
def sides():
    network = {}
    here, there = MemoryPeer(network), MemoryPeer(network)
    header, data = Header(bytes_of(HEADER_BYTES)), bytes_of(100)
    there.register("header", header.memory)
    there.register("data", data)
    checked = Checked(here, bytes_of, "look")
    here.register("place", bytes_of(100))
    return checked, there, header, data


READ = Read("data", 0, "place", 0, 100)


def test_generations_only_rise_and_are_odd_while_things_change():
    header = Header(bytes_of(HEADER_BYTES))
    seen = [header.generation]
    for _ in range(3):
        header.begin()
        header.begin()
        seen.append(header.generation)
        header.settle()
        seen.append(header.generation)
    assert seen == [0, 1, 2, 3, 4, 5, 6]
    header.settle()
    assert header.generation == 8
    assert Header(header.memory).generation == 8
    with pytest.raises(ConfigError):
        Header(bytes_of(8))


def test_a_change_between_offer_and_look_is_noticed(sides):
    checked, there, header, data = sides
    header.settle()
    offered = header.generation
    checked.read(there.describe(), "header", offered, [READ], 5.0)
    header.begin()
    data[:] = 1
    with pytest.raises(MovedOnError, match="generation"):
        checked.read(there.describe(), "header", offered, [READ], 5.0)
    header.settle()
    with pytest.raises(MovedOnError, match="generation"):
        checked.read(there.describe(), "header", offered, [READ], 5.0)
    checked.read(there.describe(), "header", header.generation, [READ], 5.0)


def test_something_else_where_the_header_was(sides):
    checked, there, header, _ = sides
    header.memory[:] = 7
    with pytest.raises(MovedOnError, match="no header"):
        checked.state(there.describe(), "header", 5.0)


def test_tags_and_counts_are_seen_and_waiting_ends(sides):
    checked, there, header, _ = sides
    header.tag(1, 6)
    header.drain(3)
    state = checked.state(there.describe(), "header", 5.0)
    assert (state.tags[:3], state.drained) == ((0, 7, 0), 3)
    assert checked.wait(there.describe(), "header", lambda s: s.drained == 3, 5.0) == state
    with pytest.raises(TransportTimeoutError):
        checked.wait(there.describe(), "header", lambda s: s.drained == 4, 0.05)
    header.tag(1, None)
    assert checked.state(there.describe(), "header", 5.0).tags[1] == 0
