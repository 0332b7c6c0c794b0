"""A store in a directory of a local or shared file system.

Every object is a plain file. It is written under a hidden name, flushed, and given its own name by a hard
link, which never replaces; so no reader sees a part of it and no writer overwrites another's. Nothing
outside the directory is reached: keys are checked, and no symbolic link is followed below it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from os import PathLike
from pathlib import Path, PurePosixPath

from syncline import durable
from syncline.abc import Buffer, Observe, Store
from syncline.errors import (
    ForeignDirectoryError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreError,
    SynclineError,
    VersionConflictError,
)
from syncline.format import names
from syncline.stores import keys
from syncline.stores.incoming import Incoming
from syncline.stores.temporary import PREFIX, Temporary, exists, remove_leftovers, temporary
from syncline.types import ObjectInfo, Step, check_seconds

STEPS = (
    "put.written",
    "put.flushed",
    "put.linked",
    "put.directory_flushed",
    "swap.written",
    "swap.flushed",
    "swap.renamed",
    "swap.directory_flushed",
)
"""What `observe` is told of: `put` passes the first four, `compare_and_swap` the others."""

_LOCK = PREFIX + "lock"
_HARMLESS = (PREFIX, ".nfs", "lost+found")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK


class FilesystemStore(Store):
    """A store in a directory, which is created by the first write.

    A directory that has anything in it but no `HEAD.json` is somebody else's: writing raises
    `ForeignDirectoryError` and touches nothing.

    Args:
        path: the directory; it may itself be reached through symbolic links.
        observe: told of every step in `STEPS`.
        lock_timeout_s: how long `compare_and_swap` waits for another writer.

    Every operation raises `StoreError` with the system's reason (disk full, permission denied, read-only)
    where the file system refuses, and leaves no temporary file behind. Those of a writer that was killed
    are removed by the next write or delete in their directory.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        observe: Observe | None = None,
        lock_timeout_s: float = 30.0,
    ) -> None:
        self.path = Path(path).absolute()
        self._observe = observe
        self._lock_timeout_s = check_seconds("lock_timeout_s", lock_timeout_s)
        self._is_ours = False

    def __str__(self) -> str:
        return str(self.path)

    def put(self, key: str, chunks: Iterable[Buffer]) -> None:
        """Create the object; see `Store.put`. It and its directories are flushed on return."""
        *parents, name = keys.split(key)
        incoming = Incoming(chunks)
        with (
            self._failing(f"put {key}", incoming),
            self._directory(parents, make=True) as directory,
        ):
            if exists(directory, name):
                raise self._taken(key)
            remove_leftovers(directory)
            with temporary(directory) as file:
                for chunk in incoming:
                    file.write(chunk)
                self._reached("put.written")
                file.flush()
                self._reached("put.flushed")
                self._link(file, name, key, self._alone())
                self._reached("put.linked")
            os.fsync(directory)
            self._reached("put.directory_flushed")

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes `start:stop` of the object; see `Store.get`."""
        *parents, name = keys.split(key)
        with self._failing(f"get {key}"):
            try:
                with self._directory(parents) as directory:
                    fd = os.open(name, _FILE, dir_fd=directory)
            except FileNotFoundError:
                raise ObjectNotFoundError(self._absence(key)) from None
            try:
                return _read(fd, start, stop)
            finally:
                os.close(fd)

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """Return the objects whose key begins with `prefix`; see `Store.list`.

        Only regular files count; what is hidden (temporary files, the lock) or a symbolic link is no
        object. A directory that does not exist yet holds none.
        """
        keys.check_prefix(prefix)
        parents = prefix.split("/")[:-1]
        found = []
        with (
            self._failing(f"list {prefix!r}"),
            suppress(FileNotFoundError),
            self._directory(parents) as directory,
        ):
            for path, size_bytes in _walk(directory):
                found.append(ObjectInfo("/".join([*parents, path]), size_bytes))
        return sorted(
            (info for info in found if info.key.startswith(prefix)), key=lambda info: info.key
        )

    def compare_and_swap(self, key: str, expected: bytes | None, new: bytes) -> None:
        """Replace the content `expected` by `new`; see `Store.compare_and_swap`.

        Other writers on any host are kept out by a flock on a hidden file in the store's directory.
        """
        *parents, name = keys.split(key)
        with (
            self._failing(f"swap {key}"),
            self._directory(parents, make=True) as directory,
            self._alone(),
        ):
            if self._content(key) != expected:
                raise VersionConflictError(
                    f"swap {key} in {self.path}: the object is not what it was when it was read; "
                    "another writer got there first; read it again"
                )
            remove_leftovers(directory)
            with temporary(directory) as file:
                file.write(new)
                self._reached("swap.written")
                file.flush()
                self._reached("swap.flushed")
                if expected is None:
                    self._link(file, name, key, nullcontext())
                else:
                    file.replace(name)
                self._reached("swap.renamed")
            os.fsync(directory)
            self._reached("swap.directory_flushed")

    def delete(self, key: str) -> None:
        """Remove the object, and directories that this leaves empty; see `Store.delete`."""
        *parents, name = keys.split(key)
        with self._failing(f"delete {key}"), suppress(FileNotFoundError):
            self._check_ours()
            with self._directory(parents) as directory:
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=directory)
                remove_leftovers(directory)
                os.fsync(directory)
            self._prune(parents)

    def _prune(self, parents: Sequence[str]) -> None:
        while parents:
            *parents, name = parents
            with self._directory(parents) as directory:
                try:
                    os.rmdir(name, dir_fd=directory)
                except OSError as error:
                    if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                        return
                    raise
                os.fsync(directory)

    def _link(
        self, file: Temporary, name: str, key: str, alone: AbstractContextManager[None]
    ) -> None:
        try:
            file.become(name, alone)
        except FileExistsError:
            raise self._taken(key) from None

    def _content(self, key: str) -> bytes | None:
        try:
            return self.get(key)
        except ObjectNotFoundError:
            return None

    def _alone(self) -> AbstractContextManager[None]:
        return durable.locked(self.path / _LOCK, timeout_s=self._lock_timeout_s)

    @contextmanager
    def _directory(self, parents: Sequence[str], *, make: bool = False) -> Iterator[int]:
        """Open a directory below the root; with `make` create what is missing, and flush that.

        No component is followed if it is a symbolic link, so nothing outside the root is opened.
        """
        if make:
            durable.make_directory(self.path.resolve())
            self._check_ours()
        with ExitStack() as opened:
            directory = os.open(self.path, _DIRECTORY)
            opened.callback(os.close, directory)
            for name in parents:
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(name, dir_fd=directory)
                    os.fsync(directory)
                directory = _open_below(directory, name)
                opened.callback(os.close, directory)
            yield directory

    def _check_ours(self) -> None:
        if self._is_ours:
            return
        found = [path.name for path in self.path.iterdir() if not path.name.startswith(_HARMLESS)]
        if found and names.HEAD not in found:
            raise ForeignDirectoryError(
                f"{self.path} holds {min(found)!r} but no {names.HEAD}: expected an empty directory, or "
                "a store that Syncline made; nothing was touched; choose another directory"
            )
        self._is_ours = True

    def _taken(self, key: str) -> ObjectExistsError:
        return ObjectExistsError(f"put {key} in {self.path}: the key is taken; nothing was changed")

    def _absence(self, key: str) -> str:
        if not self.path.exists():
            return f"get {key}: there is no directory {self.path}; check the path, or publish first"
        return f"get {key}: there is no such object in {self.path}"

    def _reached(self, step: str) -> None:
        if self._observe is not None:
            self._observe(Step(step))

    @contextmanager
    def _failing(self, doing: str, incoming: Incoming | None = None) -> Iterator[None]:
        """Turn the system's errors into the store's; Syncline's and the caller's own pass."""
        try:
            yield
        except SynclineError:
            raise
        except OSError as error:
            if incoming is not None and error is incoming.error:
                raise
            reason = error.strerror if error.strerror is not None else str(error)
            raise StoreError(f"{doing} in {self.path}: {reason}") from error


def _open_below(directory: int, name: str) -> int:
    try:
        return os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise OSError(
                error.errno,
                f"{name!r} is a file or a symbolic link where the store keeps a directory; no link is "
                "followed inside a store",
            ) from error
        raise


def _read(fd: int, start: int, stop: int | None) -> bytes:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file, so it is no object")
    end = status.st_size if stop is None else min(stop, status.st_size)
    pieces = []
    while start < end:
        piece = os.pread(fd, end - start, start)
        if not piece:
            raise OSError(errno.EIO, f"it ends at byte {start}, its size is {status.st_size}")
        pieces.append(piece)
        start += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _walk(directory: int) -> Iterator[tuple[str, int]]:
    """Yield path and size of every regular, visible file below an open directory."""
    for below, folders, files, at in os.fwalk(".", dir_fd=directory):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            if name.startswith("."):
                continue
            with suppress(FileNotFoundError):  # deleted since the directory was read
                status = os.stat(name, dir_fd=at, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    yield (PurePosixPath(below) / name).as_posix(), status.st_size
