"""What a store over obstore adds to the contract: hidden pieces, services that lack something, plain errors."""

from __future__ import annotations

import time
from pathlib import Path

import obstore
import obstore.store
import pytest
from obstore.exceptions import GenericError

from syncline.errors import (
    ObjectExistsError,
    ObjectNotFoundError,
    StoreError,
    TransportUnavailableError,
    VersionConflictError,
)
from syncline.stores import ObjectStore


@pytest.fixture
def service() -> obstore.store.MemoryStore:
    return obstore.store.MemoryStore()


@pytest.fixture
def store(service: obstore.store.MemoryStore) -> ObjectStore:
    return ObjectStore(service, one_request_bytes=4)


def keys(service: obstore.store.MemoryStore) -> list[str]:
    return sorted(meta["path"] for batch in obstore.list(service) for meta in batch)


def test_a_large_object_goes_up_in_pieces_that_are_gone_afterwards(
    store: ObjectStore, service: obstore.store.MemoryStore
) -> None:
    pieces = [bytes([value]) * 1_000_000 for value in range(12)]
    store.put("v1/part", pieces)
    assert store.get("v1/part") == b"".join(pieces)
    assert keys(service) == ["v1/part"]
    with pytest.raises(ObjectExistsError):
        store.put("v1/part", [b"another large one"])
    assert keys(service) == ["v1/part"]


def test_hidden_objects_are_not_listed(
    store: ObjectStore, service: obstore.store.MemoryStore
) -> None:
    obstore.put(service, "v1/.syncline-00", b"left by a killed writer")
    store.put("v1/a", [b"x"])
    assert [info.key for info in store.list()] == ["v1/a"]


def test_a_failing_copy_leaves_nothing(
    store: ObjectStore, service: obstore.store.MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise GenericError("no copy today\n\nDebug source:\n...")

    monkeypatch.setattr(obstore, "copy", refuse)
    with pytest.raises(StoreError, match=r"^put v1/part: no copy today$"):
        store.put("v1/part", [b"larger than four"])
    assert keys(service) == []


def test_a_hidden_piece_that_cannot_be_removed_does_not_hide_the_error(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise GenericError("no delete today")

    store.put("v1/part", [b"x"])
    monkeypatch.setattr(obstore, "delete", refuse)
    with pytest.raises(ObjectExistsError):
        store.put("v1/part", [b"larger than four"])


def test_a_service_without_conditional_puts_is_refused(tmp_path: Path) -> None:
    store = ObjectStore(obstore.store.LocalStore(tmp_path))
    store.compare_and_swap("HEAD.json", None, b"1")
    with pytest.raises(TransportUnavailableError, match="lacks a conditional operation") as caught:
        store.compare_and_swap("HEAD.json", b"1", b"2")
    assert "\n" not in str(caught.value)
    assert store.get("HEAD.json") == b"1"


def test_a_service_without_entity_tags_is_refused(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("HEAD.json", [b"1"])

    class Untagged:
        meta = {"e_tag": None, "version": None}  # noqa: RUF012

        def bytes(self) -> bytes:
            return b"1"

    monkeypatch.setattr(obstore, "get", lambda service, key: Untagged())
    with pytest.raises(TransportUnavailableError, match="entity tag"):
        store.compare_and_swap("HEAD.json", b"1", b"2")


def test_a_swap_that_meets_another_between_reading_and_writing(
    store: ObjectStore, service: obstore.store.MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.compare_and_swap("HEAD.json", None, b"1")
    get = obstore.get

    def get_then_lose(service: obstore.store.MemoryStore, key: str, **how: object) -> object:
        found = get(service, key, **how)
        obstore.put(service, key, b"theirs")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(obstore, "get", get_then_lose)
        with pytest.raises(VersionConflictError):
            ObjectStore(service).compare_and_swap("HEAD.json", b"1", b"2")
    assert store.get("HEAD.json") == b"theirs"


def test_errors_are_one_line_and_name_the_key(store: ObjectStore) -> None:
    with pytest.raises(ObjectNotFoundError) as caught:
        store.get("v1/missing")
    assert str(caught.value).startswith("get v1/missing: ")
    assert "\n" not in str(caught.value)


def test_a_swap_whose_known_tag_is_old_still_goes_by_the_content(store: ObjectStore) -> None:
    store.compare_and_swap("HEAD.json", None, b"1")
    store.delete("HEAD.json")
    store.put("HEAD.json", [b"1"])  # the same content under another tag
    store.compare_and_swap("HEAD.json", b"1", b"2")
    assert store.get("HEAD.json") == b"2"
    store.delete("HEAD.json")
    store.put("HEAD.json", [b"3"])
    with pytest.raises(VersionConflictError):
        store.compare_and_swap("HEAD.json", b"2", b"4")
    assert store.get("HEAD.json") == b"3"


def test_a_second_swap_asks_for_nothing_first(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.compare_and_swap("HEAD.json", None, b"1")

    def get(*_: object, **__: object) -> None:
        raise AssertionError("a swap of what this store wrote itself is one request")

    monkeypatch.setattr(obstore, "get", get)
    store.compare_and_swap("HEAD.json", b"1", b"2")


def test_puts_that_wait_for_a_lease_are_not_made_more(service: obstore.store.MemoryStore) -> None:
    assert ObjectStore(service, writes="conditional").puts_at_once == 4
    assert ObjectStore(service, writes="lease").puts_at_once == 1


def test_a_large_object_is_one_request_where_puts_were_fast(
    service: obstore.store.MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    copies: list[str] = []
    copy = obstore.copy

    def copied(service: obstore.store.MemoryStore, source: str, key: str, **how: object) -> None:
        copies.append(key)
        copy(service, source, key, **how)

    monkeypatch.setattr(obstore, "copy", copied)
    put = obstore.put

    def taking_s(seconds: float) -> None:
        def slowly(*what: object, **how: object) -> object:
            now[0] += seconds
            return put(*what, **how)

        monkeypatch.setattr(obstore, "put", slowly)

    store = ObjectStore(service, deadline_s=0)
    large = [bytes(20 << 20)] * 2
    taking_s(1)
    store.put("unknown", large)
    store.put("fast", large)
    taking_s(30)
    store.put("slower", [bytes(20 << 20)])
    store.put("slow", large)
    assert copies == ["unknown", "slow"]
    for key in ("unknown", "fast", "slow"):
        assert store.get(key) == b"".join(large)
