"""Writing that outlives a crash, and locks that do not."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from syncline import durable


def test_replace_is_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state"
    durable.replace(path, b"old")
    durable.replace(path, b"new")
    assert path.read_bytes() == b"new"
    for call in ("write", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, refuse)
            with pytest.raises(OSError, match="No space"):
                durable.replace(path, b"newer")
        assert path.read_bytes() == b"new"
        assert list(tmp_path.iterdir()) == [path]


def refuse(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_replace_is_not_misled_by_what_a_killed_process_left(tmp_path: Path) -> None:
    (tmp_path / "state.next").write_bytes(b"half")
    durable.replace(tmp_path / "state", b"whole")
    assert list(tmp_path.iterdir()) == [tmp_path / "state"]
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "state.next").symlink_to(tmp_path / "secret")
    durable.replace(tmp_path / "state", b"whole")
    assert (tmp_path / "secret").read_bytes() == b"secret"


def test_create_never_replaces(tmp_path: Path) -> None:
    durable.create(tmp_path / "a", b"1")
    with pytest.raises(FileExistsError):
        durable.create(tmp_path / "a", b"2")
    assert (tmp_path / "a").read_bytes() == b"1"


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, write = os.pwrite, os.write
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, bytes(data[:3]), at))
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, bytes(data[:3])))
    durable.create(tmp_path / "a", bytearray(b"0123456789"))
    fd = os.open(tmp_path / "a", os.O_RDWR)
    durable.write_at(fd, memoryview(b"abcdefgh"), 1)
    os.close(fd)
    assert (tmp_path / "a").read_bytes() == b"0abcdefgh9"


def test_a_lock_keeps_others_out_and_is_dropped(tmp_path: Path) -> None:
    with (
        durable.locked(tmp_path / "lock", timeout_s=0.0),
        pytest.raises(durable.BusyError, match="holds the lock"),
        durable.locked(tmp_path / "lock", timeout_s=0.05),
    ):
        pass
    with durable.locked(tmp_path / "lock", timeout_s=0.0):
        pass


def test_a_lock_is_waited_for(tmp_path: Path) -> None:
    order = []
    inside = threading.Event()

    def first() -> None:
        with durable.locked(tmp_path / "lock", timeout_s=10.0):
            inside.set()
            order.append("first")

    with durable.locked(tmp_path / "lock", timeout_s=0.0):
        waiting = threading.Thread(target=first)
        waiting.start()
        assert not inside.wait(0.05)
        order.append("holder")
    waiting.join(10.0)
    assert order == ["holder", "first"]


def test_a_lock_file_that_was_replaced_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waited for a file that is gone must take the one that has its name now."""
    path = tmp_path / "lock"
    try_lock, opened = durable.try_lock, []

    def replace_first(fd: int) -> bool:
        opened.append(os.fstat(fd).st_ino)
        if len(opened) == 1:
            path.unlink()
        return try_lock(fd)

    monkeypatch.setattr(durable, "try_lock", replace_first)
    with durable.locked(path, timeout_s=1.0):
        assert opened[-1] == path.stat().st_ino
    assert len(opened) == 2


def test_an_error_inside_a_lock_passes(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), durable.locked(tmp_path / "lock", timeout_s=0.0):
        raise ZeroDivisionError
    with durable.locked(tmp_path / "lock", timeout_s=0.0):
        pass


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    for use in (
        lambda: durable.create(tmp_path / "link", b""),
        lambda: durable.sync_file(tmp_path / "link"),
        lambda: durable.locked(tmp_path / "link", timeout_s=0.0).__enter__(),
    ):
        with pytest.raises(OSError):
            use()


def test_directories_are_made_and_flushed_from_the_top(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed = []
    monkeypatch.setattr(durable, "sync_directory", flushed.append)
    durable.make_directory(tmp_path / "a" / "b")
    assert flushed == [tmp_path.parent, tmp_path, tmp_path / "a"]
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        durable.make_directory(tmp_path / "file")


def test_a_parent_that_may_not_be_read_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_directory(path: Path) -> None:
        raise PermissionError(13, f"{path}")

    monkeypatch.setattr(durable, "sync_directory", refuse_directory)
    durable.make_directory(tmp_path)
