"""One gate for requests and commits: a request that pins versions runs only over versions it accepts.

Checking a request first and committing afterwards would let a request pinned to version N be served by
N + 1. So a commit waits until every pinned request inside accepts what comes, and a pinned request waits
outside while a commit is on its way, unless it accepts the old version and the new one.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from syncline.errors import TransportTimeoutError
from syncline.hotload import Refusal, WeightVersion


class Admission:
    """The gate of one replica; requests and the thread that commits share it.

    Requests that pin nothing need not pass it.

    Example:
        >>> admission = Admission()
        >>> admission.settle(7)
        >>> admission.try_enter(WeightVersion(exact=7))
        True
        >>> admission.leave(WeightVersion(exact=7))
        >>> admission.try_enter(WeightVersion(exact=8)).kind
        'WeightVersionNotReady'
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._served: int | None = None
        self._passing: list[int] = []
        self._inside: Counter[WeightVersion] = Counter()
        self._is_closed = False

    @property
    def served(self) -> int | None:
        """Number of the version that is served; None for none that is known to be whole."""
        return self._served

    def try_enter(self, wanted: WeightVersion) -> bool | Refusal:
        """Let a request in (True; it must `leave`), have it ask again soon (False), or refuse it."""
        with self._changed:
            is_passing = bool(self._passing)
            refusal = wanted.refusal(self._served)
            if is_passing and (refusal is not None or not all(map(wanted.accepts, self._passing))):
                return False
            if refusal is not None:
                return refusal
            self._inside[wanted] += 1
            return True

    def leave(self, wanted: WeightVersion) -> None:
        """Let go of a request that was let in."""
        with self._changed:
            self._inside[wanted] -= 1
            if not self._inside[wanted]:
                del self._inside[wanted]
            self._changed.notify_all()

    @contextmanager
    def inside(self, wanted: WeightVersion, *, timeout_s: float = 30.0) -> Iterator[Refusal | None]:
        """Be inside for the length of a `with` block; for hosts with a thread for each request.

        Yields:
            None inside; else why not: answer HTTP 409 with it. A commit on its way is waited for.

        Example:
            >>> admission = Admission()
            >>> admission.settle(7)
            >>> with admission.inside(WeightVersion(exact=6)) as refusal:
            ...     print("generate" if refusal is None else refusal.kind)
            WeightVersionTooOld
        """
        entered: bool | Refusal = False

        def has_answer() -> bool:
            nonlocal entered
            entered = self.try_enter(wanted)
            return entered is not False

        with self._changed:
            is_answered = self._changed.wait_for(has_answer, timeout_s)
        if isinstance(entered, Refusal):
            yield entered
        elif not is_answered:
            yield Refusal("WeightVersionNotReady", wanted.lowest, self._served)
        else:
            try:
                yield None
            finally:
                self.leave(wanted)

    def refusal(self, wanted: WeightVersion) -> Refusal | None:
        """Return why a request would be refused now; None if it would not."""
        with self._changed:
            return wanted.refusal(self._served)

    def let_pass(self, version: int, timeout_s: float) -> None:
        """Wait until every request inside accepts `version`, and keep out those that would not.

        The gate stays so until `settle`; call this for every version that the weights go through.

        Raises:
            TransportTimeoutError: requests that do not accept it are still running after `timeout_s`, or
                the replica was closed.
        """
        with self._changed:
            self._passing.append(version)
            is_free = self._changed.wait_for(
                lambda: self._is_closed or all(w.accepts(version) for w in self._inside), timeout_s
            )
            if self._is_closed:
                raise TransportTimeoutError(
                    f"version {version}: the replica is closing, so nobody is told of it any more",
                    version=version,
                )
            if not is_free:
                raise TransportTimeoutError(
                    f"version {version}: {self._inside.total()} requests that are pinned to other "
                    f"versions did not end in {timeout_s:g} s; the old version is still served",
                    version=version,
                )

    def settle(self, served: int | None) -> None:
        """Say which version is served from now on, and open the gate."""
        with self._changed:
            self._passing.clear()
            self._served = served
            self._changed.notify_all()

    def close(self) -> None:
        """Make a waiting `let_pass` give up at once."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
