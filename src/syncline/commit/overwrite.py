"""Overwriting live weights so that it either works or never happened.

All bits that go in come from a sealed journal. They are written, flushed and read back; if any of that
fails the old bits are put back. Only if that fails too is the update torn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import numpy as np

from syncline import kernels
from syncline.abc import Observe, ignore
from syncline.commit.recorded import Recorded
from syncline.errors import CommitError, LayoutError, SynclineError, TornUpdateError, VerifyError
from syncline.types import Bits, Record, Step, TensorMeta, unsigned

STEPS = ("apply.record_written", "apply.flushed", "apply.verified")

_IN_MEMORY_BYTES = 1 << 26


class Target(Protocol):
    """Weights that can be read and overwritten at the places of a record."""

    def read(self, record: Record) -> Bits:
        """Return the bits that stand at the record's places, in their order."""

    def write(self, record: Record, bits: Bits) -> None:
        """Put `bits` at the record's places."""

    def flush(self) -> None:
        """Make what was written as durable as these weights ever are."""


class Recorder(Protocol):
    """Where records are kept until they are written."""

    def add(self, record: Record) -> None:
        """Keep one record."""


def record_all(
    records: Iterable[Record],
    metas: Mapping[str, TensorMeta],
    target: Target,
    writer: Recorder,
) -> None:
    """Drain the records into a journal; nothing is written to the target.

    Every record is checked first: its tensor, width and places, and that the bits which it calls old are
    those that stand there.

    Raises:
        LayoutError, CodecError: a record does not fit its tensor.
        VerifyError: the weights are not those that the update was made for.
        Whatever the iterator raises.
    """
    for record in records:
        check(record, metas)
        _compare(record, target.read(record), record.old_bits, "before the update")
        writer.add(record)


def check(record: Record, metas: Mapping[str, TensorMeta]) -> None:
    """Check that every place of a record lies in its tensor.

    Raises:
        LayoutError: unknown tensor, wrong width, or arrays of different lengths.
        CodecError: a place is out of range or out of order.
    """
    meta = metas.get(record.name)
    if meta is None:
        raise LayoutError(
            f"tensor {record.name!r} is not one that the engine holds", tensor=record.name
        )
    sizes = {record.new_bits.size, record.old_bits.size}
    if record.offsets is not None:
        sizes.add(record.offsets.size)
    dtypes = {record.new_bits.dtype, record.old_bits.dtype}
    if len(sizes) != 1 or dtypes != {unsigned(meta.unit_bytes)}:
        raise LayoutError(
            f"tensor {record.name!r}: expected one length and units of {unsigned(meta.unit_bytes)}, "
            f"found lengths {sorted(sizes)} and units of {' and '.join(sorted(map(str, dtypes)))}",
            tensor=record.name,
        )
    count = record.new_bits.size
    room = meta.unit_count - record.start
    if record.start < 0 or room < 0 or (record.offsets is None and count > room):
        raise LayoutError(
            f"tensor {record.name!r}: {count} units from {record.start} on do not lie in its "
            f"{meta.unit_count} units",
            tensor=record.name,
        )
    if record.offsets is not None:
        kernels.check_ascending(record.offsets, room)


def overwrite(journal: Iterable[Record], target: Target, observe: Observe = ignore) -> None:
    """Write every new bit, flush, and read all of them back. May be repeated after a crash.

    Raises:
        VerifyError: what was read back is not what was written.
    """
    _write(((record, record.new_bits) for record in journal), target, observe)
    target.flush()
    observe(Step("apply.flushed"))
    for record in journal:
        _compare(record, target.read(record), record.new_bits, "after writing")
    observe(Step("apply.verified"))


def restore(journal: Iterable[Record], target: Target) -> None:
    """Write every old bit back, flush, and read all of them back. May be repeated.

    Raises:
        VerifyError: what was read back is not what was written.
    """
    _write(((record, record.old_bits) for record in journal), target, ignore)
    target.flush()
    for record in journal:
        _compare(record, target.read(record), record.old_bits, "after undoing")


def attempt(do: Callable[[], None], undo: Callable[[], None]) -> None:
    """Run `do`; if it fails, run `undo` and pass the failure on.

    Raises:
        TornUpdateError: `undo` failed too.
        CommitError: `do` failed with an error from outside Syncline's tree; it was undone.
    """
    try:
        do()
    except BaseException as error:
        _undo(undo, error)
        if isinstance(error, SynclineError) or not isinstance(error, Exception):
            raise
        raise CommitError(
            f"the update failed: {type(error).__name__}: {error}; it was undone, every bit is as before"
        ) from error


def apply_in_memory(
    records: Iterable[Record],
    metas: Mapping[str, TensorMeta],
    target: Target,
    commit: Callable[[], None] = lambda: None,
    revert: Callable[[], None] = lambda: None,
) -> None:
    """Overwrite weights that die with the process, so that it either works or never happened.

    Args:
        commit: notes the new version; part of the update, so that an interrupt cannot come between.
        revert: notes the old one again.

    Memory: the records, up to 64 MiB of them, and all of them in a temporary file above that.

    Raises:
        TornUpdateError: the update failed and undoing it failed too.
        SynclineError, or what the iterator raises: every bit is as it was before.
    """
    with Recorded(_IN_MEMORY_BYTES) as recorded:
        record_all(records, metas, target, recorded)
        journal = recorded.journal()

        def do() -> None:
            overwrite(journal, target)
            commit()

        def undo() -> None:
            restore(journal, target)
            revert()

        attempt(do, undo)


def _undo(undo: Callable[[], None], error: BaseException) -> None:
    try:
        undo()
    except BaseException as second:
        raise TornUpdateError(
            f"the update failed ({type(error).__name__}: {error}), and undoing it failed too "
            f"({type(second).__name__}: {second}): the engine holds a mix of two versions; stop serving "
            "from it until a full version has been applied"
        ) from second


def _write(pairs: Iterator[tuple[Record, Bits]], target: Target, observe: Observe) -> None:
    done_bytes = 0
    for record, bits in pairs:
        target.write(record, bits)
        done_bytes += bits.nbytes
        observe(Step("apply.record_written", done_bytes))


def _compare(record: Record, found: Bits, expected: Bits, when: str) -> None:
    if np.array_equal(found, expected):
        return
    at = int(np.flatnonzero(found != expected)[0])
    place = record.start + (at if record.offsets is None else int(record.offsets[at]))
    raise VerifyError(
        f"tensor {record.name!r}: {when}, unit {place} must be {int(expected[at]):#x}, found "
        f"{int(found[at]):#x}; something else changed the weights, or the memory is faulty",
        tensor=record.name,
    )
