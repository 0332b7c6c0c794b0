"""Servers that answer for ever, too much, or nothing that is HTTP: every call ends by its deadline, with an error of ours.

Nothing here is timed: what a server would do for ever is over when the deadline is, or the guard finds the call alive.
"""

from __future__ import annotations

import itertools
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from syncline.errors import (
    ConfigError,
    PeerLostError,
    TransportError,
    TransportTimeoutError,
)
from syncline.hosts.checkpoint_engine import CheckpointEngine
from syncline.hotload.http import Endpoint

DEADLINE_S = 0.5
GUARD_S = 30.0
LIMIT_BYTES = 1 << 16

HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
Pieces = Iterable[bytes]


def _for_ever(piece: bytes) -> Pieces:
    return itertools.repeat(piece)


DRIPS: dict[str, tuple[Callable[[], Pieces], str]] = {
    "nothing": (lambda: _for_ever(b""), "status line"),
    "a status line": (lambda: itertools.chain([b"HTTP/1.1 200 "], _for_ever(b"O")), "status line"),
    "100 Continue": (lambda: _for_ever(b"HTTP/1.1 100 Continue\r\n\r\n"), "status line"),
    "a header": (lambda: itertools.chain([HEAD, b"X: "], _for_ever(b"x")), "headers"),
    "headers": (lambda: itertools.chain([HEAD], _for_ever(b"X")), "headers"),
    "headers of 100 Continue": (
        lambda: itertools.chain([b"HTTP/1.1 100 Continue\r\n"], _for_ever(b"X: y\r\n")),
        "headers",
    ),
    "a body with a length": (
        lambda: itertools.chain([HEAD + b"Content-Length: 60000\r\n\r\n"], _for_ever(b"x")),
        "end of the body",
    ),
    "a body without a length": (
        lambda: itertools.chain([HEAD + b"\r\n"], _for_ever(b"x")),
        "end of the body",
    ),
    "chunks": (lambda: itertools.chain([CHUNKED], _for_ever(b"1\r\nx\r\n")), "end of the body"),
    "the size of a chunk": (
        lambda: itertools.chain([CHUNKED, b"1;"], _for_ever(b"x")),
        "end of the body",
    ),
    "trailers": (
        lambda: itertools.chain([CHUNKED, b"0\r\n"], _for_ever(b"X: y\r\n")),
        "end of the body",
    ),
    "a refusal": (
        lambda: itertools.chain([b"HTTP/1.1 500 No\r\n\r\n"], _for_ever(b"x")),
        "end of the body",
    ),
}
"""What a server sends, a piece at a time and without an end, and what is then waited for."""

FLOODS: dict[str, tuple[bytes, bytes]] = {
    "a status line": (b"HTTP/1.1 200 ", b"O" * 999),
    "100 Continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 99),
    "a header": (HEAD + b"X: ", b"x" * 999),
    "headers": (HEAD, b"X: y\r\n" * 99),
    "a body without a length": (HEAD + b"\r\n", b"x" * 999),
    "chunks": (CHUNKED, b"1\r\nx\r\n" * 99),
    "the size of a chunk": (CHUNKED + b"1;", b"x" * 999),
    "a chunk of no size": (CHUNKED + b"-1\r\n", b"x" * 999),
    "trailers": (CHUNKED + b"0\r\n", b"X: y\r\n" * 99),
}
"""What a server sends as fast as it is read: a beginning, and what is repeated."""

NOT_HTTP = {
    "another protocol": b"SSH-2.0-OpenSSH_9.9\r\n\r\n",
    "a status that is no number": b"HTTP/1.1 abc OK\r\n\r\n",
    "zeros": bytes(100) + b"\r\n\r\n",
    "a chunk of size -2": CHUNKED + b"-2\r\nxx\r\n",
}

CUT = {
    "at once": b"",
    "in the status line": b"HTTP/1.1 2",
    "in the headers": HEAD + b"Content-Le",
    "in the body": HEAD + b"Content-Length: 10\r\n\r\n12345",
    "in a chunk": CHUNKED + b"5\r\n12",
    "in the size of a chunk": CHUNKED + b"zz\r\nxx\r\n",
    "between chunks": CHUNKED + b"2\r\n12\r\n",
}


@contextmanager
def answering(answer: Callable[[socket.socket], None], listening: socket.socket) -> Iterator[None]:
    """Answer every connection with `answer`; what it sends to a client that has left ends it."""
    threads: list[threading.Thread] = []
    open_ones: list[socket.socket] = []

    def serve(sock: socket.socket) -> None:
        with sock, suppress(OSError):
            answer(sock)

    def accept() -> None:
        with suppress(OSError):
            while True:
                sock, _ = listening.accept()
                open_ones.append(sock)
                threads.append(threading.Thread(target=serve, args=(sock,), daemon=True))
                threads[-1].start()

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        accepting.join(GUARD_S)
        listening.close()
        for sock in open_ones:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(GUARD_S)
        assert not any(thread.is_alive() for thread in [accepting, *threads])


@contextmanager
def lying(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    listening = socket.create_server(("127.0.0.1", 0))
    with answering(answer, listening):
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def read_request(sock: socket.socket) -> None:
    seen = b""
    while b"\r\n\r\n" not in seen:
        piece = sock.recv(1 << 16)
        if not piece:
            raise ConnectionResetError
        seen += piece


def dripping(pieces: Callable[[], Pieces]) -> Callable[[socket.socket], None]:
    def answer(sock: socket.socket) -> None:
        read_request(sock)
        for piece in pieces():
            sock.sendall(piece)
            time.sleep(0.01)

    return answer


def saying(text: bytes, repeated: bytes = b"") -> Callable[[socket.socket], None]:
    def answer(sock: socket.socket) -> None:
        read_request(sock)
        sock.sendall(text)
        while repeated:
            sock.sendall(repeated)

    return answer


def resetting(text: bytes) -> Callable[[socket.socket], None]:
    def answer(sock: socket.socket) -> None:
        read_request(sock)
        sock.sendall(text)
        time.sleep(0.1)  # else the reset may overtake what was sent
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    return answer


def ask(url: str, deadline_s: float = DEADLINE_S, body: bytes | None = b"{}") -> bytes:
    return guarded(
        lambda: Endpoint(url, {}, attempt_timeout_s=3600.0).request_once(
            "POST",
            "/route",
            body,
            {},
            limit_bytes=LIMIT_BYTES,
            deadline_s=time.monotonic() + deadline_s,
        )
    )


def guarded(call: Callable[[], bytes]) -> bytes:
    """Call on a thread, so that a call that never ends is a failure and not a test that hangs."""
    found: list[bytes] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(GUARD_S)
    if thread.is_alive():
        raise AssertionError(f"the call goes on {GUARD_S} s after it began")
    if raised:
        raise raised[0]
    return found[0]


@pytest.mark.parametrize("kind", DRIPS)
def test_a_server_that_drips_for_ever_ends_by_the_deadline(kind):
    pieces, awaited = DRIPS[kind]
    with (
        lying(dripping(pieces)) as url,
        pytest.raises(TransportTimeoutError, match=rf"POST {url}/route: .*{awaited}"),
    ):
        ask(url)


@pytest.mark.parametrize("kind", DRIPS)
def test_a_checkpoint_engine_that_drips_for_ever_ends_by_the_deadline(kind, tmp_path, held):
    pieces, awaited = DRIPS[kind]
    path = str(tmp_path / "0.sock")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen()
    with (
        answering(dripping(pieces), listening),
        pytest.raises(TransportTimeoutError, match=rf"0\.sock: GET /v1/healthz: .*{awaited}"),
    ):
        guarded(lambda: CheckpointEngine([path]).hand_over(held, timeout_s=DEADLINE_S))


@pytest.mark.parametrize("kind", FLOODS)
def test_an_answer_is_bounded_whatever_it_is_made_of(kind):
    with (
        lying(saying(*FLOODS[kind])) as url,
        pytest.raises(TransportError) as caught,
    ):
        ask(url, 3600.0)
    assert not isinstance(caught.value, TransportTimeoutError)


@pytest.mark.parametrize("kind", NOT_HTTP)
def test_what_is_not_http_is_said_to_be_none(kind):
    with lying(saying(NOT_HTTP[kind])) as url, pytest.raises(TransportError, match="HTTP"):
        ask(url, 3600.0)


@pytest.mark.parametrize("end", [saying, resetting])
@pytest.mark.parametrize("kind", CUT)
def test_a_connection_that_is_cut_is_a_lost_peer(kind, end):
    with lying(end(CUT[kind])) as url, pytest.raises(PeerLostError, match=f"POST {url}/route"):
        ask(url, 3600.0)


def test_a_server_that_takes_no_request_ends_by_the_deadline():
    gone = threading.Event()

    def answer(sock: socket.socket) -> None:
        gone.wait(GUARD_S)

    with lying(answer) as url:
        with pytest.raises(TransportTimeoutError, match="take the request"):
            ask(url, body=bytes(64 << 20))
        gone.set()


def test_a_server_that_takes_a_request_a_byte_at_a_time_ends_by_the_deadline():
    def answer(sock: socket.socket) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        while sock.recv(4096):
            time.sleep(0.05)

    with lying(answer) as url, pytest.raises(TransportTimeoutError, match="take the request"):
        ask(url, body=bytes(64 << 20))


def test_a_server_that_never_begins_tls_ends_by_the_deadline():
    def answer(sock: socket.socket) -> None:
        while sock.recv(4096):
            pass

    with lying(answer) as url, pytest.raises(TransportTimeoutError, match="TLS"):
        ask(url.replace("http:", "https:"))


def test_tls_that_is_none_is_said_to_be_none():
    def answer(sock: socket.socket) -> None:
        sock.recv(1)
        sock.sendall(b"HTTP/1.1 400 This is plain HTTP\r\n\r\n")

    with lying(answer) as url, pytest.raises(TransportError, match="TLS failed") as caught:
        ask(url.replace("http:", "https:"), 3600.0)
    assert isinstance(caught.value.__cause__, ssl.SSLError)


def test_an_address_that_nobody_answers_ends_by_the_deadline():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        address = listening.getsockname()
        waiting = [socket.socket() for _ in range(4)]  # fill the queue of those not accepted
        for sock in waiting:
            sock.setblocking(False)
            sock.connect_ex(address)
        with pytest.raises(TransportTimeoutError, match="connection"):
            ask(f"http://127.0.0.1:{address[1]}")
        for sock in waiting:
            sock.close()


def test_a_name_that_is_never_resolved_ends_by_the_deadline(monkeypatch):
    gone = threading.Event()
    real = socket.getaddrinfo

    def getaddrinfo(host, *arguments, **options):
        if host != "a.name" or options.get("flags") == socket.AI_NUMERICHOST:
            return real(host, *arguments, **options)
        gone.wait(GUARD_S)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with pytest.raises(TransportTimeoutError, match=r"address of 'a\.name'"):
        ask("http://a.name")
    gone.set()


def test_a_name_is_not_asked_for_where_no_thread_starts(monkeypatch):
    real = threading.Thread.start

    def start(thread):
        if thread.name == "syncline-resolve":
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(TransportError, match=r"address of 'a\.name'.*can't start new thread"):
        ask("http://a.name")


def test_a_name_that_nobody_has(monkeypatch):
    def getaddrinfo(*arguments, **options):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with pytest.raises(PeerLostError, match=r"a\.name.*Name or service not known"):
        ask("http://a.name", 3600.0)


@pytest.mark.parametrize("host", ["a" * 64, "a..b", "[::1", "a" * 300])
def test_a_name_that_none_can_have_is_refused_before_it_is_asked_for(host):
    with pytest.raises(ConfigError):
        Endpoint(f"http://{host}", {}, attempt_timeout_s=1.0)


def test_a_port_where_nobody_listens():
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        port = listening.getsockname()[1]
    with pytest.raises(PeerLostError, match="refused"):
        ask(f"http://127.0.0.1:{port}", 3600.0)


def test_the_next_address_of_a_name_is_tried(monkeypatch):
    """A name has two addresses, and the server listens on the second."""
    with lying(saying(HEAD + b"Content-Length: 2\r\n\r\n{}")) as url:
        port = int(url.rpartition(":")[2])
        real = socket.getaddrinfo

        def getaddrinfo(host, *arguments, **options):
            if host != "a.name":
                return real(host, *arguments, **options)
            stream = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
            return [(*stream, ("127.0.0.2", port)), (*stream, ("127.0.0.1", port))]

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
        assert ask(f"http://a.name:{port}", 3600.0) == b"{}"


def test_a_deadline_that_has_passed_sends_nothing():
    asked = []
    with lying(lambda sock: asked.append(1)) as url, pytest.raises(TransportTimeoutError):
        ask(url, -1.0)
    assert not asked


def test_a_server_that_refuses_before_it_has_read_is_heard():
    def answer(sock: socket.socket) -> None:
        read_request(sock)
        sock.sendall(b"HTTP/1.1 413 Too long\r\nContent-Length: 3\r\n\r\nwhy")
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 20):
            pass

    with lying(answer) as url, pytest.raises(TransportError, match="413: 'why'"):
        ask(url, 3600.0, bytes(1 << 20))


@pytest.fixture
def held(tmp_path: Path) -> Path:
    from hosting import Run
    from syncline import CheckpointDir, Receiver

    run = Run()
    run.publish(1)
    Receiver(run.store, CheckpointDir(tmp_path / "ckpt")).sync()
    return tmp_path / "ckpt"
