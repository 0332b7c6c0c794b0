"""One HTTP request and its answer, over a connection of its own and over by a deadline, whatever the server does.

The standard library's client has one time-out for each piece that it waits for, and a server that drips makes it wait
for ever. So it is handed a connection that gives every wait only what is left of the whole, and counts what comes.
"""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from syncline.errors import PeerLostError, SynclineError, TransportError, TransportTimeoutError

_HEAD_BYTES = 1 << 17
_PIECE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server answered, all of it.

    Attributes:
        status: 200 and the like.
        retry_after: the header of this name, if there is one.
        body: as it was sent.
    """

    status: int
    retry_after: str | None
    body: bytes


class Wait:
    """How long there is for everything, and what is waited for now."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self.awaited = "a connection"

    def left_s(self) -> float:
        """Return the seconds that are left.

        Raises:
            TimeoutError: none.
        """
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        return left_s


class Address(Protocol):
    """Where a server listens."""

    def connect(self, wait: Wait) -> socket.socket:
        """Return a connection; raises as sockets do."""


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A host's name or number and a port; `tls` where the connection is encrypted."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None

    def connect(self, wait: Wait) -> socket.socket:
        """See `Address.connect`; the addresses of a name are tried in turn, each for its share of the time."""
        wait.awaited = f"the address of {self.host!r}"
        places = _resolved(self.host, self.port, wait)
        wait.awaited = "a connection"
        last: OSError = OSError(f"{self.host!r} has no address")
        for tried, (family, kind, protocol, _, place) in enumerate(places):
            sock = socket.socket(family, kind, protocol)
            try:
                sock.settimeout(wait.left_s() / (len(places) - tried))
                sock.connect(place)
            except OSError as error:
                sock.close()
                last = error
            else:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return self._encrypted(sock, wait)
        raise last

    def _encrypted(self, sock: socket.socket, wait: Wait) -> socket.socket:
        if self.tls is None:
            return sock
        wait.awaited = "TLS to begin"
        try:
            sock.settimeout(wait.left_s())
            return self.tls.wrap_socket(sock, server_hostname=self.host)
        except BaseException:
            sock.close()
            raise


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """The path of a Unix socket."""

    path: str

    def connect(self, wait: Wait) -> socket.socket:
        """See `Address.connect`."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(wait.left_s())
            sock.connect(self.path)
        except BaseException:
            sock.close()
            raise
        return sock


def exchange(
    address: Address,
    what: str,
    method: str,
    target: str,
    body: bytes | None,
    headers: Mapping[str, str],
    *,
    limit_bytes: int,
    deadline_s: float,
) -> Answer:
    """Return what a server answers to one request. Redirects are not followed.

    Args:
        what: begins every message.
        target: path and query.
        headers: `Host` among them.
        limit_bytes: longest body of an answer that is taken.
        deadline_s: on the clock of `time.monotonic`; covers name, connection, request, headers and body.

    Raises:
        TransportTimeoutError: the deadline came; says what was awaited.
        PeerLostError: there is no such name or nobody listens, or the connection was cut.
        TransportError: the answer is too long or not HTTP, or TLS failed.

    Memory: the body, and at most 128 KiB of what is around it.
    """
    began_s = time.monotonic()
    wait = Wait(deadline_s)
    try:
        with closing(address.connect(wait)) as sock:
            wire = _Wire(sock, wait, _HEAD_BYTES + 2 * limit_bytes)
            return _asked(wire, wait, method, target, body, headers, limit_bytes)
    except TimeoutError as error:
        raise TransportTimeoutError(
            f"{what}: no answer in {max(deadline_s - began_s, 0.0):.3g} s: still waiting for {wait.awaited}"
        ) from error
    except SynclineError as error:
        raise type(error)(f"{what}: {error}") from error
    except ssl.SSLError as error:
        raise TransportError(f"{what}: TLS failed: {error}") from error
    except (OSError, http.client.IncompleteRead) as error:
        raise PeerLostError(f"{what}: {type(error).__name__}: {error}") from error
    except (http.client.HTTPException, ValueError) as error:
        raise TransportError(f"{what}: the answer is not HTTP: {error!r:.200}") from error


def _asked(
    wire: _Wire,
    wait: Wait,
    method: str,
    target: str,
    body: bytes | None,
    headers: Mapping[str, str],
    limit_bytes: int,
) -> Answer:
    connection = http.client.HTTPConnection("")
    connection.sock = wire
    wait.awaited = "the server to take the request"
    # One that refuses without having read it all has an answer to give.
    with suppress(BrokenPipeError):
        connection.request(method, target, body, {**headers, "Connection": "close"})
    wait.awaited = "the status line and headers"
    response = connection.getresponse()
    wire.is_head_over = True
    wait.awaited = "the end of the body"
    answer = bytearray()
    while piece := response.read(_PIECE_BYTES):
        answer += piece
        if len(answer) > limit_bytes:
            raise TransportError(f"the answer is longer than {limit_bytes} bytes")
    if response.length:
        raise PeerLostError(f"the connection was cut with {response.length} bytes to come")
    return Answer(response.status, response.headers.get("Retry-After"), bytes(answer))


class _Wire(io.RawIOBase):
    """A connection as `http.client` uses one: to send, and to make a file of.

    Attributes:
        is_head_over: the status line and headers have come.
    """

    def __init__(self, sock: socket.socket, wait: Wait, most_bytes: int) -> None:
        super().__init__()
        self._sock = sock
        self._wait = wait
        self._most_bytes = most_bytes
        self._came_bytes = 0
        self.is_head_over = False

    def sendall(self, data: bytes) -> None:
        """Send all of it."""
        rest = memoryview(data)
        while rest:
            self._sock.settimeout(self._wait.left_s())
            rest = rest[self._sock.send(rest) :]

    def makefile(self, mode: str) -> io.BufferedReader:
        """Return what comes."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        """Say that something comes."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Take what has come, at most once more."""
        self._sock.settimeout(self._wait.left_s())
        count = self._sock.recv_into(buffer)
        if not count and not self.is_head_over:
            # To the standard library headers that are cut short are whole, and what they announce is empty.
            raise PeerLostError(f"the connection was cut while waiting for {self._wait.awaited}")
        self._came_bytes += count
        if self._came_bytes > self._most_bytes:
            raise TransportError(f"the answer is longer than {self._most_bytes} bytes in all")
        return count

    def close(self) -> None:
        """Do nothing: `http.client` lets go of a connection before its answer has been read."""


def _resolved(host: str, port: int, wait: Wait) -> list[Any]:
    """Return what a name stands for; the system's resolver has no deadline, so it may be left behind on its thread."""
    with suppress(socket.gaierror):  # a number needs no asking
        numeric = socket.AI_NUMERICHOST
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=numeric)
    found: SimpleQueue[list[Any] | OSError] = SimpleQueue()

    def resolve() -> None:
        try:
            found.put(list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)))
        except OSError as error:
            found.put(error)

    left_s = wait.left_s()
    try:
        threading.Thread(target=resolve, name="syncline-resolve", daemon=True).start()
    except RuntimeError as error:
        raise TransportError(f"the address of {host!r} could not be asked for: {error}") from error
    try:
        places = found.get(timeout=left_s)
    except Empty:
        raise TimeoutError from None
    if isinstance(places, OSError):
        raise OSError(f"no address of {host!r}: {places}") from places
    return places
