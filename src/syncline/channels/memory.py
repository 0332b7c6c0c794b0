"""A channel between two threads of one process."""

from __future__ import annotations

import threading
from collections import deque
from typing import Self

from syncline.abc import Buffer, Channel
from syncline.errors import ConfigError, PeerLostError, TransportTimeoutError


class MemoryChannel(Channel):
    """One end of a pair; made by `pair`. Each direction is a queue of whole messages, in order.

    Closing one end ends that direction alone: what was sent before is still delivered, and the closed
    end may go on receiving.

    Example:
        >>> trainer, engine = MemoryChannel.pair()
        >>> trainer.send(b"ready")
        >>> engine.receive(timeout_s=1.0)
        b'ready'
    """

    def __init__(self, incoming: _Queue, outgoing: _Queue) -> None:
        self._incoming = incoming
        self._outgoing = outgoing

    @classmethod
    def pair(cls) -> tuple[Self, Self]:
        """Return the two ends of a new channel."""
        there, back = _Queue(), _Queue()
        return cls(back, there), cls(there, back)

    def send(self, message: Buffer, *, timeout_s: float | None = None) -> None:
        """Hand one message over; see `Channel.send`. Cost: one copy; never waits.

        Raises:
            PeerLostError: the other side has closed.
            ConfigError: this side has closed.
        """
        if self._outgoing.is_closed:
            raise ConfigError("send: this side of the channel was closed; open a new pair")
        if self._incoming.is_closed:
            raise PeerLostError("send: the other side of the channel has closed")
        self._outgoing.add(bytes(message))

    def receive(self, timeout_s: float) -> bytes:
        """Return the next message; see `Channel.receive`."""
        return self._incoming.take(timeout_s)

    def close(self) -> None:
        """Tell the other side that nothing more comes; harmless when called again."""
        self._outgoing.close()


class _Queue:
    """One direction: messages that were sent and not yet received."""

    def __init__(self) -> None:
        self._messages: deque[bytes] = deque()
        self._changed = threading.Condition()
        self.is_closed = False

    @property
    def has_message(self) -> bool:
        with self._changed:
            return bool(self._messages)

    def add(self, message: bytes) -> None:
        with self._changed:
            self._messages.append(message)
            self._changed.notify()

    def take(self, timeout_s: float) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: self._messages or self.is_closed, timeout_s):
                raise TransportTimeoutError(
                    f"receive: no message came in {timeout_s} s; the other side is slow or stuck"
                )
            if not self._messages:
                raise PeerLostError("receive: the other side has closed and nothing is left")
            return self._messages.popleft()

    def close(self) -> None:
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()
