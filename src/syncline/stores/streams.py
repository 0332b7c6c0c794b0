"""Many requests at once for one object: as many as the link was measured to reward, results in order."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from syncline import config

PIECE_BYTES = 8 << 20
"""Bytes of one ranged get, and of one piece of a multipart put."""

MOST_STREAMS = 8
"""Most requests at once for one object; times `PIECE_BYTES` it bounds the memory of a transfer."""

_WORTH_IT = 1.1


class Width:
    """How many requests to keep under way: doubled as long as that moves at least a tenth more.

    It starts at 4, and settles where doubling stops paying. One instance belongs to one store and one
    direction, so that what one object taught serves the next.

    Attributes:
        streams: how many requests to keep under way now.

    Example:
        >>> now = iter([0.0, 1.0, 2.0])
        >>> width = Width(clock=lambda: next(now))
        >>> width.begin()
        >>> for nbytes in (100, 100):
        ...     width.moved(nbytes, requests=width.streams)
        ...     print(width.streams)
        8
        4
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.streams = 4
        self._clock = clock
        self._best_bytes_per_s = 0.0
        self._is_settled = False
        self._restart(0.0)

    def begin(self) -> None:
        """Measure from here on: before this the link was idle."""
        self._restart(self._clock())

    def moved(self, nbytes: int, *, requests: int = 1) -> None:
        """Note that requests with this many bytes together ended; may change `streams`."""
        self._bytes += nbytes
        self._requests += requests
        if self._is_settled or self._requests < self.streams:
            return
        now = self._clock()
        rate = self._bytes / max(now - self._begun_at, 1e-9)
        if rate < self._best_bytes_per_s * _WORTH_IT:
            self.streams //= 2
            self._is_settled = True
            return
        self._best_bytes_per_s = rate
        self._is_settled = self.streams >= MOST_STREAMS
        self.streams = min(MOST_STREAMS, self.streams * 2)
        self._restart(now)

    def _restart(self, now: float) -> None:
        self._begun_at, self._bytes, self._requests = now, 0, 0


def ordered(
    starts: Iterable[int], fetch: Callable[[int], bytes], width: Width
) -> Generator[bytes, None, None]:
    """Yield what `fetch` returns for each start, in order, with `width.streams` of them under way.

    With one thread (`config.threads()`) each is fetched where it is asked for.

    Raises:
        Whatever `fetch` raises, at its place; then, and when the caller stops early, nothing runs on.
    Memory: what is under way, and one more.
    """
    if config.threads() == 1:
        yield from map(fetch, starts)
        return
    waiting: deque[Future[bytes]] = deque()
    width.begin()
    with ThreadPoolExecutor(MOST_STREAMS, thread_name_prefix="syncline-stream") as pool:
        try:
            for start in starts:
                waiting.append(pool.submit(fetch, start))
                while len(waiting) >= width.streams:
                    yield _first(waiting, width)
            while waiting:
                yield _first(waiting, width)
        finally:
            for future in waiting:
                future.cancel()
            wait(waiting)


def _first(waiting: deque[Future[bytes]], width: Width) -> bytes:
    piece = waiting[0].result()
    waiting.popleft()
    width.moved(len(piece))
    return piece
