"""What a trainer and an engine tell each other about a version on a live path: strict JSON, then raw bytes.

    trainer                                   engine
    offer   which version, its manifest  ->
                                         <-   answer   what it needs: nothing, delta, full
    load    what is in the buckets, and  ->
            which trainer rank sends each,
            and how long joining may take
                                         <-   ready    that is what the version has
            the buckets, by `Outlet`     ->            and `Inlet`
                                         <-   vote     all of it is decoded and proved; or why not, and
                                                       whether that is this engine's own fault
    verdict commit, or why not, and      ->
            whether another try follows
                                         <-   done     the engine holds it; or why not

`break` may come at any time after `load`: the round is over, or will not begin, and a vote is waited for.
Every message names its generation, one for each attempt; messages of earlier ones are dropped where they
arrive late. Nothing an engine hears before `verdict` changes a bit of its weights.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from syncline.abc import Buffer, Channel
from syncline.errors import FormatError
from syncline.format import strict_json

OFFER, ANSWER, LOAD, READY, BREAK = "offer", "answer", "load", "ready", "break"
VOTE, VERDICT, DONE = "vote", "verdict", "done"

_KEYS: Mapping[str, tuple[str, ...]] = {
    OFFER: ("sha256", "has_table", "allowed"),
    ANSWER: ("wants", "needs_files"),
    LOAD: ("kind", "files", "lanes", "sources", "join_ms"),
    READY: (),
    BREAK: (),
    VOTE: ("error", "is_own"),
    VERDICT: ("error", "again"),
    DONE: ("error",),
}
_LIMIT_BYTES = 1 << 20
_LANE_KEYS = ("form", "opened")


@dataclass(frozen=True, slots=True)
class Message:
    """One message: what it is, of which attempt, its members, and the raw bytes that follow it."""

    kind: str
    generation: int
    fields: strict_json.Fields
    blobs: tuple[bytes, ...]


def send(
    channel: Channel,
    kind: str,
    generation: int,
    fields: Mapping[str, object],
    blobs: Sequence[Buffer] = (),
    *,
    timeout_s: float | None = None,
) -> None:
    """Send one message; raises as `Channel.send`."""
    head = {"message": kind, "generation": generation, "blobs": len(blobs), **fields}
    for part in (strict_json.dump(head), *blobs):
        channel.send(part, timeout_s=timeout_s)


def receive(
    channel: Channel, kinds: Sequence[str], generation: int | None, timeout_s: float
) -> Message:
    """Return the next message of one of these kinds and of this attempt (None: of any).

    Whatever else comes belongs to an attempt that was given up, and is dropped.

    Raises:
        TransportTimeoutError, PeerLostError: as `Channel.receive`.
        FormatError: the other side does not speak this protocol.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        found = _next(channel, deadline_s)
        if found is None or found.kind not in kinds:
            continue
        if generation is None or found.generation == generation:
            return found


def _next(channel: Channel, deadline_s: float) -> Message | None:
    """Return the next message, whatever it is; None for one that opens a round."""
    where = "a message on a live path"
    raw = channel.receive(max(0.0, deadline_s - time.monotonic()))
    value = strict_json.members(strict_json.parse(raw, where, limit_bytes=_LIMIT_BYTES), where)
    if any(key in value for key in _LANE_KEYS):
        return None
    kind = value.get("message")
    if not isinstance(kind, str) or kind not in _KEYS:
        raise FormatError(f"{where}: message must be one of {tuple(_KEYS)}, found {kind!r:.80}")
    keys = ("message", "generation", "blobs", *_KEYS[kind])
    fields = strict_json.Fields(value, f"message {kind}", keys)
    count = fields.integer("blobs", maximum=1 << 16)
    blobs = tuple(channel.receive(max(0.0, deadline_s - time.monotonic())) for _ in range(count))
    return Message(kind, fields.integer("generation"), fields, blobs)
