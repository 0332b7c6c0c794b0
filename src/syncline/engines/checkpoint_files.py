"""The weight files of a checkpoint directory: viewed through maps, overwritten through plain writes.

Writing goes through `pwrite` and not through a map, so that a full disk is an error and not the end of the
process.
"""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from syncline import durable, kernels
from syncline.errors import CommitError, ForeignDirectoryError, SynclineError
from syncline.format import checkpoint
from syncline.format.checkpoint import Place
from syncline.types import Bits, Record, TensorMeta, unsigned

_BLOCK_UNITS = 1 << 18
"""Units between the first and last change that are read, changed and written in one go."""


class CheckpointFiles:
    """The tensors of one checkpoint directory, as its headers say at this moment."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.places = checkpoint.locate(directory)
        self._mapped = checkpoint.MappedFiles()

    def metas(self) -> dict[str, TensorMeta]:
        """Return what every tensor is, by name."""
        return {name: place.meta for name, place in self.places.items()}

    def view(self, name: str) -> Bits:
        """Return a tensor's bits. Aliasing: a read-only view of the file, which sees later writes."""
        return self._mapped.bits(self.places[name])

    def check_unshared(self) -> None:
        """Check that writing to the weight files changes this directory alone.

        Raises:
            ForeignDirectoryError: one is a symbolic link or has a second hard link.
        """
        for path in sorted({place.path for place in self.places.values()}):
            with failing(f"look at {path}"):
                status = path.lstat()
            if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
                continue
            kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "shared by a hard link"
            raise ForeignDirectoryError(
                f"{path} is {kind}, as in a Hugging Face cache: overwriting it would change the other "
                "place too; copy the checkpoint (cp -rL) and use the copy, or pull into a new directory"
            )


class FileTarget:
    """Weight files as the target of an update; closes them at the end of the `with` block."""

    is_concurrent = False

    def __init__(self, places: Mapping[str, Place]) -> None:
        self._places = places
        self._files: dict[Path, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()

    def first_difference(self, record: Record, bits: Bits) -> int | None:
        """Return the index of the first of the record's places where other bits than these stand."""
        return kernels.first_difference(self.read(record), bits)

    def read(self, record: Record) -> Bits:
        """Return the bits at the record's places."""
        place = self._places[record.name]
        with failing(f"read {place.path}"):
            if record.offsets is None:
                return self._load(place, record.start, record.new_bits.size)
            found = np.empty(record.new_bits.size, record.new_bits.dtype)
            for part, first, count in _blocks(record.offsets):
                block = self._load(place, record.start + first, count)
                found[part] = kernels.gather(block, record.offsets[part] - np.uint32(first))
            return found

    def write(self, record: Record, bits: Bits) -> None:
        """Put bits at the record's places."""
        place = self._places[record.name]
        with failing(f"write {place.path}"):
            if record.offsets is None:
                self._store(place, record.start, bits)
                return
            for part, first, count in _blocks(record.offsets):
                block = self._load(place, record.start + first, count)
                kernels.scatter(block, record.offsets[part] - np.uint32(first), bits[part])
                self._store(place, record.start + first, block)

    def flush(self) -> None:
        """Flush every file that was opened to the disk."""
        for path, fd in self._files.items():
            with failing(f"flush {path}"):
                os.fsync(fd)

    def _load(self, place: Place, start: int, count: int) -> Bits:
        unit_bytes = place.meta.unit_bytes
        bits = np.empty(count, unsigned(unit_bytes))
        left, at = bits.view(np.uint8).data, place.start + start * unit_bytes
        while left.nbytes:
            done = os.preadv(self._file(place.path), [left], at)
            if not done:
                raise CommitError(f"read {place.path}: it ends at byte {at}, before its tensors do")
            left, at = left[done:], at + done
        return bits

    def _store(self, place: Place, start: int, bits: Bits) -> None:
        at = place.start + start * place.meta.unit_bytes
        durable.write_at(self._file(place.path), np.ascontiguousarray(bits).view(np.uint8).data, at)

    def _file(self, path: Path) -> int:
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        return self._files[path]


@contextmanager
def failing(doing: str) -> Iterator[None]:
    """Turn the system's errors into `CommitError`; errors of Syncline pass."""
    try:
        yield
    except SynclineError:
        raise
    except OSError as error:
        reason = error.strerror if error.strerror is not None else str(error)
        raise CommitError(f"{doing}: {reason}") from error


def _blocks(offsets: NDArray[np.uint32]) -> Iterator[tuple[slice, int, int]]:
    """Yield runs of offsets that lie close together: which they are, the first, and the room they take."""
    edges = np.flatnonzero(np.diff(offsets // np.uint32(_BLOCK_UNITS))) + 1
    bounds = [0, *edges.tolist(), offsets.size] if offsets.size else []
    for begin, end in itertools.pairwise(bounds):
        first = int(offsets[begin])
        yield slice(begin, end), first, int(offsets[end - 1]) - first + 1
