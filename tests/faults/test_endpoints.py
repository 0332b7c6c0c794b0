"""Listeners outlast a shortage of descriptors, and a forked child keeps nothing of its parent's alive."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from syncline import endpoints
from syncline.channels import SharedMemoryInlet, SharedMemoryOutlet
from syncline.errors import PeerLostError
from syncline.peers import TcpPeer
from syncline.types import Read

WAIT_S = 20.0


@pytest.fixture
def path() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="fork-")  # the path of a Unix socket is short
    yield f"{folder}/path"
    shutil.rmtree(folder)


@pytest.fixture
def shortage(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the next calls of accept fail as they do in a process without a free descriptor, and the like."""
    errors = [errno.EMFILE, errno.ENFILE, errno.ECONNABORTED, errno.ENOMEM]
    real = socket.socket.accept

    def accept(self: socket.socket) -> tuple[socket.socket, object]:
        if errors:
            number = errors.pop()
            raise OSError(number, os.strerror(number))
        return real(self)

    monkeypatch.setattr(socket.socket, "accept", accept)
    monkeypatch.setattr(endpoints, "_SHORTAGE_S", 0.001)
    return errors


def read_from(described: bytes) -> bytes:
    here, place = TcpPeer(), np.zeros(4, np.uint8)
    here.register("place", place)
    try:
        here.read(described, [Read("source", 0, "place", 0, 4)], WAIT_S)
    finally:
        here.close()
    return place.tobytes()


def test_a_shortage_of_descriptors_does_not_end_a_trainers_lobby(shortage, path):
    """The thread that accepts ended at the first error, and no engine could ever join again."""
    outlet = SharedMemoryOutlet(path)
    inlet = SharedMemoryInlet(path, name="e", timeout_s=WAIT_S)
    try:
        inlet.channel()
        outlet.wait(1, WAIT_S)
    finally:
        inlet.close()
        outlet.close()
    assert not shortage


def test_a_shortage_of_descriptors_does_not_end_a_peers_service(shortage):
    there = TcpPeer()
    there.register("source", np.arange(4, dtype=np.uint8))
    try:
        assert read_from(there.describe()) == bytes(range(4))
    finally:
        there.close()
    assert not shortage


def test_who_comes_when_no_thread_can_be_made_is_turned_away_and_the_next_is_answered(monkeypatch):
    listening = socket.create_server(("127.0.0.1", 0))
    answered: list[bytes] = []

    def answer(connected: socket.socket) -> None:
        with connected:
            answered.append(connected.recv(1))

    loop = threading.Thread(target=endpoints.answer_each, args=(listening, answer, "answer"))
    real, starts = threading.Thread.start, [1]

    def start(self: threading.Thread) -> None:
        if self.name == "answer" and starts:
            starts.pop()
            raise RuntimeError("can't start new thread")
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    loop.start()
    try:
        for expected in (b"", b"x"):
            with socket.create_connection(listening.getsockname(), WAIT_S) as sock:
                if expected:
                    sock.sendall(expected)
                assert sock.recv(1) == b""
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        loop.join(WAIT_S)
        listening.close()
    assert not loop.is_alive()
    assert answered == [b"x"]


PARENT = textwrap.dedent(
    """
    import os, sys, time
    import numpy as np
    from syncline.channels import SharedMemoryOutlet
    from syncline.peers import TcpPeer
    outlet, peer = SharedMemoryOutlet(sys.argv[1]), TcpPeer()
    peer.register("source", np.zeros(4, np.uint8))
    print(peer.describe().decode().strip(), flush=True)
    outlet.wait(1, 60)
    if os.fork() == 0:
        print("forked", flush=True)
        sys.stdin.read()  # lives until the test is over
        outlet.close()
        peer.close()
        os._exit(0)
    time.sleep(600)
    """
)


def test_a_forked_child_hides_nobodys_death_and_keeps_no_address(path):
    """A data loader's workers had its trainer's sockets open: engines waited for it, and its path stayed taken."""
    trainer = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", PARENT, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    inlet = SharedMemoryInlet(path, name="e", timeout_s=WAIT_S)
    try:
        described = trainer.stdout.readline().strip()
        channel = inlet.channel()
        assert trainer.stdout.readline() == b"forked\n"
        assert read_from(described) == bytes(4)
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
        with pytest.raises(PeerLostError):
            channel.receive(WAIT_S)
        with pytest.raises(PeerLostError):
            read_from(described)
        next_trainer = SharedMemoryOutlet(path)
        trainer.stdin.close()
        assert trainer.stdout.read() == b""  # the child has closed its copies, and ended
        assert Path(path).exists()
        next_trainer.close()
    finally:
        inlet.close()
        trainer.kill()
        trainer.wait()
        trainer.stdin.close()
        trainer.stdout.close()
    assert not Path(path).exists()


def test_shared_pages_from_before_a_fork_are_not_registered_in_the_child():
    code = textwrap.dedent(
        """
        import os
        from syncline.errors import ConfigError
        from syncline.peers import SharedPeer
        from syncline.types import Read
        here, there = SharedPeer(), SharedPeer()
        memory, place = there.allocate(4), here.allocate(4)
        there.register("source", memory)
        here.register("place", place)
        described = there.describe()
        child = os.fork()
        if child == 0:
            there.unregister("source")
            try:
                there.register("other", memory)
            except ConfigError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        here.read(described, [Read("source", 0, "place", 0, 4)], 1.0)
        """
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
