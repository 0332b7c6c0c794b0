"""What every kind of peer memory promises, over every kind there is; those not installed say so."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from syncline.abc import PeerMemory
from syncline.errors import (
    ConfigError,
    FormatError,
    MovedOnError,
    PeerLostError,
    TransportError,
    TransportTimeoutError,
    TransportUnavailableError,
)
from syncline.peers import MemoryPeer, SharedPeer, TcpPeer, open_peer
from syncline.peers.regions import MAX_READS, Regions
from syncline.types import Read


@dataclass(frozen=True)
class Kind:
    """How to make peers of one kind, and what is different about it."""

    make: Callable[[], PeerMemory]
    crosses_processes: bool = True
    says_why: bool = True
    revokes: bool = True


def kinds() -> dict[str, Kind]:
    network: dict[str, Regions] = {}
    return {
        "memory": Kind(lambda: MemoryPeer(network), crosses_processes=False),
        "shared": Kind(SharedPeer),
        "tcp": Kind(TcpPeer),
        "mooncake": Kind(lambda: open_peer("mooncake"), says_why=False),
        "nixl": Kind(lambda: open_peer("nixl"), revokes=False),
    }


@pytest.fixture(params=sorted(kinds()))
def kind(request) -> Kind:
    return kinds()[request.param]


@pytest.fixture
def make(kind) -> Iterator[Callable[[], PeerMemory]]:
    made = []

    def one() -> PeerMemory:
        try:
            made.append(kind.make())
        except TransportUnavailableError as error:
            pytest.skip(str(error))
        return made[-1]

    yield one
    for peer in made:
        peer.close()


def memory(peer: PeerMemory, nbytes: int, value: int | None = None) -> np.ndarray:
    array = peer.allocate(nbytes) if isinstance(peer, SharedPeer) else np.zeros(nbytes, np.uint8)
    array[:] = (
        (np.arange(nbytes) * 7 % 251 if value is None else value).astype(np.uint8)
        if value is None
        else value
    )
    return array


def test_reads_fill_places_and_nothing_else(make):
    here, there = make(), make()
    source, place = memory(there, 5000), memory(here, 5000, 9)
    there.register("source", source)
    here.register("place", place)
    reads = [Read("source", 100, "place", 0, 50), Read("source", 4990, "place", 4000, 10)]
    here.read(there.describe(), [*reads, Read("source", 0, "place", 77, 0)], 30.0)
    expected = np.full(5000, 9, np.uint8)
    expected[:50], expected[4000:4010] = source[100:150], source[4990:]
    assert place.tobytes() == expected.tobytes()


def test_more_reads_than_go_at_a_time(make):
    here, there = make(), make()
    count = 3 * MAX_READS + 5
    source, place = memory(there, 8 * count), memory(here, 8 * count, 0)
    there.register("source", source)
    here.register("place", place)
    order = np.random.default_rng(5).permutation(count)
    reads = [Read("source", 8 * int(i), "place", 8 * n, 8) for n, i in enumerate(order)]
    here.read(there.describe(), reads, 60.0)
    assert place.tobytes() == source.reshape(-1, 8)[order].tobytes()


def test_large_reads_behind_a_small_one_have_ended_too(make):
    """Regression: Mooncake tells the state of a batch's first read as that of the whole batch."""
    here, there = make(), make()
    large = 4 << 20
    source, place = memory(there, 8 + 6 * large), memory(here, 8 + 6 * large, 0)
    there.register("source", source)
    here.register("place", place)
    starts = [8 + n * large for n in range(6)]
    reads = [
        Read("source", 0, "place", 0, 8),
        *(Read("source", at, "place", at, large) for at in starts),
    ]
    for _ in range(3):
        place[:] = 0
        here.read(there.describe(), reads, 60.0)
        found = place.copy()
        assert np.array_equal(found, source)


def test_live_memory_is_read_as_it_is_then(make):
    here, there = make(), make()
    source, place = memory(there, 64, 1), memory(here, 64, 0)
    there.register("source", source)
    here.register("place", place)
    described = there.describe()
    for value in (1, 2):
        source[:] = value
        here.read(described, [Read("source", 0, "place", 0, 64)], 30.0)
        assert set(place.tolist()) == {value}


def test_a_taken_name_stays_with_the_first(make):
    here, there = make(), make()
    source, place = memory(there, 16, 3), memory(here, 16, 0)
    there.register("source", source)
    with pytest.raises(ConfigError, match="stays so"):
        there.register("source", memory(there, 32, 4))
    here.register("place", place)
    here.read(there.describe(), [Read("source", 0, "place", 0, 16)], 30.0)
    assert set(place.tolist()) == {3}


def test_only_flat_writable_bytes_are_registered(make):
    peer = make()
    for wrong in (np.zeros(4, np.uint16), np.zeros((2, 2), np.uint8), np.zeros(8, np.uint8)[::2]):
        with pytest.raises(ConfigError):
            peer.register("wrong", wrong)
    assert json.loads(peer.describe())["regions"] == {}


def test_a_place_that_is_not_ours_is_refused_before_anything_moves(make):
    here, there = make(), make()
    there.register("source", memory(there, 16, 3))
    place = memory(here, 16, 0)
    here.register("place", place)
    for wrong in (Read("source", 0, "nowhere", 0, 4), Read("source", 0, "place", 14, 4)):
        with pytest.raises(ConfigError):
            here.read(there.describe(), [Read("source", 0, "place", 0, 4), wrong], 30.0)
    assert not place.any()


def test_beyond_the_end_and_unknown_regions(make):
    here, there = make(), make()
    there.register("source", memory(there, 16, 3))
    place = memory(here, 64, 0)
    here.register("place", place)
    for wrong in (Read("source", 10, "place", 0, 7), Read("none", 0, "place", 0, 4)):
        with pytest.raises(MovedOnError):
            here.read(there.describe(), [wrong], 30.0)
    assert not place.any()


def test_a_region_that_was_taken_back(make, kind):
    here, there = make(), make()
    source = memory(there, 16, 3)
    there.register("source", source)
    here.register("place", memory(here, 16, 0))
    described = there.describe()
    here.read(described, [Read("source", 0, "place", 0, 16)], 30.0)
    there.unregister("source")
    there.unregister("source")
    if kind.revokes:
        with pytest.raises(MovedOnError if kind.says_why else (MovedOnError, PeerLostError)):
            here.read(described, [Read("source", 0, "place", 0, 16)], 30.0)
    there.register("source", source)
    here.read(there.describe(), [Read("source", 0, "place", 0, 16)], 30.0)


def test_something_else_is_no_description(make):
    here = make()
    here.register("place", memory(here, 16, 0))
    for wrong in (b"", b"{}", b"\x80\x04pickle"):
        with pytest.raises(FormatError):
            here.read(wrong, [Read("source", 0, "place", 0, 4)], 5.0)


def test_closing_twice_and_using_it_then(make):
    peer = make()
    peer.register("source", memory(peer, 16, 3))
    peer.close()
    peer.close()
    with pytest.raises(ConfigError):
        peer.register("again", np.zeros(4, np.uint8))


CHILD = textwrap.dedent(
    """
    import sys, time
    import numpy as np
    from syncline.peers import SharedPeer, open_peer
    peer = SharedPeer() if sys.argv[1] == "shared" else open_peer(sys.argv[1])
    memory = peer.allocate(1 << 20) if sys.argv[1] == "shared" else np.zeros(1 << 20, np.uint8)
    memory[:] = 5
    peer.register("source", memory)
    sys.stdout.buffer.write(b"\\n@" + peer.describe())
    sys.stdout.flush()
    time.sleep(600)
    """
)


@pytest.fixture
def child(kind, make):
    if not kind.crosses_processes:
        pytest.skip("peers of this kind are in one process")
    name = make().name
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, name],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    described = b""
    for line in process.stdout:
        if line.startswith(b"@"):
            described = line[1:]
            break
    yield process, described
    process.send_signal(signal.SIGCONT)
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_killed_process_is_named(child, make):
    process, described = child
    here = make()
    place = memory(here, 1 << 20, 0)
    here.register("place", place)
    read = Read("source", 0, "place", 0, 1 << 20)
    here.read(described, [read], 60.0)
    assert set(place.tolist()) == {5}
    process.kill()
    process.wait()
    for _ in range(2):
        with pytest.raises(PeerLostError, match=r"\w"):
            here.read(described, [read], 60.0)


def test_a_stopped_process_ends_by_the_deadline(child, make, kind):
    process, described = child
    here = make()
    place = memory(here, 1 << 20, 0)
    here.register("place", place)
    process.send_signal(signal.SIGSTOP)
    try:
        here.read(described, [Read("source", 0, "place", 0, 1 << 20)], 1.0)
    except (TransportTimeoutError, PeerLostError):
        # A caller that has the same elsewhere goes on there: it is the transport's error, not the caller's.
        with pytest.raises(TransportError):
            here.read(described, [Read("source", 0, "place", 0, 1 << 20)], 1.0)
        return
    assert set(place.tolist()) == {5}  # shared pages can be read of a process that stands still
