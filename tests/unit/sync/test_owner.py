"""Locks of followers in directories that are shared with other users, or cannot be used."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from syncline.errors import CommitError
from syncline.stores import MemoryStore
from syncline.sync import owner
from syncline.sync.owner import Owner
from syncline.vllm.server import VllmServer
from vllm_fakes import FakeVllm, tensors


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_the_lock_of_another_users_dead_follower_is_taken(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be read and no more, not even be opened to be made if it were not there, nor removed afterwards."""
    first = Owner()
    first.claim("a start")
    [lock] = temporary.iterdir()
    first.release()
    lock.touch()
    real = os.open

    def sticky(path: object, flags: int, *arguments: int, **more: int) -> int:
        if path == lock and (
            (flags & os.O_CREAT and not flags & os.O_EXCL) or flags & os.O_ACCMODE
        ):
            kind = FileExistsError if flags & os.O_EXCL else PermissionError
            raise kind(13, "Permission denied")
        return real(path, flags, *arguments, **more)

    def kept(path: Path, **_: bool) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(os, "open", sticky)
    monkeypatch.setattr(Path, "unlink", kept)
    files = _open_files()
    for _ in range(2):  # whoever could not remove it has closed it, and is not kept out by itself
        mine, second = Owner(), Owner()
        assert mine.claim("a start") and not mine.claim("a start")
        with pytest.raises(CommitError, match="another follower"):
            second.claim("a start")
        mine.release()
        assert _open_files() == files


def test_a_system_without_a_place_for_temporary_files_is_said(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    with pytest.raises(CommitError, match="No usable temporary directory.*give TMPDIR"):
        Owner().claim("a start")
    vllm = FakeVllm(tensors(1))
    with pytest.raises(CommitError, match="No usable temporary directory"):
        VllmServer(vllm, MemoryStore(), "memory", None).sync(None)
    assert vllm.log == []


def test_a_lock_that_the_system_refuses_leaves_no_file_open(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int) -> bool:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(owner.durable, "try_lock", refuse)
    files = _open_files()
    with pytest.raises(CommitError, match="No locks available"):
        Owner(temporary).claim("a start")
    assert _open_files() == files
