"""Files that nobody sees until they are whole: written under a hidden name, then given their own.

The writer holds a flock on its temporary file, and the kernel drops it when the writer dies. So whoever
can take the lock knows that the file is a leftover, on any host that shares the file system.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

from syncline import durable
from syncline.abc import Buffer

PREFIX = ".syncline-"
"""How the store's own files begin; no key may begin with a dot."""

_SUFFIX = ".tmp"
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


class Temporary:
    """A hidden file in an open directory, to be linked or renamed to its own name when it is whole."""

    def __init__(self, directory: int, name: str, fd: int) -> None:
        self._directory = directory
        self._name = name
        self._fd = fd

    def write(self, data: Buffer) -> None:
        """Append bytes."""
        durable.write_all(self._fd, data)

    def flush(self) -> None:
        """Flush the bytes to the disk."""
        os.fsync(self._fd)

    def become(self, name: str, alone: AbstractContextManager[None]) -> None:
        """Give the file its own name, which must be free.

        Args:
            name: the file's own name in the same directory.
            alone: keeps other writers of the store out, for file systems that have no hard links and
                so no rename that refuses to replace.

        Raises:
            FileExistsError: the name is taken; nothing was changed.
        """
        try:
            os.link(
                self._name,
                name,
                src_dir_fd=self._directory,
                dst_dir_fd=self._directory,
                follow_symlinks=False,
            )
        except OSError as error:
            # A server may have made the link although its answer was lost and the second try failed.
            if error.errno == errno.EEXIST and os.fstat(self._fd).st_nlink == 2:
                return
            if error.errno not in _NO_LINKS:
                raise
            with alone:
                if exists(self._directory, name):
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from None
                self.replace(name)

    def replace(self, name: str) -> None:
        """Give the file its own name, in place of whatever has it."""
        os.rename(self._name, name, src_dir_fd=self._directory, dst_dir_fd=self._directory)


@contextmanager
def temporary(directory: int) -> Iterator[Temporary]:
    """Make a hidden file; its hidden name is gone at the end of the block, whatever happened."""
    name, fd = _create(directory)
    try:
        yield Temporary(directory, name, fd)
    finally:
        with suppress(FileNotFoundError):  # it has its own name now
            os.unlink(name, dir_fd=directory)
        os.close(fd)


def remove_leftovers(directory: int) -> None:
    """Remove the hidden files of writers that died; those of living writers are locked and stay."""
    for name in os.listdir(directory):
        if name.startswith(PREFIX) and name.endswith(_SUFFIX):
            # Another writer may be clearing up at the same time.
            with suppress(FileNotFoundError):
                _remove_if_dead(directory, name)


def exists(directory: int, name: str) -> bool:
    """Tell whether anything, a dangling link included, has this name."""
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _create(directory: int) -> tuple[str, int]:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    while True:
        name = f"{PREFIX}{secrets.token_hex(8)}{_SUFFIX}"
        fd = os.open(name, flags, 0o666, dir_fd=directory)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            # Before it was locked it looked like a leftover, and may have been removed as one.
            if os.fstat(fd).st_nlink:
                return name, fd
        except BaseException:
            os.unlink(name, dir_fd=directory)
            os.close(fd)
            raise
        os.close(fd)


def _remove_if_dead(directory: int, name: str) -> None:
    fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW, dir_fd=directory)
    try:
        if durable.try_lock(fd):
            os.unlink(name, dir_fd=directory)
    finally:
        os.close(fd)
