"""One request or many at once for one object: as many as the link was measured to reward, results in order."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from syncline import config

CHUNK_BYTES = 256 << 10
"""Least bytes of a large response that are handed on at once."""

PIECE_BYTES = 8 << 20
"""Bytes of one ranged get, and of one piece of a multipart put."""

GET_STREAMS = (1, 4, 8)
PUT_STREAMS = (4, 8)
"""Requests at once for one object, tried in this order; the last, times `PIECE_BYTES`, bounds the memory of a transfer."""

MOST_STREAMS = GET_STREAMS[-1]
TRIAL_BYTES = 4 * PIECE_BYTES
"""What is moved before one number of requests is compared with the one before."""

_WORTH_IT = 1.1


class Width:
    """How many requests to keep under way: more as long as that moves at least a tenth more.

    One instance belongs to one store and one direction, so that what one object taught serves the next. A
    service that is slow to begin each answer, or a link that one request fills, keeps it at one. Several threads
    may share it.

    Args:
        choices: numbers of requests, rising.

    Example:
        >>> now = iter([0.0, 1.0, 2.0])
        >>> width = Width(GET_STREAMS, clock=lambda: next(now))
        >>> width.begin()
        >>> for _ in range(2):
        ...     width.moved(TRIAL_BYTES)
        ...     print(width.streams)
        4
        1
    """

    def __init__(self, choices: Sequence[int], clock: Callable[[], float] = time.monotonic) -> None:
        self._choices = choices
        self._at = 0
        self._clock = clock
        self._best_bytes_per_s = 0.0
        self._is_settled = False
        self._alone = threading.Lock()
        self._restart(0.0)

    @property
    def streams(self) -> int:
        """How many requests to keep under way now."""
        return self._choices[self._at]

    def begin(self) -> None:
        """Measure from here on: before this the link was idle."""
        with self._alone:
            self._restart(self._clock())

    def moved(self, nbytes: int) -> None:
        """Note that so many bytes came, or went; may change `streams`."""
        with self._alone:
            self._count(nbytes)

    def _count(self, nbytes: int) -> None:
        self._bytes += nbytes
        if self._is_settled or self._bytes < TRIAL_BYTES:
            return
        now = self._clock()
        rate = self._bytes / max(now - self._begun_at, 1e-9)
        if rate < self._best_bytes_per_s * _WORTH_IT:
            self._at -= 1
            self._is_settled = True
            return
        self._best_bytes_per_s = rate
        self._is_settled = self._at == len(self._choices) - 1
        if not self._is_settled:
            self._at += 1
        self._restart(now)

    def _restart(self, now: float) -> None:
        self._begun_at, self._bytes = now, 0


def ordered(
    starts: Iterable[int], fetch: Callable[[int], bytes], width: Width
) -> Generator[bytes, None, None]:
    """Yield what `fetch` returns for each start, in order, with `width.streams` of them under way.

    Ends early, with nothing under way, once the width is one. With one thread (`config.threads()`) each is fetched
    where it is asked for.

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
                if width.streams == 1:
                    break
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
