"""What the Hub store adds to the contract; the stand-in's signatures are those of the installed package."""

from __future__ import annotations

import inspect

import huggingface_hub
import pytest

from fake_hub import FakeHub
from syncline.errors import ConfigError, StoreError
from syncline.stores import HubStore, open_store

CALLS = (
    "list_bucket_tree",
    "get_bucket_paths_info",
    "batch_bucket_files",
    "download_bucket_files",
)


@pytest.mark.parametrize("name", CALLS)
def test_the_stand_in_is_called_as_the_package_is(name: str) -> None:
    theirs = inspect.signature(getattr(huggingface_hub.HfApi, name)).parameters
    assert list(inspect.signature(getattr(FakeHub, name)).parameters) == list(theirs)


def test_a_url_names_bucket_and_prefix() -> None:
    store = open_store("hf://buckets/me/bucket/runs/a")
    assert isinstance(store, HubStore)
    assert str(store) == "hf://buckets/me/bucket/runs/a"


@pytest.mark.parametrize(
    "url", ["hf://me/model", "hf://buckets/me", "hf://buckets//x", "hf://datasets/a/b"]
)
def test_other_hub_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="hf://buckets/owner/name"):
        open_store(url)


def test_objects_lie_below_the_prefix_and_others_are_not_seen() -> None:
    hub = FakeHub()
    hub.files = {"run/a": b"1", "runs/b": b"2", "other": b"3"}
    store = HubStore("me/bucket", "run", api=hub, settle_s=0.001)
    store.put("v1/part", [b"x"])
    assert [info.key for info in store.list()] == ["a", "v1/part"]
    assert hub.files["run/v1/part"] == b"x"


def test_pieces_of_one_object_are_downloaded_once() -> None:
    hub = FakeHub()
    store = HubStore("me/bucket", api=hub, settle_s=0.001)
    store.put("a", [b"0123456789"])
    hub.calls.clear()
    assert [store.get("a", start, start + 2) for start in (0, 4, 8)] == [b"01", b"45", b"89"]
    assert hub.calls.count("download") == 1


def test_a_download_that_came_out_short_is_no_object_and_is_not_kept() -> None:
    hub = FakeHub()
    store = HubStore("me/bucket", api=hub, settle_s=0.001)
    store.put("a", [b"0123456789"])
    whole = hub.download_bucket_files

    def short(bucket_id: str, files: list, **more: object) -> None:
        whole(bucket_id, files, **more)
        for _, path in files:
            path.write_bytes(path.read_bytes()[:5])

    hub.download_bucket_files = short  # type: ignore[method-assign]
    with pytest.raises(StoreError, match=r"^get a: expected 10 bytes, the Hub gave 5"):
        store.get("a")
    hub.download_bucket_files = whole  # type: ignore[method-assign]
    assert store.get("a") == b"0123456789"


def test_what_the_package_raises_becomes_one_line_without_secrets() -> None:
    hub = FakeHub()
    store = HubStore("me/bucket", api=hub)
    hub.error = RuntimeError("403 for https://me:hidden@hub/x?token=hidden\nmore")
    with pytest.raises(StoreError, match=r"^get a: the Hub failed: 403 for https://hub/x$"):
        store.get("a")
