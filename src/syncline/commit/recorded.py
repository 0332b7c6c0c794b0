"""The records of an update that dies with the process: as they came, and in a file once they are many."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import replace
from typing import IO, Self

from syncline.commit.journal import Journal, JournalWriter
from syncline.types import Record


class Recorded:
    """Keeps records in memory until they outgrow it, then all of them in a temporary file.

    Args:
        memory_bytes: what the arrays of the records may take in memory.

    Aliasing: arrays are copied, since the records of an update may share theirs.
    """

    def __init__(self, memory_bytes: int) -> None:
        self._left_bytes = memory_bytes
        self._records: list[Record] = []
        self._file: IO[bytes] | None = None
        self._writer: JournalWriter | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, record: Record) -> None:
        """Keep one record.

        Raises:
            CommitError: the system refuses to write the file.
        """
        if self._writer is not None:
            self._writer.add(record)
            return
        offsets = None if record.offsets is None else record.offsets.copy()
        kept = replace(
            record,
            offsets=offsets,
            old_bits=record.old_bits.copy(),
            new_bits=record.new_bits.copy(),
        )
        self._records.append(kept)
        offsets_bytes = 0 if offsets is None else offsets.nbytes
        self._left_bytes -= kept.old_bits.nbytes + kept.new_bits.nbytes + offsets_bytes
        if self._left_bytes < 0:
            self._move_to_file()

    def journal(self) -> Iterable[Record]:
        """Return the records, to be gone through as often as one likes; nothing more can be added."""
        if self._file is None or self._writer is None:
            return tuple(self._records)
        return Journal(self._file, "of this update", self._writer.finish())

    def _move_to_file(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - `__exit__` closes it
        self._writer = JournalWriter(self._file)
        for record in self._records:
            self._writer.add(record)
        self._records = []
