"""What makes bytes on a file system outlive a crash, and keeps two processes off the same bytes.

Everything is plain POSIX: write, fsync, rename, flock. A step that a power loss could undo is never
reported as done before the file *and* its directory are flushed.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

Data = bytes | bytearray | memoryview

_POLL_S = 0.02


class BusyError(OSError):
    """Another process or thread holds the lock; stages turn this into an error of Syncline's tree."""


def write_all(fd: int, data: Data) -> None:
    """Write every byte at the file's position; a single `os.write` may stop early."""
    left = memoryview(data).cast("B")
    while left.nbytes:
        left = left[os.write(fd, left) :]


def write_at(fd: int, data: Data, offset: int) -> None:
    """Write every byte at byte `offset` of the file."""
    left = memoryview(data).cast("B")
    while left.nbytes:
        done = os.pwrite(fd, left, offset)
        left, offset = left[done:], offset + done


def sync_file(path: Path) -> None:
    """Flush a file's bytes and size to the disk, whoever wrote them."""
    _sync(path, os.O_RDONLY)


def sync_directory(path: Path) -> None:
    """Flush a directory's entries to the disk: what was created, renamed or removed in it stays so."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def make_directory(path: Path) -> None:
    """Make a directory, and its missing parents, so that they stay; harmless if it is there."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
    # Whoever may not read the parent has not put anything into it either.
    with suppress(PermissionError):
        sync_directory(path.parent)


def create(path: Path, data: Data) -> None:
    """Create a file that must not exist yet and flush it; its directory is the caller's to flush."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        write_all(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)


def replace(path: Path, data: Data) -> None:
    """Make `data` the content of a file, atomically and durably; the caller keeps others out.

    Readers see the old content or the new, never a mix. On an error the old content stays.
    """
    staged = path.with_name(path.name + ".next")
    staged.unlink(missing_ok=True)
    try:
        create(staged, data)
        staged.replace(path)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


@contextmanager
def locked(path: Path, *, timeout_s: float) -> Iterator[None]:
    """Hold an exclusive flock on a file, which is created if need be, for the length of the block.

    The kernel drops the lock when the process dies. A lock file that was removed or renamed while we
    waited for it guards nothing, so then the one that has its name now is taken.

    Raises:
        BusyError: somebody else held it for `timeout_s` seconds.
        OSError: the file cannot be opened, or the file system knows no flock.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            _wait_for(fd, path, deadline_s)
            if is_same_file(fd, path):
                yield
                return
        finally:
            os.close(fd)


def is_same_file(fd: int, path: Path) -> bool:
    """Tell whether an open file is still the one that has this name."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def try_lock(fd: int) -> bool:
    """Take the flock on an open file without waiting; tell whether that worked."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait_for(fd: int, path: Path, deadline_s: float) -> None:
    while not try_lock(fd):
        if time.monotonic() >= deadline_s:
            raise BusyError(f"another process holds the lock {path}")
        time.sleep(_POLL_S)


def _sync(path: Path, flags: int) -> None:
    fd = os.open(path, flags | os.O_NOFOLLOW)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
