"""How a trainer opens a round with engines over their channels: `form` one way, `opened` back."""

from __future__ import annotations

import time

from syncline.abc import Channel
from syncline.channels.sockets import SocketChannel
from syncline.errors import PeerLostError, TransportError
from syncline.format import strict_json

_LIMIT_BYTES = 1 << 20


def hear_form(channel: Channel, timeout_s: float, where: str) -> strict_json.Fields:
    """Return the trainer's next message, which opens a round: `form` (None: as before) and `round`.

    Raises:
        PeerLostError: the trainer says something else: it has called the round off.
    """
    value = strict_json.members(
        strict_json.parse(channel.receive(timeout_s), where, limit_bytes=_LIMIT_BYTES), where
    )
    if "form" not in value:
        raise PeerLostError("the trainer called the round off before it began")
    return strict_json.Fields(value, where, ("form", "round"))


def hear_opened(name: str, channel: SocketChannel, number: int, timeout_s: float) -> None:
    """Wait until an engine says that it has opened this round; what it says of earlier ones is dropped.

    Raises:
        PeerLostError, TransportTimeoutError: it is gone, did not, or could not; names it, and says why. What it
            said instead is for whoever asks the channel next.
    """
    deadline_s = time.monotonic() + timeout_s
    where = f"engine {name!r}"
    while True:
        try:
            raw = channel.receive(max(0.0, deadline_s - time.monotonic()))
        except TransportError as error:
            raise type(error)(f"{where} did not open the round: {error}") from error
        value = strict_json.members(strict_json.parse(raw, where, limit_bytes=_LIMIT_BYTES), where)
        if "opened" in value and value["opened"] == number:
            return
        if "opened" not in value:
            channel.put_back(raw)
            told = value.get("error")
            why = told if isinstance(told, str) else raw[:300].decode(errors="replace")
            raise PeerLostError(f"{where} did not open the round: {why}")
