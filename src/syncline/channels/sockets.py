"""Channels over stream sockets: frames of a length and so many bytes; nothing in them is ever executed."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress

from syncline.abc import Buffer, Channel
from syncline.endpoints import own
from syncline.errors import ConfigError, PeerLostError, TransportTimeoutError

MAX_FRAME_BYTES = 1 << 28
"""Longest message: the description of the largest version that travels."""

_LENGTH_BYTES = 8
_READ_BYTES = 1 << 16
_MAX_FDS = 4
_MAX_WAITING = 1024
_POLL_MS = 1000
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class SocketChannel(Channel):
    """One end of a connected stream socket, Unix or TCP; see `Channel`.

    A thread reads what comes, so that a peer which dies is noticed at once, whoever waits for what. Over a
    Unix socket open files may travel with a message.

    Args:
        connected: the socket, which the channel owns from now on.
        peer: what messages call the other side.
        timeout_s: how long `send` may wait for the other side to take bytes.
        limit_bytes: longest message that is taken; may be raised later.
    """

    def __init__(
        self,
        connected: socket.socket,
        peer: str,
        *,
        timeout_s: float = 60.0,
        limit_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self.peer = peer
        self.limit_bytes = limit_bytes
        self.timeout_s = timeout_s
        self._socket = own(connected)
        self._is_unix = connected.family == getattr(socket, "AF_UNIX", None)
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._messages: deque[tuple[bytes, list[int]]] = deque()
        self._fds: list[int] = []
        self._arriving_fds: list[int] = []
        self._end: str | None = None
        self._is_closed = self._is_aborted = False
        self._is_reading = True
        if not self._is_unix:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.settimeout(0.0)  # every wait is a poll with a deadline
        threading.Thread(target=self._read, name=f"syncline-channel-{peer}", daemon=True).start()

    @classmethod
    def pair(cls) -> tuple[SocketChannel, SocketChannel]:
        """Return the two ends of a new channel inside this process."""
        one, other = socket.socketpair()
        return cls(one, "the other side"), cls(other, "the other side")

    @property
    def is_lost(self) -> bool:
        """Whether the other side has closed or died."""
        return self._end is not None

    @property
    def is_closed(self) -> bool:
        """Whether this side has closed."""
        return self._is_closed

    def send(
        self, message: Buffer, fds: Sequence[int] = (), *, timeout_s: float | None = None
    ) -> None:
        """Hand one message over; see `Channel.send`. Cost: one copy into the kernel.

        Args:
            fds: open files that travel along (Unix sockets only); the caller's own stay open.

        Raises:
            PeerLostError: the other side has closed or died.
            TransportTimeoutError: it takes nothing for so long that it must be stuck; the channel is dead.
            ConfigError: this side has closed.
        """
        if self._is_closed:
            raise ConfigError("send: this side of the channel was closed; open a new one")
        if self._end is not None:
            raise PeerLostError(f"{self.peer} is gone: {self._end}")
        view = memoryview(message).cast("B")
        head = view.nbytes.to_bytes(_LENGTH_BYTES, "little")
        wait_s = self.timeout_s if timeout_s is None else timeout_s
        with self._sending:
            self._send_all(memoryview(head), wait_s, fds)
            self._send_all(view, wait_s)

    def receive(self, timeout_s: float) -> bytes:
        """Return the next message; see `Channel.receive`. Files that came along wait in `take_fds`."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._messages or self._end is not None, timeout_s
            ):
                raise TransportTimeoutError(
                    f"{self.peer} sent no message in {timeout_s} s; it is slow or stuck"
                )
            if not self._messages:
                raise PeerLostError(f"{self.peer} is gone: {self._end}")
            message, fds = self._messages.popleft()
            self._changed.notify_all()
            self._fds += fds
            return message

    def put_back(self, message: bytes) -> None:
        """Let a message that was received, and is for somebody else, be the next one that comes."""
        with self._changed:
            self._messages.appendleft((message, []))
            self._changed.notify_all()

    def take_fds(self) -> list[int]:
        """Return the files that came with the messages received so far; the caller closes them."""
        with self._changed:
            taken, self._fds = self._fds, []
        return taken

    def close(self) -> None:
        """Tell the other side that nothing more comes; what is on its way to here still arrives."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            with suppress(OSError):  # the other side was first
                self._socket.shutdown(socket.SHUT_WR)
            self._free()

    def abort(self) -> None:
        """Close both directions at once; harmless when called again."""
        with self._changed:
            self._is_closed = self._is_aborted = True
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._ended("this side broke the channel off")
            self._free()

    def _send_all(self, view: memoryview, wait_s: float, fds: Sequence[int] = ()) -> None:
        deadline_s = time.monotonic() + wait_s
        while view.nbytes or fds:
            try:
                sent = (
                    socket.send_fds(self._socket, [view], list(fds))
                    if fds
                    else self._socket.send(view)
                )
            except BlockingIOError:
                self._wait_for_room(deadline_s, wait_s)
            except OSError as error:
                reason = error.strerror if self._end is None else self._end
                raise PeerLostError(f"{self.peer} is gone: {reason}") from error
            else:
                view, fds = view[sent:], ()

    def _wait_for_room(self, deadline_s: float, wait_s: float) -> None:
        left_s = deadline_s - time.monotonic()
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        if left_s <= 0 or not poll.poll(1000 * left_s):
            # Half a frame may be out, so nothing sensible can follow it.
            self.abort()
            raise TransportTimeoutError(f"{self.peer} took nothing for {wait_s} s; it is stuck")

    def _read(self) -> None:
        reason = "it closed the connection"
        try:
            for frame in self._frames():
                with self._changed:
                    fds, self._arriving_fds = self._arriving_fds, []
                    self._changed.wait_for(
                        lambda: len(self._messages) < _MAX_WAITING or self._is_aborted
                    )
                    self._messages.append((frame, fds))
                    self._changed.notify_all()
        except _LongFrameError as error:
            reason = str(error)
        except OSError as error:
            reason = error.strerror or type(error).__name__
        with self._changed:
            self._ended(reason)
            self._is_reading = False
            self._free()

    def _ended(self, reason: str) -> None:
        if self._end is None:
            self._end = reason
        self._changed.notify_all()

    def _free(self) -> None:
        """Give the socket back, once this side has closed and nobody reads from it any more."""
        if self._is_reading or not self._is_closed:
            return
        waiting = (fd for _, fds in self._messages for fd in fds)
        for fd in (*self._fds, *self._arriving_fds, *waiting):
            os.close(fd)
        self._fds, self._arriving_fds = [], []
        self._messages = deque((message, []) for message, _ in self._messages)
        self._socket.close()

    def _frames(self) -> Iterator[bytes]:
        """Yield whole frames until the other side closes between two of them."""
        waiting = bytearray()
        wanted: int | None = None
        while True:
            if wanted is None and len(waiting) >= _LENGTH_BYTES:
                wanted = int.from_bytes(waiting[:_LENGTH_BYTES], "little")
                del waiting[:_LENGTH_BYTES]
                if wanted > self.limit_bytes:
                    raise _LongFrameError(
                        f"it announced a message of {wanted} bytes, at most {self.limit_bytes} are allowed"
                    )
            if wanted is not None and len(waiting) >= wanted:
                yield bytes(waiting[:wanted])
                del waiting[:wanted]
                wanted = None
                continue
            data = self._some()
            if not data:
                return
            waiting += data

    def _some(self) -> bytes:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while not self._is_aborted:
            if not poll.poll(_POLL_MS):
                continue
            with suppress(BlockingIOError):
                if not self._is_unix:
                    return self._socket.recv(_READ_BYTES)
                data, fds, _, _ = socket.recv_fds(
                    self._socket, _READ_BYTES, _MAX_FDS, _CLOSE_ON_EXEC
                )
                self._arriving_fds += fds
                return data
        return b""


class _LongFrameError(Exception):
    """A frame is longer than allowed: damage, or no peer of ours."""
