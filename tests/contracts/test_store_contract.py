"""What every store promises, over every store there is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import obstore.store
import pytest

from fake_hub import FakeHub
from s3_server import s3_service
from syncline.abc import Store
from syncline.errors import (
    ConfigError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreError,
    VersionConflictError,
)
from syncline.stores import (
    FilesystemStore,
    HookedStore,
    HubStore,
    LaggingStore,
    MemoryStore,
    ObjectStore,
)
from syncline.stores.passing import PassingStore
from syncline.stores.writes import Leased, lease_on
from syncline.sync.metered import MeteredStore
from syncline.types import ObjectInfo


class Ticks:
    """A clock of one second a look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def leased(path: Path) -> Store:
    return leased_by(obstore.store.MemoryStore(), settle_s=0.01)


def leased_by(service: Any, *, settle_s: float) -> Store:
    store = ObjectStore(service, one_request_bytes=3, writes="lease")
    store._writes = Leased(store._service, lease_on(store._service, lasts_s=5.0, settle_s=settle_s))
    return store


def hub_in_pieces(path: Path) -> Store:
    store = HubStore("me/bucket", api=FakeHub(), lasts_s=5.0, settle_s=0.01)
    store._one_request_bytes = 3
    return store


MAKERS: dict[str, Callable[[Path], Store]] = {
    "memory": lambda path: MemoryStore(),
    "filesystem": lambda path: FilesystemStore(path / "store"),
    "object_store": lambda path: ObjectStore(obstore.store.MemoryStore()),
    "object_store_in_pieces": lambda path: ObjectStore(
        obstore.store.MemoryStore(), one_request_bytes=3
    ),
    "hooked": lambda path: HookedStore(
        MemoryStore(), post_write=lambda key: None, pre_read=lambda key: None
    ),
    "lagging": lambda path: LaggingStore(
        MemoryStore(), 1.0, sleep=lambda seconds: None, clock=Ticks()
    ),
    "hub": lambda path: HubStore("me/bucket", "run", api=FakeHub(), lasts_s=5.0, settle_s=0.01),
    "hub_in_pieces": hub_in_pieces,
    "leased": leased,
}
"""Stores that need nothing but this process."""

S3_OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {},
    "s3_in_pieces": {"one_request_bytes": 3},
    "s3_through_a_proxy": {},
}


CEPH = pytest.param("s3_of_ceph", marks=pytest.mark.slow)


@pytest.fixture(params=[*sorted([*MAKERS, *S3_OPTIONS]), CEPH])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "s3_of_ceph":
        gateway, prefix = map(request.getfixturevalue, ("ceph_gateway", "s3_prefix"))
        return leased_by(s3_service(gateway.url, prefix), settle_s=0.05)
    if request.param not in S3_OPTIONS:
        return MAKERS[request.param](tmp_path)
    endpoint = request.getfixturevalue("s3_server").url
    if request.param == "s3_through_a_proxy":
        endpoint = request.getfixturevalue("faulty_proxy").url
    service = s3_service(endpoint, request.getfixturevalue("s3_prefix"))
    return ObjectStore(service, **S3_OPTIONS[request.param])


def test_put_then_get(store: Store) -> None:
    store.put("v1/part", [b"ab", bytearray(b"cd"), memoryview(b"ef")])
    assert store.get("v1/part") == b"abcdef"


@pytest.mark.parametrize("chunks", [[], [b""], [b"", b"x", b""]])
def test_put_of_empty_chunks(store: Store, chunks: list[bytes]) -> None:
    store.put("key", chunks)
    assert store.get("key") == b"".join(chunks)


def test_put_copies_a_buffer_that_is_reused(store: Store) -> None:
    buffer = bytearray(2)

    def chunks() -> Iterator[memoryview]:
        for value in range(5):
            buffer[:] = bytes([value, value])
            yield memoryview(buffer)

    store.put("key", chunks())
    assert store.get("key") == bytes([0, 0, 1, 1, 2, 2, 3, 3, 4, 4])


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [
        (0, None, b"0123456789"),
        (3, None, b"3456789"),
        (3, 5, b"34"),
        (8, 99, b"89"),
        (10, None, b""),
        (11, 99, b""),
        (4, 4, b""),
        (5, 4, b""),
        (0, 0, b""),
    ],
)
def test_get_range_is_clipped(store: Store, start: int, stop: int | None, expected: bytes) -> None:
    store.put("key", [b"0123456789"])
    assert store.get("key", start, stop) == expected


@pytest.mark.parametrize("size_bytes", [0, 1, 9, 10, 12])
def test_pieces_come_in_order(store: Store, size_bytes: int) -> None:
    store.put("key", [b"0123456789"])
    assert b"".join(store.pieces("key", size_bytes)) == b"0123456789"[:size_bytes]


def test_pieces_of_a_missing_object(store: Store) -> None:
    with pytest.raises(ObjectNotFoundError, match="a/missing"):
        list(store.pieces("a/missing", 2))


def test_many_pieces_come_in_order(store: Store) -> None:
    content = b"".join(bytes([number]) * (5 << 20) for number in range(5))
    store.put("v1/part", [content[:1], content[1:]])
    assert b"".join(store.pieces("v1/part", len(content))) == content


def test_a_store_says_where_it_is_in_one_line(store: Store) -> None:
    assert str(store)
    assert "\n" not in str(store)
    assert "test-secret" not in str(store) + repr(store)


def test_get_of_a_missing_object(store: Store) -> None:
    for start, stop in ((0, None), (1, None), (1, 2), (2, 1)):
        with pytest.raises(ObjectNotFoundError, match="a/missing"):
            store.get("a/missing", start, stop)


def test_put_creates_only(store: Store) -> None:
    store.put("v1/part", [b"first, and longer"])
    with pytest.raises(ObjectExistsError, match="v1/part"):
        store.put("v1/part", [b"second"])
    with pytest.raises(ObjectExistsError, match="v1/part"):
        store.put("v1/part", [b"third, and much longer than the others"])
    assert store.get("v1/part") == b"first, and longer"
    assert store.list() == [ObjectInfo("v1/part", 17)]


@pytest.mark.parametrize(
    "fault", [ValueError("mine"), OSError(5, "mine"), FileNotFoundError("mine")]
)
@pytest.mark.parametrize("before", [[], [b"ab"], [b"longer than three"]])
def test_error_of_the_chunks_passes_and_leaves_nothing(
    store: Store, fault: Exception, before: list[bytes]
) -> None:
    def chunks() -> Iterator[bytes]:
        yield from before
        raise fault

    with pytest.raises(type(fault), match="mine") as caught:
        store.put("v1/part", chunks())
    assert caught.value is fault
    assert not isinstance(caught.value, StoreError)
    assert store.list() == []
    store.put("v1/part", [b"whole"])
    assert store.get("v1/part") == b"whole"


def test_list_is_sorted_and_by_string_prefix(store: Store) -> None:
    for key in ("v2/b", "v1/a", "v10/a", "v1/b", "other", "v1/deep/c"):
        store.put(key, [key.encode()])
    listed = [info.key for info in store.list()]
    assert listed == ["other", "v1/a", "v1/b", "v1/deep/c", "v10/a", "v2/b"]
    assert [info.key for info in store.list("v1")] == ["v1/a", "v1/b", "v1/deep/c", "v10/a"]
    assert [info.key for info in store.list("v1/")] == ["v1/a", "v1/b", "v1/deep/c"]
    assert [info.key for info in store.list("v1/de")] == ["v1/deep/c"]
    assert store.list("v3/") == []
    assert {info.key: info.size_bytes for info in store.list()} == {key: len(key) for key in listed}


def test_a_new_store_is_empty(store: Store) -> None:
    assert store.list() == []
    store.delete("nothing")
    assert store.list() == []


def test_swap_creates_only_where_nothing_is(store: Store) -> None:
    store.compare_and_swap("HEAD.json", None, b"1")
    assert store.get("HEAD.json") == b"1"
    with pytest.raises(VersionConflictError, match="HEAD"):
        store.compare_and_swap("HEAD.json", None, b"2")
    assert store.get("HEAD.json") == b"1"


def test_swap_needs_the_expected_content(store: Store) -> None:
    with pytest.raises(VersionConflictError, match="HEAD"):
        store.compare_and_swap("HEAD.json", b"1", b"2")
    assert store.list() == []
    store.compare_and_swap("HEAD.json", None, b"1")
    store.compare_and_swap("HEAD.json", b"1", b"22")
    with pytest.raises(VersionConflictError, match="HEAD"):
        store.compare_and_swap("HEAD.json", b"1", b"3")
    store.compare_and_swap("HEAD.json", b"22", b"")
    store.compare_and_swap("HEAD.json", b"", b"4")
    assert store.get("HEAD.json") == b"4"
    assert store.list() == [ObjectInfo("HEAD.json", 1)]


def test_one_of_many_swaps_wins(store: Store) -> None:
    store.compare_and_swap("HEAD.json", None, b"start")
    won, lost = [], []
    barrier = threading.Barrier(8)

    def swap(number: int) -> None:
        barrier.wait()
        try:
            store.compare_and_swap("HEAD.json", b"start", b"%d" % number)
            won.append(number)
        except VersionConflictError:
            lost.append(number)

    run_all([lambda number=number: swap(number) for number in range(8)])
    assert len(won) == 1
    assert len(lost) == 7
    assert store.get("HEAD.json") == b"%d" % won[0]


def test_one_of_many_puts_wins(store: Store) -> None:
    store.compare_and_swap("HEAD.json", None, b"")
    won, lost = [], []
    barrier = threading.Barrier(8)

    def put(number: int) -> None:
        barrier.wait()
        try:
            store.put("v1/part", [b"%d" % number] * 3)
            won.append(number)
        except ObjectExistsError:
            lost.append(number)

    run_all([lambda number=number: put(number) for number in range(8)])
    assert len(won) == 1
    assert len(lost) == 7
    assert store.get("v1/part") == b"%d" % won[0] * 3


def test_swaps_count_without_loss(store: Store) -> None:
    store.compare_and_swap("count", None, b"0")

    def count() -> None:
        for _ in range(5):
            while True:
                old = store.get("count")
                try:
                    store.compare_and_swap("count", old, b"%d" % (int(old) + 1))
                    break
                except VersionConflictError:
                    continue

    run_all([count] * 4)
    assert store.get("count") == b"20"


def test_delete(store: Store) -> None:
    for key in ("v1/a", "v1/b", "v2/a"):
        store.put(key, [b"x"])
    store.delete("v1/a")
    store.delete("v1/a")
    store.delete("v3/a")
    assert [info.key for info in store.list()] == ["v1/b", "v2/a"]
    with pytest.raises(ObjectNotFoundError):
        store.get("v1/a")
    store.put("v1/a", [b"again"])
    assert store.get("v1/a") == b"again"


def test_writes_in_a_turn_are_as_others(store: Store) -> None:
    with store.turn():
        store.compare_and_swap("HEAD.json", None, b"0")
        with store.turn():
            run_all(
                [
                    lambda number=number: store.put(f"v1/{number}", [b"long" * 2])
                    for number in range(4)
                ]
            )
        with pytest.raises(ObjectExistsError, match="v1/2"):
            store.put("v1/2", [b"second"])
        with pytest.raises(VersionConflictError, match="HEAD"):
            store.compare_and_swap("HEAD.json", b"1", b"2")
        store.delete("v1/0")
        store.compare_and_swap("HEAD.json", b"0", b"1")
    with pytest.raises(ValueError, match="mine"), store.turn():
        raise ValueError("mine")
    store.compare_and_swap("HEAD.json", b"1", b"2")
    assert [info.key for info in store.list()] == ["HEAD.json", "v1/1", "v1/2", "v1/3"]
    assert store.get("v1/2") == b"long" * 2


@pytest.mark.parametrize(
    "key",
    ["", "/a", "a/", "a//b", ".", "..", "a/../b", "../a", ".hidden", "a/.hidden", "a\\b", "a\0b", "a\n",
     "x" * 256, "a/\udc80"],
)  # fmt: skip
def test_illegal_keys_are_refused_everywhere(store: Store, key: str) -> None:
    for use in (
        lambda: store.put(key, [b"x"]),
        lambda: store.get(key),
        lambda: store.compare_and_swap(key, None, b"x"),
        lambda: store.delete(key),
    ):
        with pytest.raises(ConfigError, match="key"):
            use()
    assert store.list() == []


@pytest.mark.parametrize("prefix", ["/", "../", "a//", ".h", "a/../"])
def test_illegal_prefixes_are_refused(store: Store, prefix: str) -> None:
    with pytest.raises(ConfigError, match="key"):
        store.list(prefix)


class Busy(MemoryStore):
    """A store that says of itself everything that a store may say, and counts its turns."""

    turns = 0

    visible_within_s = 7.0
    is_remote = True
    puts_at_once = 3

    @contextmanager
    def turn(self) -> Iterator[None]:
        self.turns += 1
        yield

    def __str__(self) -> str:
        return "busy"


@pytest.mark.parametrize(
    "around",
    [PassingStore, HookedStore, lambda store: LaggingStore(store, 7.0), MeteredStore],
    ids=["passing", "hooked", "lagging", "metered"],
)
def test_a_store_that_passes_calls_on_says_what_its_store_says(
    around: Callable[[Store], Store],
) -> None:
    busy = Busy()
    found = around(busy)
    with found.turn():
        assert busy.turns == 1
    assert (found.visible_within_s, found.is_remote, found.puts_at_once) == (7.0, True, 3)
    assert str(found) == "busy"


def run_all(jobs: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
