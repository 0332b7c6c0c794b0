"""Who follows a server: one follower at a time, or two would take each other's pauses, orders and names for their own.

The mark is a file lock that the kernel drops when its process dies, so that a dead follower keeps nobody out.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

from syncline import durable
from syncline.errors import CommitError

NAME = "owner.lock"


class Owner:
    """The right to follow one server, out of one staging directory if it needs one, against all processes of this host.

    Args:
        staging: the directory, whose lock is `owner.lock` in it; None: there is none. The server's lies where
            the system keeps temporary files, so that followers with different staging directories meet, too.
    """

    def __init__(self, staging: Path | None = None) -> None:
        self._staging = staging
        self._held: dict[Path, int] = {}
        weakref.finalize(self, _let_go, self._held)

    def claim(self, start: str) -> bool:
        """Take the right, or see that it is still ours; return whether it was not ours before.

        Args:
            start: tells one start of a server from all others.

        Raises:
            CommitError: another follower has it, or the system refuses; nothing was touched.
        """
        digest = hashlib.sha256(start.encode()).hexdigest()[:16]
        try:
            wanted = [Path(tempfile.gettempdir()) / f"syncline-follower-{digest}.lock"]
            if self._staging is not None:
                wanted.insert(0, self._staging / NAME)
            _let_go(self._held, [path for path in self._held if path not in wanted])
            lost = [path for path, fd in self._held.items() if not durable.is_same_file(fd, path)]
            _let_go(self._held, lost)
            missing = [path for path in wanted if path not in self._held]
            for path in missing:
                self._held[path] = _lock(path)
        except CommitError:
            self.release()
            raise
        except OSError as error:
            self.release()
            raise CommitError(
                f"this server's followers cannot be told apart: {error}; nothing was touched; give TMPDIR a directory "
                "that can be written, and run them as one user"
            ) from error
        return bool(missing)

    def release(self) -> None:
        """Let others have it; harmless if it is not ours."""
        _let_go(self._held)


def _lock(path: Path) -> int:
    while True:
        fd = _opened(path)
        try:
            is_free = durable.try_lock(fd)
            if is_free and durable.is_same_file(fd, path):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        if not is_free:
            raise CommitError(
                f"another follower has this server (lock {path}); nothing was touched; stop it, or follow "
                "another server"
            )


def _opened(path: Path) -> int:
    """Open the lock file, which a dead follower of another user may have left: it can be read, and that will do."""
    flags = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    while True:
        with suppress(FileNotFoundError):
            try:
                return os.open(path, flags | os.O_RDWR)  # some network file systems lock only these
            except PermissionError:
                return os.open(path, flags | os.O_RDONLY)
        with suppress(FileExistsError):
            return os.open(path, flags | os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)


def _let_go(held: dict[Path, int], paths: list[Path] | None = None) -> None:
    for path in list(held) if paths is None else paths:
        fd = held.pop(path)
        try:
            # While it is ours: whoever waits for it looks again. Another user's file in a sticky directory stays,
            # and says nothing: it is the lock on it that counts.
            with suppress(OSError):
                if durable.is_same_file(fd, path):
                    path.unlink()
        finally:
            os.close(fd)
