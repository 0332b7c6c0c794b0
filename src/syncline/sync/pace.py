"""When to ask for the next part: late enough that those before it have the link, early enough that it never idles.

Parts that come at the same time share the link, so that all of them are whole late, and what is to be done with each
begins late. One after the other would leave the link idle for a round trip each time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Self

_LEAST_BYTES = 64 << 10
_LEAST_S = 0.01
_MARGIN = 2.0


class Pace:
    """Lets the fetches of numbered parts begin in their order.

    One begins when what is still to come of those before it fills the link for hardly longer than a request takes
    until its answer begins; both are measured on the way.

    As a context manager it lets everybody go at the end: a fetch that was cancelled never has its turn.

    Args:
        clock: the time; tests bring their own.

    Example:
        >>> with Pace() as pace, pace.turn(0, 5) as came:
        ...     came(5)
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._left_bytes: dict[int, int] = {}
        self._next = 0
        self._came_bytes = 0
        self._first_at: float | None = None
        self._answer_s: float | None = None
        self._is_over = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    @contextmanager
    def turn(self, number: int, nbytes: int) -> Generator[Callable[[int], None], None, None]:
        """Wait for the turn of a part of so many bytes; yields what to tell of the bytes that come."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_turn(number))
            self._next = number + 1
            self._left_bytes[number] = nbytes
            self._changed.notify_all()
        begun_at = self._clock()
        is_first = True

        def came(more_bytes: int) -> None:
            nonlocal is_first
            with self._changed:
                if is_first:
                    self._answered(number, self._clock(), begun_at)
                    is_first = False
                self._came_bytes += more_bytes
                self._left_bytes[number] -= more_bytes
                self._changed.notify_all()

        try:
            yield came
        finally:
            with self._changed:
                del self._left_bytes[number]
                self._changed.notify_all()

    def _answered(self, number: int, now: float, begun_at: float) -> None:
        answer_s = now - begun_at
        # The least, since others delay it; but the first part may have been on its way before it had its turn.
        if self._answer_s is None or number == 1:
            self._answer_s = answer_s
        self._answer_s = min(self._answer_s, answer_s)
        if self._first_at is None:
            self._first_at = now

    def _is_turn(self, number: int) -> bool:
        if self._is_over:
            return True
        return number == self._next and sum(self._left_bytes.values()) <= self._ahead_bytes()

    def _ahead_bytes(self) -> float:
        if self._first_at is None or self._answer_s is None:
            return _LEAST_BYTES
        elapsed_s = self._clock() - self._first_at
        if elapsed_s < _LEAST_S:  # what a link lets through at once says nothing about it
            return _LEAST_BYTES
        return max(_LEAST_BYTES, _MARGIN * self._answer_s * self._came_bytes / elapsed_s)
