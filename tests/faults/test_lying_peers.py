"""A peer that describes itself and lies: an error of ours, no wait, no crash; and what looks alike but is not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from syncline.abc import PeerMemory
from syncline.errors import MovedOnError, SynclineError, TransportUnavailableError
from syncline.peers import MemoryPeer, SharedPeer, TcpPeer, open_peer
from syncline.types import Read

NETWORK: dict = {}
KINDS: dict[str, Callable[[], PeerMemory]] = {
    "memory": lambda: MemoryPeer(NETWORK),
    "shared": SharedPeer,
    "tcp": TcpPeer,
    "mooncake": lambda: open_peer("mooncake"),
    "nixl": lambda: open_peer("nixl"),
}
TEXTS = [
    "",
    "0",
    "-1",
    "70000",
    "9" * 20,
    "nope",
    "\u0663",
    "a\0b",
    "x" * 300,
    "z" * 32,
    "[",
    "1e5",
]
NUMBERS = [0, 1, 3, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1]


def registered(peer: PeerMemory, region: str) -> np.ndarray:
    memory = peer.allocate(8) if isinstance(peer, SharedPeer) else np.zeros(8, np.uint8)
    peer.register(region, memory)
    return memory


@pytest.fixture(params=sorted(KINDS))
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[PeerMemory, PeerMemory]]:
    try:
        here, there = KINDS[request.param](), KINDS[request.param]()
    except TransportUnavailableError as error:
        pytest.skip(str(error))
    registered(here, "place")
    registered(there, "source")
    yield here, there
    here.close()
    there.close()


def attempt(here: PeerMemory, described: dict) -> None:
    """Read; an error must be one of ours."""
    try:
        here.read(json.dumps(described).encode(), [Read("source", 0, "place", 0, 8)], 2.0)
    except SynclineError as error:
        assert str(error)


def test_any_text_in_a_description_is_refused_in_our_words(pair):
    here, there = pair
    if here.name in ("mooncake", "nixl"):
        pytest.skip("their own names and metadata are theirs to check")
    for key in json.loads(there.describe())["fields"]:
        for text in TEXTS:
            described = json.loads(there.describe())
            described["fields"][key] = text
            attempt(here, described)


def test_any_number_in_a_description_is_refused_in_our_words(pair):
    here, there = pair
    if here.name in ("mooncake", "nixl"):
        pytest.skip("they read wherever they are told; what comes is held against the version")
    for column in range(len(json.loads(there.describe())["regions"]["source"])):
        for number in NUMBERS:
            described = json.loads(there.describe())
            described["regions"]["source"][column] = number
            attempt(here, described)


@pytest.fixture
def shared() -> Iterator[tuple[SharedPeer, dict]]:
    here, there = SharedPeer(), SharedPeer()
    registered(here, "place")
    registered(there, "source")
    yield here, json.loads(there.describe())
    here.close()
    there.close()


def described_as(described: dict, fd: int) -> dict:
    size, _, _, offset, number = described["regions"]["source"]
    described["regions"]["source"] = [size, fd, os.fstat(fd).st_ino, offset, number]
    return described


def read_from(here, description):
    here.read(json.dumps(description).encode(), [Read("source", 0, "place", 0, 8)], 2.0)


def test_pages_that_could_be_shrunk_are_not_mapped(shared):
    """Whoever reads pages that are gone is killed by the system."""
    here, described = shared
    fd = os.memfd_create("loose")
    os.ftruncate(fd, 1 << 16)
    try:
        with pytest.raises(MovedOnError):
            read_from(here, described_as(described, fd))
    finally:
        os.close(fd)


def test_a_pipe_that_is_called_memory_is_not_waited_for(shared, tmp_path):
    here, described = shared
    os.mkfifo(tmp_path / "pipe")
    fd = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(SynclineError):
            read_from(here, described_as(described, fd))
    finally:
        os.close(fd)


ELSEWHERE = textwrap.dedent(
    """
    import sys
    import numpy as np
    from syncline import MemoryEngine
    from syncline.hosts import join
    from syncline.peers import SharedPeer, TcpPeer
    engine, memories = MemoryEngine(), [SharedPeer(), TcpPeer()]
    join(engine, [sys.stdin.buffer.read()], memories, timeout_s=30.0)
    sys.stdout.buffer.write(engine.view("w").tobytes())
    """
)


def test_a_container_of_the_same_machine_is_read_over_the_network():
    """Processes in another PID namespace cannot be found; they were taken for lost instead of read over TCP."""
    from hosting import Run
    from syncline.hosts import VersionHost

    inside = ["unshare", "--pid", "--fork", "--mount-proc"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*inside, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("no PID namespace can be made here")
    run, weights = Run(), np.arange(1000, dtype=np.float32)
    run.publisher.publish({"w": weights})
    host = VersionHost("h0", [SharedPeer(), TcpPeer()])
    try:
        offer = host.register(run.engine(1)).dump()
        done = subprocess.run(
            [*inside, sys.executable, "-c", ELSEWHERE],
            input=offer,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            timeout=60,
            check=False,
        )
    finally:
        host.close()
    assert done.stdout == weights.tobytes(), done.stderr.decode()
