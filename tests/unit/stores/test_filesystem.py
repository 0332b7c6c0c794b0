"""What a store in a directory adds to the contract: whose directory, which links, what failures leave."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from syncline.errors import (
    ForeignDirectoryError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreError,
    VersionConflictError,
)
from syncline.stores import FilesystemStore, filesystem
from syncline.types import Step


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def store(root: Path) -> FilesystemStore:
    made = FilesystemStore(root)
    made.compare_and_swap("HEAD.json", None, b"head")
    return made


def snapshot(path: Path) -> dict[str, tuple[int, bytes]]:
    """Everything below a directory, with modification times, so that any touch shows."""
    return {
        str(entry.relative_to(path)): (
            entry.lstat().st_mtime_ns,
            entry.read_bytes() if entry.is_file() else b"",
        )
        for entry in [path, *path.rglob("*")]
    }


WRITES: dict[str, Callable[[FilesystemStore], None]] = {
    "put": lambda store: store.put("v1/a", [b"x"]),
    "swap_new": lambda store: store.compare_and_swap("HEAD.json", None, b"x"),
    "swap": lambda store: store.compare_and_swap("notes.txt", b"mine", b"x"),
    "delete": lambda store: store.delete("notes.txt"),
    "delete_missing": lambda store: store.delete("missing"),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("content", ["notes.txt", ".hidden", "weight_v000001/manifest.json"])
def test_a_foreign_directory_is_not_touched(
    root: Path, content: str, write: Callable[[FilesystemStore], None]
) -> None:
    (root / content).parent.mkdir(parents=True)
    (root / content).write_bytes(b"mine")
    before = snapshot(root)
    with pytest.raises(ForeignDirectoryError, match=r"no HEAD\.json.*choose another"):
        write(FilesystemStore(root))
    assert snapshot(root) == before


@pytest.mark.parametrize("content", [None, "lost+found", ".syncline-lock", ".nfs0001"])
def test_an_empty_directory_becomes_a_store(root: Path, content: str | None) -> None:
    root.mkdir()
    if content is not None:
        (root / content).touch()
    FilesystemStore(root).compare_and_swap("HEAD.json", None, b"x")
    assert FilesystemStore(root).get("HEAD.json") == b"x"


def test_a_missing_directory_is_said_to_be_missing(root: Path) -> None:
    reader = FilesystemStore(root)
    assert reader.list() == []
    assert reader.list("weight_v") == []
    reader.delete("HEAD.json")
    with pytest.raises(ObjectNotFoundError, match=r"no directory .*run; check the path"):
        reader.get("HEAD.json")
    assert not root.exists()


def test_reading_a_foreign_directory_makes_nothing(root: Path) -> None:
    root.mkdir()
    (root / "notes.txt").write_bytes(b"mine")
    before = snapshot(root)
    reader = FilesystemStore(root)
    with pytest.raises(ObjectNotFoundError, match=r"HEAD\.json"):
        reader.get("HEAD.json")
    reader.list()
    assert snapshot(root) == before


def test_the_root_may_be_a_link(root: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    root.symlink_to(tmp_path / "elsewhere")
    store = FilesystemStore(root)
    store.compare_and_swap("HEAD.json", None, b"x")
    store.put("v1/a", [b"y"])
    assert (tmp_path / "elsewhere" / "v1" / "a").read_bytes() == b"y"


def test_a_link_to_a_directory_is_not_followed(
    store: FilesystemStore, root: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a").write_bytes(b"secret")
    (root / "v1").symlink_to(outside)
    before = snapshot(outside)
    for use in (
        lambda: store.get("v1/a"),
        lambda: store.put("v1/b", [b"x"]),
        lambda: store.compare_and_swap("v1/a", b"secret", b"x"),
        lambda: store.delete("v1/a"),
        lambda: store.list("v1/"),
    ):
        with pytest.raises(StoreError, match="'v1' is a file or a symbolic link"):
            use()
    assert [info.key for info in store.list()] == ["HEAD.json"]
    assert snapshot(outside) == before


def test_a_link_to_a_file_is_no_object(store: FilesystemStore, root: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    (root / "a").symlink_to(tmp_path / "secret")
    with pytest.raises(StoreError, match="get a"):
        store.get("a")
    with pytest.raises(ObjectExistsError):
        store.put("a", [b"x"])
    assert [info.key for info in store.list()] == ["HEAD.json"]
    store.delete("a")
    assert (tmp_path / "secret").read_bytes() == b"secret"


def test_a_directory_or_pipe_is_no_object(store: FilesystemStore, root: Path) -> None:
    (root / "folder").mkdir()
    os.mkfifo(root / "pipe")
    for key in ("folder", "pipe"):
        with pytest.raises(StoreError, match=f"get {key} in .*no regular file"):
            store.get(key)
    assert [info.key for info in store.list()] == ["HEAD.json"]


def test_steps_are_told_in_order_and_nothing_shows_before_the_link(root: Path) -> None:
    seen: list[str] = []
    reader = FilesystemStore(root)

    def observe(step: Step) -> None:
        seen.append(step.name)
        if step.name in ("put.written", "put.flushed"):
            assert reader.list("v1/") == []
            assert list((root / "v1").glob("*")) != []
            assert list((root / "v1").glob("*.safetensors")) == []

    store = FilesystemStore(root, observe=observe)
    store.compare_and_swap("HEAD.json", None, b"1")
    store.compare_and_swap("HEAD.json", b"1", b"2")
    store.put("v1/a.safetensors", [b"x"])
    swap, put = filesystem.STEPS[4:], filesystem.STEPS[:4]
    assert tuple(seen) == (*swap, *swap, *put)


def test_every_byte_is_flushed_before_it_has_a_name(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Power may fail anywhere: the file first, then its name, then the directories."""
    events: list[str] = []
    fsync, link, rename = os.fsync, os.link, os.rename

    def traced_fsync(fd: int) -> None:
        kind = "directory" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file"
        events.append(f"flush {kind}")
        fsync(fd)

    def traced_link(*arguments: object, **keywords: object) -> None:
        events.append("name")
        link(*arguments, **keywords)  # type: ignore[arg-type]

    def traced_rename(*arguments: object, **keywords: object) -> None:
        events.append("name")
        rename(*arguments, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "fsync", traced_fsync)
    monkeypatch.setattr(os, "link", traced_link)
    monkeypatch.setattr(os, "rename", traced_rename)
    store = FilesystemStore(root)
    for write in (
        lambda: store.compare_and_swap("HEAD.json", None, b"1"),
        lambda: store.compare_and_swap("HEAD.json", b"1", b"2"),
        lambda: store.put("v1/a", [b"x"]),
    ):
        events.clear()
        write()
        assert events[-3:] == ["flush file", "name", "flush directory"]
    # The new directory v1 is an entry of the root, the root one of its parent.
    assert events[:-3] == ["flush directory", "flush directory"]


REFUSALS = [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EIO, errno.EDQUOT]


def failing(monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, refuse)


@pytest.mark.parametrize("number", REFUSALS)
@pytest.mark.parametrize("call", ["open", "write", "fsync", "link", "mkdir"])
def test_a_refused_put_leaves_nothing(
    store: FilesystemStore, root: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    with monkeypatch.context() as patch:
        failing(patch, call, number)
        with pytest.raises(StoreError, match=rf"put v1/a in .*run: {os.strerror(number)}"):
            store.put("v1/a", [b"x"])
    assert [info.key for info in store.list()] == ["HEAD.json"]
    assert list(root.rglob("*.tmp")) == []
    store.put("v1/a", [b"x"])
    assert store.get("v1/a") == b"x"


@pytest.mark.parametrize("number", REFUSALS)
@pytest.mark.parametrize("call", ["open", "write", "fsync", "rename"])
def test_a_refused_swap_leaves_the_old_content(
    store: FilesystemStore, root: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    with monkeypatch.context() as patch:
        failing(patch, call, number)
        with pytest.raises(StoreError, match=os.strerror(number)):
            store.compare_and_swap("HEAD.json", b"head", b"new")
    assert store.get("HEAD.json") == b"head"
    assert list(root.rglob("*.tmp")) == []


def test_a_disk_that_fills_up_half_way(
    store: FilesystemStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write

    def fill_up(fd: int, data: memoryview) -> int:
        if len(data) <= 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data[:3])

    monkeypatch.setattr(os, "write", fill_up)
    with pytest.raises(StoreError, match="No space left on device"):
        store.put("v1/a", [b"12345678"])
    assert [info.key for info in store.list()] == ["HEAD.json"]
    assert list(root.rglob("*.tmp")) == []


def test_short_writes_are_continued(
    store: FilesystemStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, bytes(data[:3])))
    store.put("v1/a", [b"12345678"])
    assert store.get("v1/a") == b"12345678"


def test_short_reads_are_continued(store: FilesystemStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("v1/a", [b"12345678"])
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, count, at: pread(fd, min(count, 3), at))
    assert store.get("v1/a", 1) == b"2345678"


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK])
def test_without_hard_links(
    store: FilesystemStore, root: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    failing(monkeypatch, "link", number)
    store.put("v1/a", [b"x"])
    assert store.get("v1/a") == b"x"
    with pytest.raises(ObjectExistsError):
        store.put("v1/a", [b"y"])
    store.compare_and_swap("other", None, b"1")
    with pytest.raises(VersionConflictError):
        store.compare_and_swap("other", None, b"2")
    assert list(root.rglob("*.tmp")) == []


def test_without_hard_links_a_name_taken_meanwhile_is_not_replaced(
    store: FilesystemStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, "link", errno.EOPNOTSUPP)

    def chunks() -> Iterator[bytes]:
        yield b"mine"
        (root / "v1" / "a").write_bytes(b"theirs")

    with pytest.raises(ObjectExistsError):
        store.put("v1/a", chunks())
    assert store.get("v1/a") == b"theirs"


def test_a_name_taken_meanwhile_is_not_replaced(store: FilesystemStore) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"mine"
        store.put("v1/a", [b"theirs"])

    with pytest.raises(ObjectExistsError):
        store.put("v1/a", chunks())
    assert store.get("v1/a") == b"theirs"


def test_the_hidden_file_of_a_living_writer_is_left_alone(
    store: FilesystemStore, root: Path
) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"slow "
        store.put("v1/b", [b"quick"])
        store.delete("v1/b")
        yield b"writer"

    store.put("v1/a", chunks())
    assert store.get("v1/a") == b"slow writer"


def test_a_leftover_is_removed_and_a_locked_one_is_not(store: FilesystemStore, root: Path) -> None:
    dead, alive = root / ".syncline-0.tmp", root / ".syncline-1.tmp"
    dead.touch()
    with alive.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        store.put("a", [b"x"])
        assert not dead.exists()
        assert alive.exists()
    store.put("b", [b"x"])
    assert not alive.exists()


def test_a_swap_waits_for_the_lock_only_so_long(root: Path, store: FilesystemStore) -> None:
    hasty = FilesystemStore(root, lock_timeout_s=0.0)
    with (root / ".syncline-lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(StoreError, match="another process holds the lock"):
            hasty.compare_and_swap("HEAD.json", b"head", b"new")
    hasty.compare_and_swap("HEAD.json", b"head", b"new")


def test_empty_directories_go_with_their_last_object(store: FilesystemStore, root: Path) -> None:
    store.put("v1/deep/a", [b"x"])
    store.put("v1/b", [b"x"])
    store.delete("v1/deep/a")
    assert not (root / "v1" / "deep").exists()
    store.delete("v1/b")
    assert not (root / "v1").exists()
    assert root.exists()


def test_a_link_whose_answer_was_lost_counts(
    store: FilesystemStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS may make a link, lose the answer, try again and report that the name is taken."""
    link = os.link

    def link_and_lose(*arguments: object, **keywords: object) -> None:
        link(*arguments, **keywords)  # type: ignore[arg-type]
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))

    monkeypatch.setattr(os, "link", link_and_lose)
    store.put("v1/a", [b"x"])
    assert store.get("v1/a") == b"x"
    assert list(root.rglob("*.tmp")) == []


def test_a_hidden_file_that_is_taken_for_a_leftover_is_made_again(
    store: FilesystemStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between being made and being locked a hidden file looks like one of a dead writer."""
    flock, removed = fcntl.flock, []

    def remove_first(fd: int, operation: int) -> None:
        if not removed:
            for path in root.rglob("*.tmp"):
                path.unlink()
                removed.append(path)
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    store.put("v1/a", [b"x"])
    assert len(removed) == 1
    assert store.get("v1/a") == b"x"


def test_a_file_system_without_flock_is_refused(
    store: FilesystemStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    for write in (
        lambda: store.put("v1/a", [b"x"]),
        lambda: store.compare_and_swap("HEAD.json", b"head", b"new"),
    ):
        with pytest.raises(StoreError, match="No locks available"):
            write()
    assert store.get("HEAD.json") == b"head"
    assert list(root.rglob("*.tmp")) == []


def test_a_file_that_shrinks_while_it_is_read(
    store: FilesystemStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("v1/a", [b"12345678"])
    monkeypatch.setattr(os, "pread", lambda fd, count, at: b"")
    with pytest.raises(StoreError, match="get v1/a in .*ends at byte 0, its size is 8"):
        store.get("v1/a")


def test_a_directory_that_cannot_be_removed(
    store: FilesystemStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("v1/a", [b"x"])
    failing(monkeypatch, "rmdir", errno.EACCES)
    with pytest.raises(StoreError, match="delete v1/a in .*Permission denied"):
        store.delete("v1/a")
    assert store.list("v1/") == []
