"""Who may join, and what becomes of those who may not."""

from __future__ import annotations

import json
import os
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest

from syncline.channels import SharedMemoryInlet, SharedMemoryOutlet, buffers
from syncline.channels.lobby import Lobby, join
from syncline.channels.sockets import SocketChannel
from syncline.errors import (
    ConfigError,
    FormatError,
    PeerLostError,
    TransportError,
    TransportTimeoutError,
)

WAIT_S = 20.0


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="live-") as folder:
        yield Path(folder) / "path"


def test_only_this_user_may_connect_to_the_path(path):
    with closing(Lobby(str(path), "t", WAIT_S)):
        assert stat.S_IMODE(path.stat().st_mode) == stat.S_IRUSR | stat.S_IWUSR
    assert not path.exists()


def test_a_path_that_a_dead_trainer_left_is_taken_over(path):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with closing(Lobby(str(path), "t", WAIT_S)):
        pass


def test_a_path_in_use_is_refused_and_stays(path):
    with closing(Lobby(str(path), "t", WAIT_S)) as first:
        with pytest.raises(ConfigError, match="another trainer"):
            Lobby(str(path), "t", WAIT_S)
        with closing(join(str(path), "t", "a", WAIT_S)) as engine:
            first.wait(1, WAIT_S)
            engine.abort()


def test_a_file_that_is_no_socket_is_left_alone(path):
    path.write_text("precious")
    with pytest.raises(ConfigError, match="no socket"):
        Lobby(str(path), "t", WAIT_S)
    assert path.read_text() == "precious"


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("/tmp/" + "x" * 120, "shorter"),
        ("127.0.0.1:port", "host:port"),
        ("127.0.0.1:70000", "host:port"),
        (":7000", "host:port"),
        ("0.0.0.0:0", "token_env"),
        ("/nowhere/at/all/path", "cannot be listened on"),
    ],
)
def test_addresses_are_checked(address, words):
    with pytest.raises(ConfigError, match=words):
        Lobby(address, "t", WAIT_S)


def test_other_machines_need_the_token(monkeypatch):
    monkeypatch.setenv("RIGHT", "s3cret")
    monkeypatch.setenv("WRONG", "guess")
    with closing(Lobby("127.0.0.1:0", "t", WAIT_S, "RIGHT")) as lobby:
        with pytest.raises(ConfigError, match="not the trainer's"):
            join(lobby.address, "t", "a", WAIT_S, "WRONG")
        with pytest.raises(ConfigError, match="wants a token"):
            join(lobby.address, "t", "a", WAIT_S)
        with pytest.raises(ConfigError, match="expected a token"):
            join(lobby.address, "t", "a", WAIT_S, "NOT_SET")
        engine = join(lobby.address, "t", "a", WAIT_S, "RIGHT")
        lobby.wait(1, WAIT_S)
        engine.abort()
    with (
        closing(Lobby("127.0.0.1:0", "t", WAIT_S)) as lobby,
        pytest.raises(ConfigError, match="knows no token"),
    ):
        join(lobby.address, "t", "a", WAIT_S, "RIGHT")


def test_the_token_is_never_sent(monkeypatch):
    monkeypatch.setenv("TOKEN", "s3cret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(WAIT_S)
        port = server.getsockname()[1]
        with closing(Lobby("127.0.0.1:0", "t", WAIT_S, "TOKEN")) as lobby:
            real = join(lobby.address, "t", "a", WAIT_S, "TOKEN")
            real.abort()
        heard = bytearray()

        def listen() -> None:
            connected, _ = server.accept()
            with connected:
                channel = SocketChannel(connected.dup(), "an engine")
                channel.send(
                    json.dumps(
                        {
                            "format": "syncline-live",
                            "format_version": 1,
                            "transport": "t",
                            "nonce": "0" * 64,
                            "token": True,
                        }
                    ).encode()
                )
                heard.extend(channel.receive(WAIT_S))
                channel.send(b'{"refused":"enough"}')
                channel.abort()

        listening = threading.Thread(target=listen)
        listening.start()
        with pytest.raises(ConfigError, match="enough"):
            join(f"127.0.0.1:{port}", "t", "a", WAIT_S, "TOKEN")
        listening.join(WAIT_S)
    assert b"proof" in heard
    assert b"s3cret" not in heard


def test_another_transport_is_refused(path):
    with (
        closing(Lobby(str(path), "t", WAIT_S)),
        pytest.raises(ConfigError, match="transport is t, found 'u'"),
    ):
        join(str(path), "u", "a", WAIT_S)


def test_nobody_there_is_a_timeout(path):
    with pytest.raises(TransportTimeoutError, match="no trainer answered"):
        join(str(path), "t", "a", 0.2)


def test_engines_that_did_not_come_are_counted(path):
    with (
        closing(Lobby(str(path), "t", WAIT_S)) as lobby,
        pytest.raises(TransportTimeoutError, match="expected 2 engines .* found 0: none"),
    ):
        lobby.wait(2, 0.1)


@pytest.mark.parametrize(
    "bytes_sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        (1 << 62).to_bytes(8, "little"),
        (5).to_bytes(8, "little") + b"{{{{{",
        (2).to_bytes(8, "little") + b"{}",
        b"\x03",
    ],
)
def test_strangers_are_cut_off_and_engines_still_join(path, bytes_sent):
    with closing(Lobby(str(path), "t", WAIT_S)) as lobby:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(WAIT_S)
            stranger.connect(str(path))
            stranger.sendall(bytes_sent)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):
                pass  # until it is cut off
        engine = join(str(path), "t", "a", WAIT_S)
        lobby.wait(1, WAIT_S)
        assert list(lobby.members()) == ["a"]
        engine.abort()


def test_a_frame_beyond_the_limit_ends_the_channel():
    one, other = SocketChannel.pair()
    other.limit_bytes = 100
    one.send(bytes(101))
    with pytest.raises(PeerLostError, match="101 bytes, at most 100"):
        other.receive(WAIT_S)
    one.abort()
    other.abort()


def test_a_peer_that_takes_nothing_does_not_hold_the_sender_up():
    ours, theirs = socket.socketpair()
    channel = SocketChannel(ours, "the engine", timeout_s=0.2)
    with theirs, pytest.raises(TransportTimeoutError, match="took nothing"):
        channel.send(bytes(1 << 24))
    channel.abort()


@pytest.mark.skipif(
    not Path("/proc/self/fd").is_dir(), reason="counts open files where Linux shows them"
)
def test_open_files_that_nobody_takes_are_closed():
    one, other = SocketChannel.pair()
    with tempfile.NamedTemporaryFile() as file:
        for _ in range(3):
            one.send(b"file", [file.fileno()])
        assert other.receive(WAIT_S) == b"file"
        for fd in other.take_fds():
            os.close(fd)
        one.abort()
        other.abort()
        deadline_s = time.monotonic() + WAIT_S
        while _times_open(file.name) > 1:
            assert time.monotonic() < deadline_s
            time.sleep(0.001)


def _times_open(path: str) -> int:
    count = 0
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that lists
            count += str(fd.readlink()) == path
    return count


def test_buffers_that_could_be_shrunk_are_refused(path, monkeypatch):
    def unsealed(nbytes: int) -> int:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
        os.ftruncate(fd, nbytes)
        return fd

    monkeypatch.setattr(buffers, "anonymous_file", unsealed)
    with closing(SharedMemoryOutlet(str(path))) as outlet:
        inlet = SharedMemoryInlet(str(path), name="a", timeout_s=WAIT_S)
        inlet.channel()
        outlet.wait(1, WAIT_S)
        with ThreadPoolExecutor() as pool:
            taking = pool.submit(lambda: next(inlet.buckets([10])))
            with pytest.raises(TransportError), outlet.round(["a"], [10], 1.0):
                raise AssertionError("the round began")
            with pytest.raises(FormatError, match="nobody can shrink"):
                taking.result(WAIT_S)
        inlet.close()


def test_the_same_buffers_serve_the_same_members_again(path, monkeypatch):
    """Nobody noted for whom they were made, so every round made new ones."""
    made = []
    plain = SharedMemoryOutlet._allocated
    monkeypatch.setattr(
        SharedMemoryOutlet, "_allocated", lambda self, n: made.append(n) or plain(self, n)
    )
    outlet, inlet = SharedMemoryOutlet(str(path)), SharedMemoryInlet(str(path), timeout_s=20.0)
    try:
        inlet.channel()
        outlet.wait(1, 20.0)
        for byte in range(4):
            with ThreadPoolExecutor() as pool:
                found = pool.submit(lambda: [bytes(each) for each in inlet.buckets([5] * 3)])
                with outlet.round(list(outlet.members()), [5] * 3, 20.0) as send:
                    for _ in range(3):
                        send([(0, np.full(5, byte, np.uint8))])
                assert found.result(20.0) == [bytes([byte] * 5)] * 3
    finally:
        inlet.close()
        outlet.close()
    assert len(made) == 1
