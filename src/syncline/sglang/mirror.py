"""The checkpoint directory that a server is kept in step with: it goes ahead, and notes what the server lacks."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from syncline.commit.journal import Journal, JournalWriter
from syncline.engines import CheckpointDir
from syncline.engines.passing import PassingEngine
from syncline.errors import CommitError, FormatError, SynclineError
from syncline.types import Bits, Record
from syncline.version import HeldVersion, PartEntry

_log = logging.getLogger(__name__)


class Mirror(PassingEngine):
    """A checkpoint directory whose changes are also kept, sealed, for a server's ranks to apply.

    Args:
        checkpoint: the directory.
        staging: where the changes are kept; `lose` and `settle` remove those of an earlier run, too.

    Others may move the checkpoint: changes are only believed as long as they lead, without a gap, from the
    version that `settle` named to the one that the directory holds.
    """

    def __init__(self, checkpoint: CheckpointDir, staging: Path) -> None:
        super().__init__(checkpoint)
        self._checkpoint = checkpoint
        self._staging = staging
        self._count = 0
        self._pending: list[PartEntry] | None = None
        self._leads_to: str | None = None
        self._names: set[str] = set()
        try:
            staging.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CommitError(f"{staging} cannot be made: {error.strerror}") from error

    @property
    def path(self) -> Path:
        """Where the checkpoint is."""
        return self._checkpoint.path

    @property
    def changed(self) -> Sequence[str]:
        """The tensors that pending changes touch."""
        return sorted(self._names)

    def pending_to(self, target: HeldVersion) -> Sequence[PartEntry] | None:
        """Return the changes that lead from what `settle` named to `target`, read once and whole.

        None if it is not known what the server lacks of it, one that was lost or damaged included.
        """
        pending = self.pending
        if pending is None or self._leads_to != target.sha256:
            return None
        try:
            for part in pending:
                with (self._staging / part.path).open("rb") as file:
                    Journal(file, part.path, part)
        except (OSError, FormatError) as error:
            _log.warning("syncline: %s: changes are lost, all is loaded: %s", self._staging, error)
            self.lose()
            return None
        return pending

    @property
    def pending(self) -> Sequence[PartEntry] | None:
        """The sealed changes since `settle`, in order; None if it is not known what the server lacks."""
        held = self.held()
        if self._pending is None or held is None or held.sha256 != self._leads_to:
            return None
        return tuple(self._pending)

    def apply(self, records: Iterable[Record], held: HeldVersion) -> None:
        """Overwrite what the records list, and keep them; see `Engine.apply`."""
        is_linked = self.pending is not None
        path = self._staging / f"journal-{self._count}"
        self._count += 1
        try:
            with path.open("w+b") as file:
                writer = JournalWriter(file)
                super().apply(_kept(records, writer), held)
                seal = writer.finish()
        except BaseException as error:
            _remove(path)
            if isinstance(error, OSError) and not isinstance(error, SynclineError):
                raise CommitError(
                    f"{path}: changes for the server cannot be kept: {error.strerror}"
                ) from error
            raise
        if not is_linked or self._pending is None:
            _remove(path)
            return
        self._leads_to = held.sha256
        if not writer.names:
            _remove(path)
            return
        self._pending.append(PartEntry(path.name, seal.size_bytes, seal.sha256))
        self._names |= writer.names

    def before(self, name: str) -> Bits:
        """Return a tensor's bits without what is pending: those that the server has."""
        bits: Bits = self.view(name).copy()
        for part in reversed(self._pending if self._pending is not None else []):
            with (self._staging / part.path).open("rb") as file:
                for record in Journal(file, part.path, part):
                    if record.name == name:
                        window = bits[record.start :]
                        size = record.old_bits.size
                        where = slice(size) if record.offsets is None else record.offsets
                        window[where] = record.old_bits
        return bits

    def settle(self, held: HeldVersion) -> None:
        """Forget what is pending: the server holds this version now."""
        self._pending, self._leads_to = [], held.sha256
        self._forget()

    def lose(self) -> None:
        """Note that it is not known how the server's weights differ from these."""
        self._pending = None
        self._forget()

    def _forget(self) -> None:
        self._names = set()
        for path in self._staging.glob("journal-*"):
            _remove(path)


def _remove(path: Path) -> None:
    """Remove changes that nobody will read again; where that fails they only take room."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("syncline: %s cannot be removed: %s", path, error.strerror)


def _kept(records: Iterable[Record], writer: JournalWriter) -> Iterator[Record]:
    for record in records:
        writer.add(record)
        yield record
