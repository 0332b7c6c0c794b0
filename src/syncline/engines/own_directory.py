"""What both modes of `CheckpointDir` need: directories of our own, their state file and their lock."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from syncline import durable
from syncline.engines.checkpoint_files import failing
from syncline.errors import BaseVersionError, CommitError, ForeignDirectoryError
from syncline.format import state as state_format
from syncline.format.state import FILE, FOLDER, DirectoryState
from syncline.version import HeldVersion

LOCK = "lock"
"""The file in `.syncline` that whoever changes the directory holds a flock on."""


def check_expected(path: Path, state: DirectoryState | None, expected: HeldVersion | None) -> None:
    """Check that a directory is still at the version that the caller read.

    Raises:
        BaseVersionError: another process has moved it on.
    """
    found = None if state is None else state.held
    if (None if found is None else found.sha256) == (None if expected is None else expected.sha256):
        return
    names = ["no version" if at is None else f"version {at.version}" for at in (expected, found)]
    raise BaseVersionError(
        f"{path}: expected {names[0]}, found {names[1]}: another process updated it; sync again"
    )


@contextmanager
def locked(path: Path, lock: Path) -> Iterator[None]:
    """Keep other processes from changing the directory; do not wait for them.

    Raises:
        CommitError: one is changing it now.
    """
    with ExitStack() as stack:
        with failing(f"lock {lock}"):
            try:
                stack.enter_context(durable.locked(lock, timeout_s=0.0))
            except durable.BusyError as error:
                raise CommitError(
                    f"{path} is being changed by another process; nothing was touched; wait for it to "
                    "finish, or stop it"
                ) from error
        yield


def has_content(path: Path) -> bool:
    """Tell whether a directory exists and has anything in it.

    Raises:
        CommitError: the system refuses to look.
    """
    with failing(f"list {path}"):
        return path.is_dir() and next(path.iterdir(), None) is not None


def write_state(directory: Path, state: DirectoryState) -> None:
    """Replace the state file of a directory, durably.

    Raises:
        CommitError: the system refuses.
    """
    path = directory / FOLDER / FILE
    with failing(f"write {path}"):
        durable.replace(path, state_format.dump(state))


def claim(build: Path) -> None:
    """Make a directory to build in, or take over the one that a killed process left.

    Raises:
        ForeignDirectoryError: something else has this name.
        CommitError: the system refuses.
    """
    with failing(f"create {build}"):
        durable.make_directory(build.parent)
        if not build.is_symlink():
            build.mkdir(exist_ok=True)
        if build.is_symlink() or (has_content(build) and not (build / FOLDER).is_dir()):
            raise ForeignDirectoryError(
                f"{build} was not made by Syncline; nothing in it was touched; remove it, it is in the way"
            )
        (build / FOLDER).mkdir(exist_ok=True)


def clear(build: Path) -> None:
    """Remove what a killed process left in a directory of ours, all but the lock that we hold."""
    with failing(f"clear {build}"):
        for path in (*build.iterdir(), *(build / FOLDER).iterdir()):
            if path == build / FOLDER or path.name == LOCK:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
