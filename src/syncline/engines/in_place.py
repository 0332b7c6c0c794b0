"""A checkpoint directory whose files are overwritten where they are, with a journal that survives a crash.

    journal written and flushed -> state `applying`, flushed -> files overwritten, flushed, read back
    -> state `clean` with the new version, flushed -> journal removed

Killed before the state says `applying`, nothing has happened; killed later, whoever opens the directory
next writes the journal's new bits again and finishes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from syncline import durable
from syncline.abc import Observe
from syncline.commit import overwrite as updates
from syncline.commit.journal import Journal, JournalWriter
from syncline.engines.checkpoint_files import CheckpointFiles, FileTarget, failing
from syncline.engines.incoming import Tensors
from syncline.engines.new_checkpoint import STEPS as CREATE_STEPS
from syncline.engines.new_checkpoint import write_checkpoint
from syncline.engines.own_directory import (
    LOCK,
    check_expected,
    claim,
    clear,
    has_content,
    locked,
    write_state,
)
from syncline.errors import CommitError, ForeignDirectoryError, SynclineError, TornUpdateError
from syncline.format import state as state_format
from syncline.format.state import FOLDER, JOURNAL, DirectoryState
from syncline.types import Record, Step
from syncline.version import HeldVersion, PartEntry

STEPS = (
    *CREATE_STEPS,
    "create.renamed",
    "create.committed",
    "apply.journal_flushed",
    "apply.marked",
    *updates.STEPS,
    "apply.committed",
    "apply.journal_removed",
)


class InPlace:
    """Keeps a directory on its version by overwriting its files."""

    def __init__(self, path: Path, *, is_adopted: bool, observe: Observe) -> None:
        self.path = path
        self._folder = path / FOLDER
        self._observe = observe
        self._check_kind(is_adopted)

    def current(self) -> Path | None:
        """Return the directory that holds the weights; None if there are none yet."""
        return self.path if has_content(self.path) else None

    def state(self) -> DirectoryState | None:
        """Return the state after finishing what a killed process had begun; None if it is not known."""
        state = state_format.read(self.path)
        if state is not None and state.is_changing:
            with locked(self.path, self._folder / LOCK):
                return self._recovered()
        return state

    def create(
        self, held: HeldVersion, tensors: Tensors, files: Mapping[str, bytes], shard_bytes: int
    ) -> None:
        """Fill the directory, which must be missing or empty: beside it first, then by one rename."""
        build = self.path.with_name(f".{self.path.name}.syncline-new")
        claim(build)
        with locked(self.path, build / FOLDER / LOCK):
            try:
                clear(build)
                write_state(build, DirectoryState("creating", None))
                write_checkpoint(
                    build, held, tensors, files, shard_bytes=shard_bytes, observe=self._observe
                )
                write_state(build, DirectoryState("clean", held))
                updates.attempt(lambda: self._rename(build), lambda: self._rename_back(build))
            except BaseException:
                shutil.rmtree(build)
                raise

    def apply(
        self,
        files: CheckpointFiles,
        records: Iterable[Record],
        held: HeldVersion,
        expected: HeldVersion | None,
    ) -> None:
        """Bring the files to `held`, if the directory is still at `expected`."""
        files.check_unshared()
        with failing(f"prepare {self._folder}"):
            self._folder.mkdir(exist_ok=True)
            durable.sync_directory(self.path)
        with locked(self.path, self._folder / LOCK), FileTarget(files.places) as target:
            before = self._recovered()
            check_expected(self.path, before, expected)
            if before is None:
                before = DirectoryState("clean", None)
            with self._journal(records, files, target) as (journal, seal):
                updates.attempt(
                    lambda: self._change(journal, seal, target, held),
                    lambda: self._undo(journal, target, before),
                )
            self._observe(Step("apply.journal_removed"))

    def _change(
        self, journal: Journal, seal: PartEntry, target: FileTarget, held: HeldVersion
    ) -> None:
        write_state(self.path, DirectoryState("applying", held, seal))
        self._observe(Step("apply.marked"))
        updates.overwrite(journal, target, self._observe)
        write_state(self.path, DirectoryState("clean", held))
        self._observe(Step("apply.committed"))

    def _undo(self, journal: Journal, target: FileTarget, before: DirectoryState) -> None:
        updates.restore(journal, target)
        write_state(self.path, before)

    @contextmanager
    def _journal(
        self, records: Iterable[Record], files: CheckpointFiles, target: FileTarget
    ) -> Iterator[tuple[Journal, PartEntry]]:
        """Drain the records into the journal file; it is removed at the end unless the update is torn."""
        path = self._folder / JOURNAL
        with failing(f"create {path}"):
            file = path.open("x+b")
        with _closing(file):
            try:
                writer = JournalWriter(file)
                updates.record_all(records, files.metas(), target, writer)
                seal = writer.finish()
                with failing(f"flush {path}"):
                    os.fsync(file.fileno())
                    durable.sync_directory(self._folder)
                self._observe(Step("apply.journal_flushed"))
                yield Journal(file, str(path), seal), seal
            except TornUpdateError:
                raise
            except BaseException:
                self._remove_journal()
                raise
            self._remove_journal()

    def _recovered(self) -> DirectoryState | None:
        """Finish or forget what a killed process had begun; the lock is held."""
        state = state_format.read(self.path)
        if state is None or state.journal is None or state.held is None:
            self._remove_journal()
            return state
        try:
            with (
                (self._folder / JOURNAL).open("rb") as file,
                FileTarget(CheckpointFiles(self.path).places) as target,
            ):
                journal = Journal(file, file.name, state.journal)
                updates.overwrite(journal, target, self._observe)
            clean = DirectoryState("clean", state.held)
            write_state(self.path, clean)
        except (SynclineError, OSError) as error:
            raise TornUpdateError(
                f"{self.path} was left in the middle of the update to version {state.held.version}, and "
                f"finishing it failed: {error}; its weights are a mix: repair the cause and open it "
                "again, or pull into a new directory",
                version=state.held.version,
            ) from error
        self._remove_journal()
        return clean

    def _remove_journal(self) -> None:
        # It means nothing unless the state names it, so one that cannot be removed does no harm.
        with suppress(OSError):
            (self._folder / JOURNAL).unlink()
            durable.sync_directory(self._folder)

    def _rename(self, build: Path) -> None:
        try:
            build.rename(self.path)
        except OSError as error:
            if has_content(self.path):
                raise ForeignDirectoryError(
                    f"{self.path} was filled by somebody else in the meantime; nothing in it was touched"
                ) from error
            raise CommitError(
                f"{build} cannot be renamed to {self.path}: {error.strerror}; a mount point cannot be "
                "replaced: choose a directory inside it"
            ) from error
        self._observe(Step("create.renamed"))
        with failing(f"flush {self.path.parent}"):
            durable.sync_directory(self.path.parent)
        self._observe(Step("create.committed"))

    def _rename_back(self, build: Path) -> None:
        if not build.exists():
            self.path.rename(build)

    def _check_kind(self, is_adopted: bool) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise ForeignDirectoryError(
                f"{self.path} is a file; expected a directory or a new path"
            )
        state = state_format.read(self.path)
        if state is not None and state.status == "creating":
            raise CommitError(f"{self.path} was left half-built and then renamed; remove it")
        if state is not None or not has_content(self.path):
            return
        if not is_adopted:
            raise ForeignDirectoryError(
                f"{self.path} is not empty and was not made by Syncline; nothing in it was touched; "
                "choose a new path, or take the checkpoint over with adopt=True (--adopt)"
            )
        CheckpointFiles(self.path).check_unshared()


@contextmanager
def _closing(file: IO[bytes]) -> Iterator[None]:
    """Close a journal at the end; it was flushed when it was sealed, or an error is on its way already."""
    try:
        yield
    finally:
        with suppress(OSError):  # closing tries once more to write what a full disk has refused
            file.close()
