"""A checkpoint path that is a link to one whole version, flipped when the next one is complete.

    parent/model                      -> .model.syncline/v000005-1f0c9a77     what users and loaders open
    parent/.model.syncline/lock           held by whoever builds
    parent/.model.syncline/v000004-.../   the version before, kept for readers that are still in it
    parent/.model.syncline/v000005-.../   a whole checkpoint with its own state file
    parent/.model.syncline/next/          being built; of no meaning after a crash

Files that a version does not change are hard links to those of the version before, the others copies (block
clones where the file system has them). No file is ever written after its directory has got its name.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from syncline import durable
from syncline.abc import Observe
from syncline.commit import overwrite as updates
from syncline.commit.journal import Journal, JournalWriter
from syncline.engines.checkpoint_files import CheckpointFiles, FileTarget, failing
from syncline.engines.copying import copy_file, copy_tree
from syncline.engines.incoming import Tensors
from syncline.engines.new_checkpoint import write_checkpoint
from syncline.engines.own_directory import LOCK, check_expected, has_content, locked
from syncline.errors import ConfigError, ForeignDirectoryError, FormatError
from syncline.format import state as state_format
from syncline.format.state import FILE, FOLDER, DirectoryState
from syncline.types import Record, Step
from syncline.version import HeldVersion

STEPS = (
    "flip.copied",
    "flip.built",
    "flip.named",
    "flip.linked",
    "flip.committed",
    "flip.old_removed",
)

_NEXT = "next"
_LINK = "link"
_VERSION = re.compile(r"v[0-9]{6,}-[0-9a-f]{8}(-again)?")
_SPOOL_BYTES = 1 << 26


def made_by_swap(directory: Path) -> bool:
    """Tell whether a resolved path is one of the version directories that swap mode makes."""
    home = directory.parent.name
    is_home = home.startswith(".") and home.endswith(".syncline")
    return is_home and _VERSION.fullmatch(directory.name) is not None


class Swap:
    """Keeps a link on a directory that holds one whole version."""

    def __init__(self, path: Path, *, observe: Observe) -> None:
        self.path = path
        self._home = path.with_name(f".{path.name}.syncline")
        self._observe = observe
        self._check_kind()

    def current(self) -> Path | None:
        """Return the directory that the link names; None if there is none yet."""
        if not self.path.is_symlink():
            return None
        target = self.path.readlink()
        if target.parent == Path(self._home.name) and _VERSION.fullmatch(target.name):
            return self._home / target.name
        raise ForeignDirectoryError(
            f"{self.path} is a link to {target}, which Syncline did not make; nothing was touched; "
            "choose a new path"
        )

    def state(self) -> DirectoryState | None:
        """Return what the current directory says of itself; None if there is none."""
        current = self.current()
        if current is None:
            return None
        state = state_format.read(current)
        if state is None or state.status != "clean":
            raise FormatError(f"{current / FOLDER / FILE} must say clean; pull into a new path")
        return state

    def create(
        self, held: HeldVersion, tensors: Tensors, files: Mapping[str, bytes], shard_bytes: int
    ) -> None:
        """Build a whole version and make the path a link to it."""
        build = self._claimed()
        with locked(self.path, self._home / LOCK):
            check_expected(self.path, self.state(), None)
            try:
                self._clear()
                with failing(f"create {build}"):
                    build.mkdir()
                write_checkpoint(
                    build, held, tensors, files, shard_bytes=shard_bytes, observe=self._observe
                )
                self._finish(build, held, None)
            finally:
                shutil.rmtree(build, ignore_errors=True)

    def apply(
        self,
        files: CheckpointFiles,
        records: Iterable[Record],
        held: HeldVersion,
        expected: HeldVersion | None,
    ) -> None:
        """Build the next version beside the current one and flip the link to it."""
        build = self._claimed()
        with (
            locked(self.path, self._home / LOCK),
            tempfile.SpooledTemporaryFile(_SPOOL_BYTES) as file,
        ):
            check_expected(self.path, self.state(), expected)
            writer = JournalWriter(file)
            with FileTarget(files.places) as current:
                updates.record_all(records, files.metas(), current, writer)
            journal = Journal(file, "of this update", writer.finish())
            try:
                self._clear()
                self._build(build, files, journal, writer.names)
                self._finish(build, held, files.directory)
            finally:
                shutil.rmtree(build, ignore_errors=True)

    def _build(
        self, build: Path, files: CheckpointFiles, journal: Journal, changed: set[str]
    ) -> None:
        with failing(f"copy {files.directory} to {build}"):
            copy_tree(files.directory, build, leave_out=FOLDER)
            for path in sorted({files.places[name].path for name in changed}):
                copy = build / path.name
                copy.unlink()
                copy_file(path, copy)
        self._observe(Step("flip.copied"))
        with FileTarget(CheckpointFiles(build).places) as target:
            updates.overwrite(journal, target, self._observe)

    def _finish(self, build: Path, held: HeldVersion, before: Path | None) -> None:
        """Give the built directory its state and name, and flip the link to it."""
        final = self._final(held, before)
        with failing(f"complete {build}"):
            (build / FOLDER).mkdir()
            durable.create(build / FOLDER / FILE, state_format.dump(DirectoryState("clean", held)))
            _sync_tree(build)
        self._observe(Step("flip.built"))
        try:
            with failing(f"rename {build} to {final}"):
                build.rename(final)
                durable.sync_directory(self._home)
            self._observe(Step("flip.named"))
            updates.attempt(lambda: self._flip(final), lambda: self._flip_back(before))
        except BaseException:
            if self.current() != final:
                shutil.rmtree(final, ignore_errors=True)
            raise
        # What cannot be removed now is removed after the next flip.
        for path in self._versions():
            if path not in (final, before):
                shutil.rmtree(path, ignore_errors=True)
        self._observe(Step("flip.old_removed"))

    def _flip(self, final: Path) -> None:
        with failing(f"link {self.path} to {final}"):
            link = self._home / _LINK
            link.unlink(missing_ok=True)
            link.symlink_to(Path(self._home.name) / final.name)
            if self.path.is_dir() and not self.path.is_symlink():
                self.path.rmdir()
            link.rename(self.path)
            self._observe(Step("flip.linked"))
            durable.sync_directory(self.path.parent)
        self._observe(Step("flip.committed"))

    def _flip_back(self, before: Path | None) -> None:
        if before is not None:
            link = self._home / _LINK
            link.unlink(missing_ok=True)
            link.symlink_to(Path(self._home.name) / before.name)
            link.rename(self.path)
        elif self.path.is_symlink():
            self.path.unlink()
        durable.sync_directory(self.path.parent)

    def _final(self, held: HeldVersion, before: Path | None) -> Path:
        """Return a free name for a version; what has it but is not linked was left by a killed process."""
        final = self._home / f"v{held.version:06d}-{held.sha256[:8]}"
        if final == before:
            final = final.with_name(final.name + "-again")
        with failing(f"clear {final}"), suppress(FileNotFoundError):
            shutil.rmtree(final)
        return final

    def _versions(self) -> list[Path]:
        return [path for path in self._home.iterdir() if _VERSION.fullmatch(path.name)]

    def _clear(self) -> None:
        with failing(f"clear {self._home}"):
            (self._home / _LINK).unlink(missing_ok=True)
            with suppress(FileNotFoundError):
                shutil.rmtree(self._home / _NEXT)

    def _claimed(self) -> Path:
        """Make the hidden directory beside the path, or check that it is ours; return where to build."""
        with failing(f"create {self._home}"):
            if not self._home.is_symlink():
                durable.make_directory(self._home)
            known = {LOCK, _NEXT, _LINK}
            foreign = [
                path.name
                for path in self._home.iterdir()
                if path.name not in known and not _VERSION.fullmatch(path.name)
            ]
            if self._home.is_symlink() or foreign:
                raise ForeignDirectoryError(
                    f"{self._home} was not made by Syncline; nothing in it was touched; remove it, it is "
                    "in the way"
                )
        return self._home / _NEXT

    def _check_kind(self) -> None:
        if self.current() is not None:
            return
        if state_format.read(self.path) is not None:
            raise ConfigError(
                f"{self.path} was made in mode 'in_place'; open it in that mode, or choose a new path"
            )
        if self.path.exists() and (not self.path.is_dir() or has_content(self.path)):
            raise ForeignDirectoryError(
                f"{self.path} is not empty and was not made by Syncline; nothing in it was touched; "
                "swap mode needs a new path, it cannot take a checkpoint over"
            )


def _sync_tree(directory: Path) -> None:
    """Flush every file and directory; those that are flushed already cost next to nothing."""
    for at, _, files in os.walk(directory):
        for name in files:
            path = Path(at, name)
            if not path.is_symlink():
                durable.sync_file(path)
        durable.sync_directory(Path(at))
