"""How fast is a link? A few objects or messages of bounded bytes, by a deadline."""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count

from syncline.abc import Channel, Store
from syncline.choice.values import Link
from syncline.errors import ConfigError, FormatError, SynclineError, TransportTimeoutError

PROBE_BYTES = 8 << 20
"""The longest single object or message of a probe; all of them together are less than 1.2 times that."""

_GROWTH = 8
_ENOUGH = 0.1
"""Share of the deadline that one transfer may take before larger ones are left out."""

_LENGTH_BYTES = 8
_SEND, _RETURN = b"s", b"r"

Transfer = Callable[[int], float]
"""Moves so many bytes and returns the seconds that it took."""


def probe_store(store: Store, *, nbytes: int = PROBE_BYTES, timeout_s: float = 5.0) -> Link:
    """Measure a store: put objects of growing size, get them, and delete them again.

    In an empty store nobody else may begin a run meanwhile; beside a run the objects are strangers that nobody reads.

    Args:
        nbytes: the largest object.
        timeout_s: for all of it.

    Raises:
        TransportTimeoutError: the store did not answer by then; what it still does goes on in a thread.
        StoreError: it failed.
    """
    name = f"probe-{secrets.token_hex(8)}"
    numbers = count()
    written: list[str] = []

    def put(size: int) -> float:
        key = f"{name}-{next(numbers)}"
        data = secrets.token_bytes(size)
        written.append(key)
        return _seconds(lambda: store.put(key, [data]))

    def get(size: int) -> float:
        key = written[_growing(nbytes).index(size)]
        return _seconds(lambda: list(store.pieces(key, size)))

    def measure() -> Link:
        try:
            up, up_s = _fitted(put, _growing(nbytes), timeout_s)
            down, down_s = _fitted(get, _growing(nbytes)[: len(written)], timeout_s)
        finally:
            for key in written:
                store.delete(key)
        return Link(up, down, (up_s + down_s) / 2, f"measured, {store}")

    return _by_deadline(measure, timeout_s, f"{store}: a probe of {nbytes} bytes")


def probe_channel(channel: Channel, *, nbytes: int = PROBE_BYTES, timeout_s: float = 5.0) -> Link:
    """Measure a channel whose other side is in `answer_probe`, in both directions.

    Raises:
        TransportTimeoutError, PeerLostError: the other side is late, or gone.
    """
    ends_s = time.monotonic() + timeout_s

    def answer() -> bytes:
        return channel.receive(max(0.0, ends_s - time.monotonic()))

    def send(size: int) -> float:
        data = _SEND + secrets.token_bytes(size)
        return _seconds(lambda: (channel.send(data), answer()))

    def fetch(size: int) -> float:
        request = _RETURN + size.to_bytes(_LENGTH_BYTES, "little")
        return _seconds(lambda: (channel.send(request), answer()))

    up, up_s = _fitted(send, _growing(nbytes), timeout_s)
    down, down_s = _fitted(fetch, _growing(nbytes), timeout_s)
    channel.send(b"")
    return Link(up, down, (up_s + down_s) / 2, "measured, a connection between the two sides")


def answer_probe(
    channel: Channel, *, limit_bytes: int = PROBE_BYTES, timeout_s: float = 60.0
) -> None:
    """Be the other side of `probe_channel` until it is over.

    Args:
        limit_bytes: the most that is sent in one message.
        timeout_s: the longest wait for the next message.

    Raises:
        FormatError: what comes is no probe. TransportTimeoutError, PeerLostError: the other side is late, or gone.
    """
    while message := channel.receive(timeout_s):
        if message[:1] == _SEND:
            channel.send(b"!")
            continue
        size = int.from_bytes(message[1:], "little")
        if message[:1] != _RETURN or len(message) != 1 + _LENGTH_BYTES or size > limit_bytes:
            raise FormatError(
                f"a probe: expected to send or to return up to {limit_bytes} bytes, found "
                f"{message[:9]!r}"
            )
        channel.send(secrets.token_bytes(size))


def _growing(nbytes: int) -> list[int]:
    """Return the sizes of a probe, ascending; the last is `nbytes`."""
    if nbytes < 1:
        raise ConfigError(f"a probe: expected at least 1 byte, found {nbytes}")
    return sorted({max(1, nbytes // _GROWTH**2), max(1, nbytes // _GROWTH), nbytes})


def _fitted(transfer: Transfer, sizes: list[int], timeout_s: float) -> tuple[float, float]:
    """Return bytes a second and the seconds that a transfer takes beside them."""
    times: list[tuple[int, float]] = []
    for size in sizes:
        times.append((size, transfer(size)))
        if times[-1][1] > _ENOUGH * timeout_s:
            break
    (small, small_s), (large, large_s) = times[0], times[-1]
    if large_s <= small_s:
        return large / max(large_s, 1e-9), 0.0
    speed = (large - small) / (large_s - small_s)
    return speed, max(0.0, small_s - small / speed)


def _seconds(call: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def _by_deadline(measure: Callable[[], Link], timeout_s: float, what: str) -> Link:
    """Return what a call returns, or raise if it takes too long; a store's calls cannot be broken off."""
    found: queue.SimpleQueue[Link | SynclineError] = queue.SimpleQueue()

    def run() -> None:
        try:
            found.put(measure())
        except SynclineError as error:
            found.put(error)

    threading.Thread(target=run, name="syncline-probe", daemon=True).start()
    result: Link | SynclineError | None = None
    with suppress(queue.Empty):
        result = found.get(timeout=timeout_s)
    if result is None:
        raise TransportTimeoutError(
            f"{what} was not over in {timeout_s} s; give the link's speed, or more time"
        )
    if isinstance(result, SynclineError):
        raise result
    return result
