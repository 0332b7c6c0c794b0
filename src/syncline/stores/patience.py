"""Trying again until a deadline, with growing, jittered pauses."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from syncline.types import check_seconds

T = TypeVar("T")

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0


class Patience:
    """Tries again what may succeed later.

    Args:
        deadline_s: how long to go on from the first try; 0: one try. The pause before a try never ends
            after it.
        clock, sleep: the time; tests bring their own.

    Example:
        >>> tries = iter([False, True])
        >>> Patience(1.0, sleep=lambda seconds: None).until(lambda: next(tries), bool)
        True
    """

    def __init__(
        self,
        deadline_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.deadline_s = check_seconds("deadline_s", deadline_s)
        self._clock = clock
        self._sleep = sleep

    def call(self, attempt: Callable[[], T], is_passing: Callable[[Exception], bool]) -> T:
        """Return what `attempt` returns; call it again after errors that may pass.

        Raises:
            The error of the last attempt: one that does not pass, or the one at the deadline.
        """
        pauses = _Pauses(self._clock() + self.deadline_s)
        while True:
            try:
                return attempt()
            except Exception as error:
                pause = pauses.next(self._clock()) if is_passing(error) else None
                if pause is None:
                    raise
            self._sleep(pause)

    def until(self, attempt: Callable[[], T], is_good: Callable[[T], bool]) -> T:
        """Return the first good result, or the last one at the deadline."""
        pauses = _Pauses(self._clock() + self.deadline_s)
        while True:
            result = attempt()
            pause = None if is_good(result) else pauses.next(self._clock())
            if pause is None:
                return result
            self._sleep(pause)


class _Pauses:
    def __init__(self, end: float) -> None:
        self._end = end
        self._pause_s = _FIRST_PAUSE_S

    def next(self, now: float) -> float | None:
        """Return how long to pause, half of it by chance; None when the deadline is here."""
        left = self._end - now
        if left <= 0:
            return None
        pause = self._pause_s * random.uniform(0.5, 1.0)  # noqa: S311 - spreads load, keeps no secret
        self._pause_s = min(self._pause_s * 2, _LONGEST_PAUSE_S)
        return min(pause, left)
