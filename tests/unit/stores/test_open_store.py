"""Which store a path or URL opens."""

from __future__ import annotations

from pathlib import Path

import pytest
from obstore.exceptions import GenericError

from syncline.errors import ConfigError
from syncline.stores import FilesystemStore, MemoryStore, ObjectStore, open_store
from syncline.stores.obstore_errors import mapped


def test_paths_open_the_filesystem(tmp_path: Path) -> None:
    for where in (tmp_path / "run", str(tmp_path / "run"), f"file://{tmp_path}/run"):
        store = open_store(where)
        assert isinstance(store, FilesystemStore)
        assert store.path == tmp_path / "run"
    assert not (tmp_path / "run").exists()


def test_escapes_in_file_urls_are_undone() -> None:
    store = open_store("file://localhost/a%20b")
    assert isinstance(store, FilesystemStore)
    assert store.path == Path("/a b")


def test_memory_urls_open_a_store_of_their_own() -> None:
    first, second = open_store("memory://"), open_store("memory://")
    assert isinstance(first, MemoryStore)
    first.put("a", [b"x"])
    assert second.list() == []


def test_other_urls_open_obstore() -> None:
    assert isinstance(open_store("s3://bucket/prefix"), ObjectStore)


@pytest.mark.parametrize("url", ["nonsense://user:secret@host/x", "file://host/x", "file://"])
def test_unknown_urls_are_refused_without_showing_secrets(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("where", [None, "", 7])
def test_what_is_no_place_is_refused(where: object) -> None:
    with pytest.raises(ConfigError, match="expected a path or URL"):
        open_store(where)  # type: ignore[arg-type]


def test_a_url_with_one_slash_is_no_directory() -> None:
    with pytest.raises(ConfigError, match="s3://bucket/run"):
        open_store("s3:/bucket/run")
    assert isinstance(open_store("./s3:/bucket/run"), FilesystemStore)


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        ("HTTP error: builder error", "AWS_ALLOW_HTTP"),
        ("PUT http://169.254.169.254/latest/api/token: 403 Forbidden", "no credentials"),
        ("status code: 404 Not Found: <?xml", "does the bucket exist"),
        ("something else", None),
    ],
)
def test_everyday_mistakes_with_an_object_store_are_told(message: str, hint: str | None) -> None:
    text = str(mapped("get a", GenericError(message)))
    assert text.startswith(f"get a: {message}")
    assert (hint in text) if hint is not None else text.endswith(message)
