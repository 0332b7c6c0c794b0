"""Whole messages over a blocking stream socket, scattered and gathered, each by a deadline."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence

from syncline.types import check_seconds

_MOST_BUFFERS = 512
_LEAST_S = 0.001


class Deadline:
    """A point in time that several waits share.

    Example:
        >>> Deadline(60.0).left_s() > 59
        True
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = check_seconds("timeout_s", timeout_s)
        self._at = time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Return the seconds that are left.

        Raises:
            TimeoutError: none.
        """
        left = self._at - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return max(left, _LEAST_S)


def send_all(
    sock: socket.socket, buffers: Sequence[bytes | memoryview], deadline: Deadline
) -> None:
    """Send all buffers, one after the other, without copying them together.

    Raises:
        TimeoutError, OSError: as the socket.
    """
    waiting = [memoryview(buffer) for buffer in buffers if len(buffer)]
    first = 0
    while first < len(waiting):
        _limit(sock, socket.SO_SNDTIMEO, deadline)
        try:
            sent = sock.sendmsg(waiting[first : first + _MOST_BUFFERS])
        except BlockingIOError:
            raise TimeoutError from None
        first = _advance(waiting, first, sent)


def receive_into(sock: socket.socket, places: Sequence[memoryview], deadline: Deadline) -> None:
    """Fill all places, one after the other.

    Raises:
        EOFError: the other side closed before they were full.
        TimeoutError, OSError: as the socket.
    """
    waiting = [place for place in places if len(place)]
    first = 0
    while first < len(waiting):
        _limit(sock, socket.SO_RCVTIMEO, deadline)
        batch = waiting[first : first + _MOST_BUFFERS]
        try:
            received = sock.recvmsg_into(batch, 0, socket.MSG_WAITALL)[0]
        except BlockingIOError:
            raise TimeoutError from None
        if not received:
            raise EOFError("the connection was closed")
        first = _advance(waiting, first, received)


def receive_exactly(sock: socket.socket, nbytes: int, deadline: Deadline) -> bytes:
    """Return the next `nbytes` bytes; raises as `receive_into`."""
    place = bytearray(nbytes)
    receive_into(sock, [memoryview(place)], deadline)
    return bytes(place)


def _limit(sock: socket.socket, which: int, deadline: Deadline) -> None:
    """Let the kernel end a blocking call: cheaper than a poll before each."""
    seconds, fraction = divmod(deadline.left_s(), 1)
    sock.setsockopt(socket.SOL_SOCKET, which, struct.pack("ll", int(seconds), int(fraction * 1e6)))


def _advance(waiting: list[memoryview], first: int, nbytes: int) -> int:
    """Take `nbytes` bytes off the front and return the index of the first buffer with something left."""
    while first < len(waiting) and nbytes >= len(waiting[first]):
        nbytes -= len(waiting[first])
        first += 1
    if nbytes:
        waiting[first] = waiting[first][nbytes:]
    return first
