"""Tensors cut into pieces of work for the thread pool, and results put together again, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from itertools import groupby
from typing import NamedTuple, Protocol, TypeVar

from syncline import threads
from syncline.sync.phases import Phases
from syncline.types import WINDOW_UNITS, TensorMeta

BATCH_BYTES = 8 << 20
"""Weights that one job works on, unless a single slice is more."""


class Slice(NamedTuple):
    """Consecutive units of one tensor: whole windows of it, or all of it."""

    meta: TensorMeta
    units: range

    @property
    def is_first(self) -> bool:
        """Whether this is where the tensor begins."""
        return self.units.start == 0

    @property
    def nbytes(self) -> int:
        """Bytes of the weights in it."""
        return len(self.units) * self.meta.unit_bytes


class Piece(Protocol):
    """A result that says of which tensor it is."""

    @property
    def meta(self) -> TensorMeta:
        """The tensor's."""


P = TypeVar("P", bound=Piece)
T = TypeVar("T")


def windows_of(meta: TensorMeta) -> Iterator[Slice]:
    """Yield a slice for every window of a tensor; an empty tensor has one empty slice."""
    for start in range(0, max(1, meta.unit_count), WINDOW_UNITS):
        yield Slice(meta, range(start, min(start + WINDOW_UNITS, meta.unit_count)))


def whole(meta: TensorMeta) -> Slice:
    """Return all of a tensor as one slice."""
    return Slice(meta, range(meta.unit_count))


def in_batches(
    work: Iterable[tuple[Slice, Callable[[], T]]], phases: Phases
) -> Generator[T, None, None]:
    """Do the work on the thread pool, about `BATCH_BYTES` of weights a job, and yield results in order.

    Memory: the results of a few batches. Raises as `threads.in_order`. Who may stop early closes it: an
    error keeps the frames that it passed, and with them a generator that nobody closes, at work.
    """
    results = threads.in_order(_jobs(work))
    try:
        while True:
            with phases("wait"):
                batch = next(results, None)
            if batch is None:
                return
            yield from batch
    finally:
        results.close()


def by_tensor(pieces: Iterable[P]) -> Iterator[tuple[TensorMeta, Iterator[P]]]:
    """Group consecutive pieces of the same tensor; each group is to be used up before the next."""
    return groupby(pieces, key=lambda piece: piece.meta)


def _jobs(work: Iterable[tuple[Slice, Callable[[], T]]]) -> Iterator[Callable[[], list[T]]]:
    batch: list[Callable[[], T]] = []
    batch_bytes = 0
    for piece, call in work:
        if batch and batch_bytes + piece.nbytes > BATCH_BYTES:
            yield partial(_each, batch)
            batch, batch_bytes = [], 0
        batch.append(call)
        batch_bytes += piece.nbytes
    if batch:
        yield partial(_each, batch)


def _each(calls: list[Callable[[], T]]) -> list[T]:
    return [call() for call in calls]
