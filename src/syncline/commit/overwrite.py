"""Overwriting live weights so that it either works or never happened.

All bits that go in come from a sealed journal. They are written, flushed and read back; if any of that
fails the old bits are put back. Only if that fails too is the update torn.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import Protocol, TypeVar

from syncline import kernels, threads
from syncline.abc import Observe, ignore
from syncline.commit.recorded import Recorded
from syncline.errors import CommitError, LayoutError, SynclineError, TornUpdateError, VerifyError
from syncline.types import Bits, Record, Step, TensorMeta, unsigned

STEPS = ("apply.record_written", "apply.flushed", "apply.verified")

_IN_MEMORY_BYTES = 1 << 26
_BATCH_BYTES = 1 << 18
"""New bits that one job writes, unless a single record has more."""

T = TypeVar("T")


class Target(Protocol):
    """Weights that can be read and overwritten at the places of a record.

    Attributes:
        is_concurrent: different records may be read and written at the same time, on any thread; what is
            written needs no flush; and no two tensors share memory.
    """

    is_concurrent: bool

    def first_difference(self, record: Record, bits: Bits) -> int | None:
        """Return the index of the first of the record's places where other bits than these stand."""

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
) -> bool:
    """Drain the records into a journal; nothing is written to the target.

    Every record is checked first: its tensor, width and places, and that the bits which it calls old are
    those that stand there. Returns whether their order shows that no place is in two of them.

    Raises:
        LayoutError, CodecError: a record does not fit its tensor.
        VerifyError: the weights are not those that the update was made for.
        Whatever the iterator raises.
    """
    order = _Order()
    for record in records:
        check(record, metas)
        order.add(record)
        _compare(target, record, record.old_bits, "before the update")
        writer.add(record)
    return order.are_apart


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


class _Order:
    """Whether the records of each tensor come together and rise, so that no two can share a place."""

    def __init__(self) -> None:
        self.are_apart = True
        self._done: set[str] = set()
        self._name: str | None = None
        self._end = 0

    def add(self, record: Record) -> None:
        if record.name != self._name:
            self.are_apart &= record.name not in self._done
            self._done.add(record.name)
            self._name, self._end = record.name, 0
        if not record.new_bits.size:
            return
        places = record.offsets
        first, last = (
            (0, record.new_bits.size - 1) if places is None else (int(places[0]), int(places[-1]))
        )
        self.are_apart &= record.start + first >= self._end
        self._end = record.start + last + 1


def overwrite(
    journal: Iterable[Record],
    target: Target,
    observe: Observe = ignore,
    *,
    are_apart: bool = False,
) -> None:
    """Write every new bit, flush, and read all of them back. May be repeated after a crash.

    Args:
        are_apart: no place is in two records, as `record_all` found. Then a target that allows it is
            written on the thread pool, and each record is read back as soon as it has been written.

    Raises:
        VerifyError: what was read back is not what was written.
    """
    _put(journal, lambda record: record.new_bits, target, "after writing", observe, are_apart)


def restore(journal: Iterable[Record], target: Target, *, are_apart: bool = False) -> None:
    """Write every old bit back, flush, and read all of them back. May be repeated.

    Raises:
        VerifyError: what was read back is not what was written.
    """
    _put(journal, lambda record: record.old_bits, target, "after undoing", ignore, are_apart)


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
        are_apart = record_all(records, metas, target, recorded)
        journal = recorded.journal()

        def do() -> None:
            overwrite(journal, target, are_apart=are_apart)
            commit()

        def undo() -> None:
            restore(journal, target, are_apart=are_apart)
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


def _put(
    journal: Iterable[Record],
    bits_of: Callable[[Record], Bits],
    target: Target,
    when: str,
    observe: Observe,
    are_apart: bool,
) -> None:
    at_once = are_apart and target.is_concurrent

    def write(record: Record) -> int:
        bits = bits_of(record)
        target.write(record, bits)
        if at_once:  # while it is in the cache
            _compare(target, record, bits, when)
        return bits.nbytes

    done_bytes = 0
    with closing(_on_pool(journal, write) if at_once else _here(journal, write)) as written:
        for nbytes in written:
            done_bytes += nbytes
            observe(Step("apply.record_written", done_bytes))
    target.flush()
    observe(Step("apply.flushed"))
    if not at_once:
        for record in journal:
            _compare(target, record, bits_of(record), when)
    observe(Step("apply.verified"))


def _here(journal: Iterable[Record], do: Callable[[Record], T]) -> Generator[T, None, None]:
    yield from map(do, journal)


def _on_pool(journal: Iterable[Record], do: Callable[[Record], T]) -> Generator[T, None, None]:
    jobs = (partial(_all, do, records) for records in _batches(journal))
    with closing(threads.in_order(jobs)) as results:
        for batch in results:
            yield from batch


def _all(do: Callable[[Record], T], records: list[Record]) -> list[T]:
    return [do(record) for record in records]


def _batches(journal: Iterable[Record]) -> Iterator[list[Record]]:
    batch: list[Record] = []
    batch_bytes = 0
    for record in journal:
        batch.append(record)
        batch_bytes += record.new_bits.nbytes
        if batch_bytes >= _BATCH_BYTES:
            yield batch
            batch, batch_bytes = [], 0
    if batch:
        yield batch


def _compare(target: Target, record: Record, expected: Bits, when: str) -> None:
    at = target.first_difference(record, expected)
    if at is None:
        return
    place = record.start + (at if record.offsets is None else int(record.offsets[at]))
    raise VerifyError(
        f"tensor {record.name!r}: {when}, unit {place} must be {int(expected[at]):#x}, found "
        f"{int(target.read(record)[at]):#x}; something else changed the weights, or the memory is faulty",
        tensor=record.name,
    )
