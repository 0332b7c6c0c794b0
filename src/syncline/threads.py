"""The one pool of threads that all of Syncline computes on, and results in the order of their jobs.

The pool is made when it is first needed, with as many threads as `config.threads()` says; with 1 every job
runs where its result is asked for and no thread is made. Kernels and codecs let go of the interpreter's lock,
so that jobs run side by side. What comes out never depends on how many threads there are.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import Self, TypeVar

from syncline import config

T = TypeVar("T")
Job = Callable[[], T]

_worker = threading.local()


@cache
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Return this process's pool; a forked child has none of its parent's threads and makes its own."""
    return ThreadPoolExecutor(
        threads, thread_name_prefix=f"syncline-{process}", initializer=_mark_worker
    )


def _mark_worker() -> None:
    _worker.is_one = True


def in_order(jobs: Iterable[Job[T]], *, ahead: int | None = None) -> Generator[T, None, None]:
    """Run jobs on the pool and yield their results in the order of the jobs.

    Args:
        jobs: asked for in this thread, one by one, and never more than `ahead` before their results are
            taken; so what making a job costs overlaps the jobs that run.
        ahead: most jobs that are started and whose results are not taken; by default one more than there
            are threads.

    Raises:
        Whatever a job raises, at its place in the order. Then, and when the caller stops early, jobs that
        have not begun are dropped and running ones waited for: afterwards none touches any memory.

    Example:
        >>> list(in_order([lambda: 1, lambda: 2]))
        [1, 2]
    """
    threads = config.threads()
    if threads == 1 or getattr(_worker, "is_one", False):
        return (job() for job in jobs)
    return _in_order(_pool(threads, os.getpid()), jobs, threads + 1 if ahead is None else ahead)


def ahead(jobs: Iterable[Job[T]], most: int = 1) -> Generator[T, None, None]:
    """Yield the results of jobs that wait for something outside: while one is used, the next ones run.

    They run on threads of their own, so that waiting takes none from computing; with one thread, where
    their results are asked for. Raises as `in_order`.

    Args:
        most: how many run at once.
    """
    if config.threads() == 1:
        return (job() for job in jobs)
    return _ahead(jobs, most)


class Background:
    """Threads beside the caller's, for `most` jobs at a time; none if `config.threads()` is 1.

    As a context manager it waits for the last job, whose error comes out there unless another one does.

    Example:
        >>> done = []
        >>> with Background() as background:
        ...     background.run(lambda: done.append(1))
        >>> done
        [1]
    """

    def __init__(self, most: int = 1) -> None:
        self._most = most
        self._pool: ThreadPoolExecutor | None = None
        self._running: deque[Future[object]] = deque()

    def __enter__(self) -> Self:
        if config.threads() > 1:
            self._pool = ThreadPoolExecutor(self._most, thread_name_prefix="syncline-background")
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            if self._pool is not None:
                self._pool.shutdown()

    def run(self, job: Job[object]) -> None:
        """Start a job once there is room for it.

        Raises:
            Whatever the job that it waited for raised; then this one is not started.
        """
        self.make_room()
        if self._pool is None:
            job()
        else:
            self._running.append(_submit(self._pool, job))

    def make_room(self) -> None:
        """Wait until fewer than `most` jobs are running.

        Raises:
            Whatever the first of them raised.
        """
        while len(self._running) >= self._most:
            self._running.popleft().result()

    def finish(self) -> None:
        """Wait for the running jobs.

        Raises:
            Whatever the first of them raised that failed.
        """
        while self._running:
            self._running.popleft().result()


def _ahead(jobs: Iterable[Job[T]], most: int) -> Generator[T, None, None]:
    with ThreadPoolExecutor(most, thread_name_prefix="syncline-ahead") as pool:
        yield from _in_order(pool, jobs, most)


def _in_order(
    pool: ThreadPoolExecutor, jobs: Iterable[Job[T]], ahead: int
) -> Generator[T, None, None]:
    waiting: deque[Future[T]] = deque()
    try:
        for job in jobs:
            waiting.append(_submit(pool, job))
            if len(waiting) > ahead:
                yield _first(waiting)
        while waiting:
            yield _first(waiting)
    finally:
        for future in waiting:
            future.cancel()
        wait(waiting)


def _submit(pool: ThreadPoolExecutor, job: Job[T]) -> Future[T]:
    try:
        return pool.submit(job)
    except RuntimeError:
        if threading.main_thread().is_alive():
            raise
    # Pools take no more jobs once the main thread has ended, and other threads may work on: here, then.
    done: Future[T] = Future()
    try:
        done.set_result(job())
    except Exception as error:  # noqa: BLE001 - it comes out where the result is taken
        done.set_exception(error)
    return done


def _first(waiting: deque[Future[T]]) -> T:
    """Take the first result. Until it is there its job stays listed: Ctrl-C leaves none unwaited for."""
    result = waiting[0].result()
    waiting.popleft()
    return result
