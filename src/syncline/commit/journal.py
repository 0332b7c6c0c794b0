"""The journal: every record of an update, old bits and new, in one file that proves itself.

    magic, then entries of <tag u8, unit_bytes u8, name bytes u16, count u32, start u64>:
      tag 1  name, count offsets of 4 bytes, count old units, count new units
      tag 2  name, count old units, count new units, for consecutive places from `start`
      tag 0  the end: `start` is the number of entries, all other fields are 0
    then the SHA-256 of everything before it.

An update that stopped anywhere is finished by writing the new bits again, or undone by writing the old
ones; both may be repeated. Memory: O(one entry), which holds at most `MAX_UNITS` units.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import IO

import numpy as np

from syncline.errors import CommitError, FormatError
from syncline.format.state import JOURNAL
from syncline.types import Bits, Record, unsigned
from syncline.version import PartEntry

MAX_UNITS = 1 << 20
"""Most units in one entry; longer records are split."""

_MAGIC = b"SYNCJRN1"
_HEAD = struct.Struct("<BBHIQ")
_END, _SPARSE, _DENSE = 0, 1, 2
_DIGEST_BYTES = 32
_OFFSET = np.dtype("<u4")
_MAX_NAME_BYTES = 4096
_PIECE_BYTES = 1 << 20


class JournalWriter:
    """Appends records to an empty binary file; `finish` seals it.

    Args:
        file: open for reading and writing, at its beginning.

    Attributes:
        names: the tensors that the journal changes.

    Raises:
        CommitError: the system refuses to write, for one because the disk is full.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._entries = 0
        self.names: set[str] = set()
        self._put(_MAGIC)

    def add(self, record: Record) -> None:
        """Append one record. Aliasing: the arrays are copied to the file before this returns."""
        name = record.name.encode()
        if record.new_bits.size:
            self.names.add(record.name)
        for piece in _split(record):
            tag = _DENSE if piece.offsets is None else _SPARSE
            count = piece.new_bits.size
            self._put(_HEAD.pack(tag, piece.new_bits.itemsize, len(name), count, piece.start))
            self._put(name)
            if piece.offsets is not None:
                self._put(piece.offsets.astype(_OFFSET, copy=False).tobytes())
            self._put(piece.old_bits.tobytes())
            self._put(piece.new_bits.tobytes())
            self._entries += 1

    def finish(self) -> PartEntry:
        """Write the end and the digest; return the size and digest that identify the journal."""
        self._put(_HEAD.pack(_END, 0, 0, 0, self._entries))
        seal = self._digest.digest()
        with _failing():
            self._file.write(seal)
            self._file.flush()
        return PartEntry(JOURNAL, self._file.tell(), seal.hex())

    def _put(self, data: bytes) -> None:
        self._digest.update(data)
        with _failing():
            self._file.write(data)


class Journal:
    """A sealed journal: iterating yields its records in order, as often as one likes.

    Args:
        file: open for reading.
        where: what messages call it.
        seal: what `JournalWriter.finish` returned; None if only the file itself can be asked.

    Raises:
        FormatError: cut short, damaged, or not the one that the seal names. The digest is checked here,
            before the first record is yielded.
    """

    def __init__(self, file: IO[bytes], where: str, seal: PartEntry | None = None) -> None:
        self._file = file
        self._where = where
        self._end_bytes = file.seek(0, 2) - _DIGEST_BYTES
        self._check(seal)

    def __iter__(self) -> Iterator[Record]:
        position, entries = len(_MAGIC), 0
        while True:
            self._file.seek(position)
            tag, unit_bytes, name_bytes, count, start = _HEAD.unpack(self._take(_HEAD.size))
            if tag == _END:
                self._check_end(entries, (unit_bytes, name_bytes, count, start))
                return
            self._check_head(position, tag, unit_bytes, name_bytes, count)
            name = self._name(name_bytes)
            offsets = None
            if tag == _SPARSE:
                offsets = np.frombuffer(self._take(4 * count), _OFFSET)
            old_bits = self._bits(unit_bytes, count)
            new_bits = self._bits(unit_bytes, count)
            position, entries = self._file.tell(), entries + 1
            yield Record(name, start, offsets, old_bits, new_bits)

    def _check(self, seal: PartEntry | None) -> None:
        if seal is not None and self._end_bytes + _DIGEST_BYTES != seal.size_bytes:
            found = self._end_bytes + _DIGEST_BYTES
            raise self._illegal(f"expected {seal.size_bytes} bytes, found {found}")
        if self._end_bytes < len(_MAGIC) + _HEAD.size:
            raise self._illegal("it is cut short")
        self._file.seek(0)
        if self._take(len(_MAGIC)) != _MAGIC:
            raise self._illegal(f"expected it to begin with {_MAGIC!r}")
        digest = hashlib.sha256(_MAGIC)
        while self._file.tell() < self._end_bytes:
            left_bytes = self._end_bytes - self._file.tell()
            digest.update(self._take(min(_PIECE_BYTES, left_bytes)))
        found_digest = self._file.read(_DIGEST_BYTES)
        if digest.digest() != found_digest or (
            seal is not None and seal.sha256 != digest.hexdigest()
        ):
            raise self._illegal("its digest does not fit its content")

    def _check_head(
        self, position: int, tag: int, unit_bytes: int, name_bytes: int, count: int
    ) -> None:
        if tag not in (_SPARSE, _DENSE) or unit_bytes not in (1, 2, 4, 8):
            raise self._illegal(f"byte {position} begins no entry")
        if not 1 <= name_bytes <= _MAX_NAME_BYTES or not 1 <= count <= MAX_UNITS:
            raise self._illegal(f"the entry at byte {position} is too long or empty")

    def _check_end(self, entries: int, fields: tuple[int, int, int, int]) -> None:
        if fields != (0, 0, 0, entries) or self._file.tell() != self._end_bytes:
            raise self._illegal(f"it does not end after entry {entries}")

    def _name(self, nbytes: int) -> str:
        try:
            return self._take(nbytes).decode()
        except UnicodeDecodeError as error:
            raise self._illegal(f"a name is not UTF-8: {error.reason}") from None

    def _bits(self, unit_bytes: int, count: int) -> Bits:
        return np.frombuffer(self._take(unit_bytes * count), unsigned(unit_bytes))

    def _take(self, nbytes: int) -> bytes:
        if self._file.tell() + nbytes > self._end_bytes:
            raise self._illegal("an entry runs past its end")
        data = self._file.read(nbytes)
        if len(data) != nbytes:
            raise self._illegal("it is cut short")
        return data

    def _illegal(self, problem: str) -> FormatError:
        return FormatError(f"journal {self._where}: {problem}; it is damaged or cut short")


@contextmanager
def _failing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CommitError(
            f"the journal cannot be written: {error.strerror}; no weight was changed"
        ) from error


def _split(record: Record) -> Iterator[Record]:
    """Yield pieces of at most `MAX_UNITS` units that say the same as the record; none if it is empty."""
    for first in range(0, record.new_bits.size, MAX_UNITS):
        piece = slice(first, first + MAX_UNITS)
        offsets = record.offsets
        yield replace(
            record,
            start=record.start + first if offsets is None else record.start,
            offsets=None if offsets is None else offsets[piece],
            old_bits=record.old_bits[piece],
            new_bits=record.new_bits[piece],
        )
