"""Where the seconds of one operation went: nested phases, each charged only for its own time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Phases:
    """Accumulate exclusive wall-clock seconds by phase name.

    Example:
        >>> phases = Phases()
        >>> with phases("encode"):
        ...     with phases("diff"):
        ...         pass
        >>> sorted(phases.seconds())
        ['diff', 'encode', 'total']
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._running: list[str] = []
        self._started_s = self._mark_s = time.perf_counter()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Charge what happens inside to `name`, and nothing of it to the phase around it."""
        self._charge()
        self._running.append(name)
        try:
            yield
        finally:
            self._charge()
            self._running.pop()

    def seconds(self) -> dict[str, float]:
        """Return seconds by phase; `total` is all the time since the start."""
        return {**self._seconds, "total": time.perf_counter() - self._started_s}

    def _charge(self) -> None:
        now_s = time.perf_counter()
        if self._running:
            name = self._running[-1]
            self._seconds[name] = self._seconds.get(name, 0.0) + now_s - self._mark_s
        self._mark_s = now_s
