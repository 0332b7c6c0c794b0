"""Where the seconds of one operation went: nested phases, each charged only for its own time."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import AbstractContextManager, closing
from typing import TypeVar

from syncline.trace import Trace

T = TypeVar("T")


class Phases:
    """Accumulate exclusive seconds by phase name, over all threads that work for the operation.

    Phases of several threads overlap, so together they may be more than `total`.

    Args:
        trace: told when every phase began and ended, and on which thread.

    Example:
        >>> phases = Phases()
        >>> with phases("encode"):
        ...     with phases("diff"):
        ...         pass
        >>> sorted(phases.seconds())
        ['diff', 'encode', 'total']
    """

    def __init__(self, trace: Trace | None = None) -> None:
        self._trace = trace
        self._seconds: dict[str, float] = {}
        self._adding = threading.Lock()
        self._here = _Running()
        self._started_s = time.perf_counter()

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """Charge what happens inside to `name`, and nothing of it to the phase around it."""
        return _Phase(self, name)

    def _begin(self, name: str) -> float:
        started_s = self._charge()
        self._here.names.append(name)
        return started_s

    def _end(self, name: str, started_s: float) -> None:
        ended_s = self._charge()
        self._here.names.pop()
        if self._trace is not None:
            self._trace.add(name, started_s, ended_s)

    def seconds(self) -> dict[str, float]:
        """Return seconds by phase; `total` is all the time since the start."""
        return {**self._seconds, "total": time.perf_counter() - self._started_s}

    def _charge(self) -> float:
        """Charge the time since the last call in this thread to the innermost phase; return the time."""
        now_s = time.perf_counter()
        if self._here.names:
            name = self._here.names[-1]
            with self._adding:
                self._seconds[name] = self._seconds.get(name, 0.0) + now_s - self._here.mark_s
        self._here.mark_s = now_s
        return now_s


def waiting(
    items: Generator[T, None, None], phases: Phases, name: str = "wait"
) -> Generator[T, None, None]:
    """Yield what a generator yields, and charge the time until each is there to a phase; closes it at the end."""
    with closing(items):
        while True:
            with phases(name):
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item


class _Phase(AbstractContextManager[None]):
    """One run of a phase. A class, since a window has several and a generator takes twice as long."""

    __slots__ = ("_name", "_phases", "_started_s")

    def __init__(self, phases: Phases, name: str) -> None:
        self._phases = phases
        self._name = name

    def __enter__(self) -> None:
        self._started_s = self._phases._begin(self._name)  # noqa: SLF001

    def __exit__(self, *_: object) -> None:
        self._phases._end(self._name, self._started_s)  # noqa: SLF001


class _Running(threading.local):
    """The phases that have begun in a thread, outermost first, and since when time is not charged."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.mark_s = 0.0
