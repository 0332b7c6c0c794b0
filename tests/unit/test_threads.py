from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

import pytest

from syncline import config, threads
from syncline.errors import ConfigError


@pytest.fixture(params=["1", "2", "5"], autouse=True)
def count(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("SYNCLINE_THREADS", request.param)
    return int(request.param)


def squares(stop: int) -> Iterator[threads.Job[int]]:
    for number in range(stop):
        yield lambda number=number: number * number


def test_results_come_in_the_order_of_their_jobs() -> None:
    def slow(number: int) -> threads.Job[int]:
        def job() -> int:
            time.sleep(0.002 * (number % 3))
            return number

        return job

    assert list(threads.in_order(map(slow, range(40)))) == list(range(40))
    assert list(threads.ahead(map(slow, range(5)))) == list(range(5))
    assert list(threads.in_order([])) == []


def test_no_more_jobs_are_asked_for_than_may_run_ahead(count: int) -> None:
    asked = 0

    def jobs() -> Iterator[threads.Job[int]]:
        nonlocal asked
        for job in squares(100):
            asked += 1
            yield job

    results = threads.in_order(jobs(), ahead=3)
    for taken in range(1, 20):
        next(results)
        assert asked <= taken + 3
    results.close()
    assert asked <= 23


def test_an_error_comes_in_its_place_and_no_job_runs_after_it() -> None:
    running = 0
    begun: list[int] = []

    def job(number: int) -> threads.Job[int]:
        def run() -> int:
            nonlocal running
            begun.append(number)
            running += 1
            try:
                time.sleep(0.005)
                if number == 3:
                    raise ValueError("three")
                return number
            finally:
                running -= 1

        return run

    results = threads.in_order(map(job, range(50)))
    with pytest.raises(ValueError, match="three"):
        list(results)
    assert running == 0
    assert len(begun) < 50
    count_then = len(begun)
    time.sleep(0.02)
    assert len(begun) == count_then


def test_jobs_inside_jobs_run_where_they_are_asked_for() -> None:
    outer = [lambda: list(threads.in_order(squares(4))) for _ in range(20)]
    assert list(threads.in_order(outer)) == [[0, 1, 4, 9]] * 20


def test_the_pool_is_shared_and_one_thread_makes_none(count: int) -> None:
    seen = set(threads.in_order(threading.current_thread for _ in range(200)))
    if count == 1:
        assert seen == {threading.current_thread()}
    else:
        assert threading.current_thread() not in seen
        assert len(seen) <= count
        again = set(threads.in_order(threading.current_thread for _ in range(200)))
        assert len(seen | again) <= count


def test_a_background_job_waits_for_the_one_before_and_its_error_comes_out() -> None:
    done: list[int] = []

    def job() -> None:
        time.sleep(0.005)
        done.append(len(done))

    with threads.Background() as background:
        for _ in range(4):
            background.run(job)
    assert done == [0, 1, 2, 3]

    def fail() -> None:
        raise ValueError("put")

    with pytest.raises(ValueError, match="put"), threads.Background() as background:
        background.run(fail)

    def stopped() -> None:
        with threads.Background() as background:
            background.run(job)
            raise KeyError

    with pytest.raises(KeyError):
        stopped()
    assert len(done) == 5
    assert not [one for one in threading.enumerate() if "background" in one.name]


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "two", "", "1025", "²"])
def test_a_number_of_threads_that_is_none_is_refused(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SYNCLINE_THREADS", value)
    with pytest.raises(ConfigError, match="SYNCLINE_THREADS: expected a number from 1 to 1024"):
        config.threads()


def test_an_interrupt_leaves_no_job_running(count: int) -> None:
    if count == 1:
        pytest.skip("no thread is made: the job itself is interrupted")
    has_ended = threading.Event()

    def slow() -> None:
        time.sleep(0.05)  # until its result is waited for
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.1)
        has_ended.set()

    with pytest.raises(KeyboardInterrupt):
        list(threads.in_order([slow]))
    assert has_ended.is_set()
