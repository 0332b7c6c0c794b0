"""Sockets of this process: answered through a shortage of descriptors or threads, and closed in forked children.

A forked child (a data loader's worker) has a copy of every descriptor. Were they left open, the other side would not
notice when this process dies, and its address would stay taken for as long as the child lives.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache

_SHORTAGE_S = 0.05
_CLOSED = (errno.EBADF, errno.EINVAL)

_owned: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def own(sock: socket.socket) -> socket.socket:
    """Return the socket, which is this process's alone from now on: children forked later have it closed."""
    _watch_forks()
    _owned.add(sock)
    return sock


def answer_each(
    listening: socket.socket, answer: Callable[[socket.socket], None], name: str
) -> None:
    """Answer every connection on a thread of its own; return when `listening` is shut down or closed.

    Whoever comes while no descriptor or thread is left has to wait, or is turned away; the next one is answered.

    Args:
        answer: owns the connection from then on; `name`: of its thread.
    """
    for connected in _accepted(listening):
        with suppress(OSError):  # who connected has gone
            _start(answer, own(connected), name)


def _accepted(listening: socket.socket) -> Iterator[socket.socket]:
    while True:
        try:
            connected, _ = listening.accept()
        except OSError as error:
            if error.errno in _CLOSED:
                return
            time.sleep(_SHORTAGE_S)  # what accept(2) says of one connection, or of a moment
        else:
            yield connected


def _start(answer: Callable[[socket.socket], None], connected: socket.socket, name: str) -> None:
    try:
        threading.Thread(target=answer, args=(connected,), name=name, daemon=True).start()
    except RuntimeError:  # no thread can be made
        connected.close()


@cache
def _watch_forks() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_close_owned)


def _close_owned() -> None:
    for sock in list(_owned):
        with suppress(OSError):
            sock.close()
    _owned.clear()
