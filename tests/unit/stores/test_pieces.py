"""One request or many for a large object: by what a link of the test's own was seen to reward."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from syncline.errors import ObjectNotFoundError
from syncline.stores import remote, streams
from syncline.stores.remote import RemoteStore
from syncline.stores.streams import GET_STREAMS, Width


class Link:
    """A service with one object, and a clock by which so many requests at once are rewarded."""

    def __init__(self, content: bytes, pays: int) -> None:
        self.content = content
        self.pays = pays
        self.now = 0.0
        self.asked: list[tuple[int, int]] = []
        self.width = Width(GET_STREAMS, clock=lambda: self.now)
        self._lock = threading.Lock()

    def get(self, key: str, start: int, stop: int) -> bytes:
        with self._lock:
            self.asked.append((start, stop))
            self.now += (stop - start) / min(self.width.streams, self.pays)
        return self.content[start:stop]

    def stream(self, key: str, start: int, stop: int) -> Iterator[bytes]:
        if key == "missing":
            raise ObjectNotFoundError(key)
        self.asked.append((start, stop))
        for at in range(start, min(stop, len(self.content)), 5):
            self.now += 5
            yield self.content[at : min(at + 5, stop)]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCLINE_THREADS", "4")
    monkeypatch.setattr(remote, "PIECE_BYTES", 10)
    for module in (remote, streams):
        monkeypatch.setattr(module, "TRIAL_BYTES", 40)


def store_on(link: Link) -> RemoteStore:
    store = RemoteStore(link, name="link", one_request_bytes=1, decide=lambda: None)
    store._get_width = link.width
    return store


@pytest.mark.parametrize("pays", [1, 4, 8])
@pytest.mark.parametrize("nbytes", [0, 1, 10, 39, 41, 80, 81, 125, 160, 200, 777])
@pytest.mark.parametrize("said", [0, 1, 5, 50])
def test_the_object_comes_whole_however_it_is_asked_for(pays: int, nbytes: int, said: int) -> None:
    link = Link(bytes(number % 251 for number in range(nbytes)), pays)
    store = store_on(link)
    for _ in range(5):
        assert b"".join(store.pieces("key", nbytes + said)) == link.content
        assert (
            b"".join(store.pieces("key", max(0, nbytes - said)))
            == link.content[: max(0, nbytes - said)]
        )


def test_a_link_that_one_request_fills_is_asked_once_for_each_object() -> None:
    link = Link(bytes(1000), pays=1)
    store = store_on(link)
    list(store.pieces("key", 1000))
    link.asked.clear()
    list(store.pieces("key", 1000))
    assert link.asked == [(0, 1000)]


def test_a_link_that_rewards_many_requests_gets_them_within_the_first_object() -> None:
    link = Link(bytes(1000), pays=8)
    list(store_on(link).pieces("key", 1000))
    assert link.width.streams == 8
    assert sum(stop - start == 10 for start, stop in link.asked) > 90


def test_with_one_thread_an_object_is_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCLINE_THREADS", "1")
    link = Link(bytes(1000), pays=8)
    for _ in range(2):
        link.asked.clear()
        list(store_on(link).pieces("key", 1000))
        assert link.asked == [(0, 1000)]


def test_a_missing_object_is_said_to_be_missing() -> None:
    with pytest.raises(ObjectNotFoundError):
        list(store_on(Link(b"", 1)).pieces("missing", 5))
