"""How many requests at once, when to try again, what hooks are told, and what is waited for."""

from __future__ import annotations

import threading

import pytest
from obstore.exceptions import GenericError, PermissionDeniedError

from syncline.errors import ConfigError, ObjectNotFoundError
from syncline.stores import HookedStore, LaggingStore, MemoryStore
from syncline.stores.obstore_errors import is_passing, without_secrets
from syncline.stores.patience import Patience
from syncline.stores.streams import (
    GET_STREAMS,
    MOST_STREAMS,
    PUT_STREAMS,
    TRIAL_BYTES,
    Width,
    ordered,
)


class Link:
    """A link on which so many streams at once are rewarded, and no more are faster."""

    def __init__(self, streams_that_pay: int) -> None:
        self.pay = streams_that_pay
        self.now = 0.0

    def move(self, width: Width) -> None:
        self.now += 1 / min(width.streams, self.pay)
        width.moved(TRIAL_BYTES)


@pytest.mark.parametrize(("pay", "expected"), [(1, 1), (2, 4), (4, 4), (8, 8), (100, MOST_STREAMS)])
def test_as_many_streams_as_the_link_rewards(pay: int, expected: int) -> None:
    link = Link(pay)
    width = Width(GET_STREAMS, clock=lambda: link.now)
    width.begin()
    for _ in range(12):
        link.move(width)
    assert width.streams == expected


def test_threads_that_share_a_width_never_ask_for_fewer_streams_than_one() -> None:
    """Both measure that four are no faster than one; only one of them takes it back."""
    now, others = [0.0], []

    def clock() -> float:
        now[0] += 1.0
        if now[0] == 3.0:
            others.append(threading.Thread(target=width.moved, args=(TRIAL_BYTES,)))
            others[0].start()
            others[0].join(0.2)  # it is through by then, or waits for its turn
        return now[0]

    width = Width(GET_STREAMS, clock=clock)
    width.begin()
    width.moved(TRIAL_BYTES)
    assert width.streams == 4
    width.moved(TRIAL_BYTES)
    others[0].join()
    assert width.streams == 1


def test_pieces_under_way_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCLINE_THREADS", "4")
    lock, at_once, most = threading.Lock(), 0, 0

    def fetch(start: int) -> bytes:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        with lock:
            at_once -= 1
        return b"%d " % start

    found = b"".join(ordered(range(100), fetch, Width(PUT_STREAMS)))
    assert found.split() == [b"%d" % number for number in range(100)]
    assert most <= MOST_STREAMS


def test_a_piece_that_fails_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCLINE_THREADS", "4")

    def fetch(start: int) -> bytes:
        if start == 5:
            raise ValueError("five")
        return b"x"

    with pytest.raises(ValueError, match="five"):
        list(ordered(range(100), fetch, Width(PUT_STREAMS)))
    assert not [thread for thread in threading.enumerate() if "syncline-stream" in thread.name]


def test_pauses_grow_and_end_with_the_deadline() -> None:
    now, pauses = [0.0], []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds

    def fail() -> None:
        raise OSError("again")

    patience = Patience(20.0, clock=lambda: now[0], sleep=sleep)
    with pytest.raises(OSError, match="again"):
        patience.call(fail, lambda error: True)
    assert sum(pauses) == pytest.approx(20.0)
    assert max(pauses) <= 5.0
    assert pauses[0] <= 0.1 < max(pauses)
    with pytest.raises(OSError, match="again"):
        Patience(20.0, sleep=lambda seconds: pytest.fail("slept")).call(fail, lambda error: False)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (GenericError("Server returned non-2xx status code: 503 Service Unavailable"), True),
        (GenericError("Server returned non-2xx status code: 429 Too Many Requests"), True),
        (GenericError("Server returned non-2xx status code: 400 Bad Request"), False),
        (GenericError("HTTP error: error sending request"), True),
        (GenericError("HTTP error: builder error"), False),
        (GenericError("Generic InMemory error: Wanted range starting at 11"), False),
        (PermissionDeniedError("Server returned non-2xx status code: 403"), False),
        (ValueError("response body"), False),
    ],
)
def test_what_may_pass(error: Exception, expected: bool) -> None:
    assert is_passing(error) is expected


@pytest.mark.parametrize(
    "text",
    [
        "GET https://me:hidden@host/a failed",
        "PUT https://account.blob.host/c/k?sv=1&sig=hidden in 3ms",
        "s3://key:hidden@bucket/run",
        "two: http://a/b?x=hidden and http://hidden:hidden@c/d",
    ],
)
def test_secrets_are_left_out(text: str) -> None:
    assert "hidden" not in without_secrets(text)
    assert without_secrets("GET https://host/a/b failed: 404") == "GET https://host/a/b failed: 404"


def test_hooks_are_told_of_every_write_and_before_every_reading() -> None:
    told: list[str] = []
    store = HookedStore(
        MemoryStore(),
        post_write=lambda key: told.append(f"wrote {key}"),
        pre_read=lambda key: told.append(f"reading {key}"),
    )
    store.put("a", [b"12"])
    store.get("a")
    store.get("a", 1)  # goes on with an object that was begun
    list(store.pieces("a", 2))
    store.list("v")
    store.compare_and_swap("HEAD.json", None, b"x")
    store.delete("a")
    assert told == [
        "wrote a", "reading a", "reading a", "reading v", "reading HEAD.json", "wrote HEAD.json", "wrote a",
    ]  # fmt: skip


def test_a_failing_hook_fails_the_write() -> None:
    def refuse(key: str) -> None:
        raise RuntimeError("volume is gone")

    with pytest.raises(RuntimeError, match="volume is gone"):
        HookedStore(MemoryStore(), post_write=refuse).put("a", [b"x"])


def test_what_appears_within_the_lag_is_found_and_head_is_not_waited_for() -> None:
    inner = MemoryStore()
    sleeps: list[float] = []

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        if len(sleeps) == 2:
            inner.put("v1/part", [b"late"])

    store = LaggingStore(inner, 1000.0, sleep=sleep)
    assert store.get("v1/part") == b"late"
    assert len(sleeps) == 2
    with pytest.raises(ObjectNotFoundError):
        store.get("HEAD.json")
    assert len(sleeps) == 2
    with pytest.raises(ConfigError, match="within_s"):
        LaggingStore(inner, 0.0)
