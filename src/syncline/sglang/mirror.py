"""The checkpoint directory that a server is kept in step with: it goes ahead, and notes what the server lacks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from syncline.commit.journal import Journal, JournalWriter
from syncline.engines import CheckpointDir
from syncline.engines.passing import PassingEngine
from syncline.errors import CommitError
from syncline.types import Bits, Record
from syncline.version import HeldVersion, PartEntry


class Mirror(PassingEngine):
    """A checkpoint directory whose changes are also kept, sealed, for a server's ranks to apply.

    Args:
        checkpoint: the directory.
        staging: where the changes are kept; files of an earlier run in it are removed.

    Attributes:
        pending: the sealed changes that `settle` was not called for, in order; None once it is not known
            how the server's weights differ from the checkpoint's.
    """

    def __init__(self, checkpoint: CheckpointDir, staging: Path) -> None:
        super().__init__(checkpoint)
        self._checkpoint = checkpoint
        self._staging = staging
        self._count = 0
        self.pending: list[PartEntry] | None = None
        self._names: set[str] = set()
        try:
            staging.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CommitError(f"{staging} cannot be made: {error.strerror}") from error
        self._forget()

    @property
    def path(self) -> Path:
        """Where the checkpoint is."""
        return self._checkpoint.path

    @property
    def changed(self) -> Sequence[str]:
        """The tensors that pending changes touch."""
        return sorted(self._names)

    def apply(self, records: Iterable[Record], held: HeldVersion) -> None:
        """Overwrite what the records list, and keep them; see `Engine.apply`."""
        path = self._staging / f"journal-{self._count}"
        self._count += 1
        with path.open("w+b") as file:
            writer = JournalWriter(file)
            try:
                super().apply(_kept(records, writer), held)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
            seal = writer.finish()
        if not writer.names or self.pending is None:
            path.unlink()
            return
        self.pending.append(PartEntry(path.name, seal.size_bytes, seal.sha256))
        self._names |= writer.names

    def before(self, name: str) -> Bits:
        """Return a tensor's bits without what is pending: those that the server has."""
        bits: Bits = self.view(name).copy()
        for part in reversed(self.pending if self.pending is not None else []):
            with (self._staging / part.path).open("rb") as file:
                for record in Journal(file, part.path, part):
                    if record.name == name:
                        window = bits[record.start :]
                        size = record.old_bits.size
                        where = slice(size) if record.offsets is None else record.offsets
                        window[where] = record.old_bits
        return bits

    def settle(self) -> None:
        """Forget what is pending: the server holds it now."""
        self._forget()
        self.pending = []

    def lose(self) -> None:
        """Note that it is not known how the server's weights differ from these."""
        self._forget()
        self.pending = None

    def _forget(self) -> None:
        for path in self._staging.glob("journal-*"):
            path.unlink()
        self._names = set()


def _kept(records: Iterable[Record], writer: JournalWriter) -> Iterator[Record]:
    for record in records:
        writer.add(record)
        yield record
