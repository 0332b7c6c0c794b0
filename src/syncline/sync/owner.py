"""Who follows a server: one follower at a time, or two would take each other's pauses, orders and names for their own.

The mark is a file lock that the kernel drops when its process dies, so that a dead follower keeps nobody out.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import weakref
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
        wanted = [Path(tempfile.gettempdir()) / f"syncline-follower-{digest}.lock"]
        if self._staging is not None:
            wanted.insert(0, self._staging / NAME)
        _let_go(self._held, [path for path in self._held if path not in wanted])
        lost = [path for path, fd in self._held.items() if not durable.is_same_file(fd, path)]
        _let_go(self._held, lost)
        missing = [path for path in wanted if path not in self._held]
        try:
            for path in missing:
                self._held[path] = _lock(path)
        except CommitError:
            self.release()
            raise
        return bool(missing)

    def release(self) -> None:
        """Let others have it; harmless if it is not ours."""
        _let_go(self._held)


def _lock(path: Path) -> int:
    try:
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            if not durable.try_lock(fd):
                os.close(fd)
                raise CommitError(
                    f"another follower has this server (lock {path}); nothing was touched; stop it, or follow "
                    "another server"
                )
            if durable.is_same_file(fd, path):
                return fd
            os.close(fd)
    except OSError as error:
        raise CommitError(
            f"{path}: this server's followers cannot be told apart: {error.strerror}; nothing was touched; "
            "run them as one user"
        ) from error


def _let_go(held: dict[Path, int], paths: list[Path] | None = None) -> None:
    for path in list(held) if paths is None else paths:
        fd = held.pop(path)
        if durable.is_same_file(fd, path):
            path.unlink()  # while it is ours: whoever waits for it looks again
        os.close(fd)
