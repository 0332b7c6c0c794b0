"""The gate itself: no pinned request ever runs while weights it does not accept are written."""

from __future__ import annotations

import asyncio
import random
import threading
import time

import pytest

from hot_load_servers import eventually
from syncline.errors import TransportTimeoutError
from syncline.hotload import Refusal, WeightVersion
from syncline.serving.admission import Admission

SEVEN = WeightVersion(exact=7)
AT_LEAST_7 = WeightVersion(minimum=7)


@pytest.fixture
def admission() -> Admission:
    made = Admission()
    made.settle(7)
    return made


def test_nothing_is_served_at_first() -> None:
    admission = Admission()
    refusal = admission.try_enter(WeightVersion(minimum=0))
    assert isinstance(refusal, Refusal)
    assert (refusal.kind, refusal.served) == ("WeightVersionNotReady", None)


def test_a_commit_waits_for_whom_it_would_break(admission: Admission) -> None:
    assert admission.try_enter(SEVEN) is True
    passed = threading.Event()
    thread = threading.Thread(target=lambda: (admission.let_pass(8, 30), passed.set()))
    thread.start()
    eventually(lambda: admission.try_enter(SEVEN) is False, "the gate has closed")
    assert not passed.is_set()
    admission.leave(SEVEN)
    thread.join()
    assert passed.is_set()
    admission.settle(8)
    refusal = admission.try_enter(SEVEN)
    assert isinstance(refusal, Refusal)
    assert refusal.kind == "WeightVersionTooOld"


def test_who_accepts_both_versions_comes_and_goes(admission: Admission) -> None:
    assert admission.try_enter(AT_LEAST_7) is True
    admission.let_pass(8, 0)
    assert admission.try_enter(AT_LEAST_7) is True
    assert admission.try_enter(WeightVersion(minimum=8)) is False
    admission.settle(8)
    assert admission.try_enter(WeightVersion(minimum=8)) is True


def test_a_way_through_older_versions_keeps_everybody_out(admission: Admission) -> None:
    """A rebuild goes 7 -> 3 -> 8: on the way there is less than anybody's minimum."""
    admission.let_pass(3, 0)
    admission.let_pass(8, 0)
    assert admission.try_enter(AT_LEAST_7) is False


def test_who_does_not_end_in_time_stops_the_commit(admission: Admission) -> None:
    assert admission.try_enter(SEVEN) is True
    with pytest.raises(TransportTimeoutError, match="1 requests that are pinned"):
        admission.let_pass(8, 0.01)
    admission.settle(7)
    assert admission.try_enter(SEVEN) is True


def test_hosts_with_threads_are_inside_for_a_block(admission: Admission) -> None:
    with admission.inside(SEVEN) as refusal:
        assert refusal is None
        with pytest.raises(TransportTimeoutError):
            admission.let_pass(8, 0)
    with admission.inside(WeightVersion(exact=8), timeout_s=0.01) as refusal:
        assert refusal == Refusal("WeightVersionNotReady", 8, 7), "a commit that does not end"
    threading.Timer(0.05, admission.settle, [8]).start()
    with admission.inside(WeightVersion(exact=8)) as refusal:
        assert refusal is None
    with admission.inside(SEVEN) as refusal:
        assert refusal == Refusal("WeightVersionTooOld", 7, 8)
    with pytest.raises(OSError, match="broke"), admission.inside(AT_LEAST_7):
        raise OSError("broke")
    assert not admission._inside


def test_closing_ends_the_wait(admission: Admission) -> None:
    assert admission.try_enter(SEVEN) is True
    threading.Timer(0.05, admission.close).start()
    with pytest.raises(TransportTimeoutError, match="version 8: the replica is closing"):
        admission.let_pass(8, 60)


def test_many_requests_and_commits_at_once(admission: Admission) -> None:
    """Each request looks at the weights from first to last byte; they are what it asked for."""
    weights = 7
    seen: list[tuple[WeightVersion, set[int]]] = []
    is_over = False

    def commit() -> None:
        nonlocal weights, is_over
        for version in range(8, 40):
            admission.let_pass(version, 60)
            weights = version
            admission.settle(version)
            time.sleep(0.002)
        is_over = True

    async def request(random_: random.Random) -> None:
        while not is_over:
            served = admission.served
            assert served is not None
            exact = random_.random() < 0.5
            wanted = WeightVersion(exact=served) if exact else WeightVersion(minimum=served)
            if admission.try_enter(wanted) is True:
                looked = set()
                for _ in range(random_.randrange(4)):
                    looked.add(weights)
                    await asyncio.sleep(0.001)
                looked.add(weights)
                admission.leave(wanted)
                seen.append((wanted, looked))
            await asyncio.sleep(0)

    async def requests() -> None:
        await asyncio.gather(*(request(random.Random(seed)) for seed in range(8)))

    thread = threading.Thread(target=commit)
    thread.start()
    asyncio.run(requests())
    thread.join()
    assert len(seen) > 30
    assert [each for each in seen if not all(map(each[0].accepts, each[1]))] == []
    assert any(wanted.exact is None and len(looked) > 1 for wanted, looked in seen)
