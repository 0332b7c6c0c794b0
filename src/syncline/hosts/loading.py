"""Buckets that were read go into an engine: all of them, proved, or none.

An engine drains what it is given into a journal before it writes its first bit. So the last thing that is
yielded here is no bit but an answer: that of the caller's `vote`, which may be the whole fleet's.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from functools import partial

import numpy as np
from numpy.typing import NDArray

from syncline import kernels, threads
from syncline.abc import Engine
from syncline.errors import VerifyError
from syncline.hosts.sources import Sources
from syncline.hosts.taking import Bucket
from syncline.layouts import Block, CanonicalTensor, Layout
from syncline.layouts.blocks import Run, row_major
from syncline.layouts.dense import local_view
from syncline.layouts.proof import block_fingerprint
from syncline.layouts.values import to_local
from syncline.plan import Mover, Piece
from syncline.sync.checks import check_layout
from syncline.sync.decode import to_record
from syncline.sync.phases import Phases, waiting
from syncline.types import WINDOW_UNITS, ZERO, Bits, Fingerprint, Record, Span, TensorMeta
from syncline.version import HeldVersion

Found = list[Fingerprint]
"""Fingerprints of the pieces that were read, in their order."""

Vote = Callable[[Found], None]
"""Called when all was read and fits; returns if it is to be written, raises if not."""


def load_flat(
    engine: Engine,
    sources: Sources,
    buckets: Iterable[Bucket],
    phases: Phases,
    vote: Vote = lambda _: None,
) -> None:
    """Bring an engine with a model's canonical tensors, or none, to a version; raises as `Engine.apply`."""
    held = sources.held
    if engine.tensors():
        check_layout(engine.tensors(), held.manifest)
        with phases("apply"), closing(_records(engine, held, buckets, phases, vote)) as records:
            engine.apply(records, held)
    else:
        files = {n: c for host in sources.hosts for n, c in host.catalog.files.items()}
        with phases("apply"):
            engine.create(held, _tensors(held, buckets, phases, vote), files)


def load_placed(
    engine: Engine,
    layout: Layout,
    rank: int,
    held: HeldVersion,
    buckets: Iterable[Bucket],
    phases: Phases,
    vote: Vote,
) -> None:
    """Bring an engine whose tensors are one rank's local tensors to a version; raises as `Engine.apply`.

    What the rank holds is proved by who votes: only all ranks together have every element.
    """
    placement = layout.placements[rank]
    shard = {tensor.name: engine.view(tensor.name) for tensor in placement.tensors}
    mover = Mover(layout, placement, shard)

    def records() -> Generator[Record, None, None]:
        found: Found = []
        for bucket in buckets:
            for piece, bits in bucket:
                tensor = layout.catalog[piece.name]
                with phases("decode"):
                    found.append(piece_fingerprint(piece, tensor.meta, bits))
                for run, meta in mover.find(piece):
                    yield from _placed(run, meta, shard[run.block.local], bits)
        vote(found)

    with phases("apply"), closing(records()) as placed:
        engine.apply(placed, held)


def piece_fingerprint(piece: Piece, meta: TensorMeta, bits: Bits) -> Fingerprint:
    """Return what a piece adds to its tensor's fingerprint."""
    if not bits.size:
        return ZERO
    if len(piece.grid) == 1:
        return kernels.fingerprint(bits, piece.start[0], kernels.seeds(piece.name))
    block = Block(piece.name, piece.start, piece.shape, "", 0, row_major(piece.shape))
    return block_fingerprint(block, CanonicalTensor(meta, piece.grid), bits)


def require(held: HeldVersion, name: str, found: Fingerprint) -> None:
    """Raise `VerifyError` if a tensor's fingerprint is not the manifest's."""
    expected = held.manifest.by_name[name].fingerprint
    if found != expected:
        raise VerifyError(
            f"tensor {name!r}: expected fingerprint {expected.hex()} in version {held.version}, read "
            f"{found.hex()}; nothing of it is used; try again, from other hosts if this repeats",
            tensor=name,
            version=held.version,
        )


def _placed(run: Run, meta: TensorMeta, local: Bits, bits: Bits) -> Iterator[Record]:
    """Yield what a piece overwrites in a local tensor."""
    old = local_view(run, meta, local)
    new = to_local(bits.reshape(old.shape), run.block, meta)
    if run.counts and run.local_strides == (1,):
        there = TensorMeta(run.block.local, meta.dtype, (local.size,))
        for at in range(0, new.size, WINDOW_UNITS):
            record = to_record(there, Span(run.local + at, new[at : at + WINDOW_UNITS]), local)
            if record.new_bits.size:
                yield record
        return
    rows = max(1, WINDOW_UNITS // max(1, old[:1].size)) if run.counts else 1
    for first in range(0, run.counts[0] if run.counts else 1, rows):
        part = (
            (old, new) if not run.counts else (old[first : first + rows], new[first : first + rows])
        )
        record = _scattered(run, first, *part)
        if record.new_bits.size:
            yield record


def _scattered(run: Run, first: int, old: NDArray[np.generic], new: NDArray[np.generic]) -> Record:
    """Return what differs between two views of some rows of a run, at its places in the local tensor."""
    places = np.zeros((), np.int64)
    for count, stride in zip(old.shape, run.local_strides, strict=True):
        places = np.add.outer(places, np.arange(count, dtype=np.int64) * stride)
    differs = old != new
    there = places[differs]
    order = np.argsort(there, kind="stable")
    start = run.local + (first * run.local_strides[0] if run.counts else 0)
    least = int(there[order[0]]) if there.size else 0
    return Record(
        run.block.local,
        start + least,
        (there[order] - least).astype(np.uint32),
        np.ascontiguousarray(old[differs][order]),
        np.ascontiguousarray(new[differs][order]),
    )


def _windows(bucket: Bucket) -> Iterator[tuple[Piece, int, Bits]]:
    """Yield the pieces of a bucket in windows: piece, first unit in the tensor, bits."""
    for piece, bits in bucket:
        for at in range(0, max(1, bits.size), WINDOW_UNITS):
            yield piece, piece.start[0] + at, bits[at : at + WINDOW_UNITS]


def _records(
    engine: Engine, held: HeldVersion, buckets: Iterable[Bucket], phases: Phases, vote: Vote
) -> Generator[Record, None, None]:
    """Yield what differs from the engine's bits; raise before the end if the whole is not the version."""
    entries = held.manifest.by_name
    views = {name: engine.view(name) for name in entries}

    def job(piece: Piece, start: int, bits: Bits) -> tuple[str, Record, Fingerprint]:
        # Proved first: a byte that comes late, after its transport called the read done, is then never taken.
        with phases("decode"):
            found = kernels.fingerprint(bits, start, kernels.seeds(piece.name))
            record = to_record(entries[piece.name].meta, Span(start, bits), views[piece.name])
        return piece.name, record, found

    totals = dict.fromkeys(entries, ZERO)
    for bucket in buckets:
        jobs = (partial(job, *window) for window in _windows(bucket))
        with closing(waiting(threads.in_order(jobs), phases)) as results:
            for name, record, found in results:
                totals[name] += found
                if record.new_bits.size:
                    yield record
    for name, total in totals.items():
        require(held, name, total)
    vote([])


def _tensors(
    held: HeldVersion, buckets: Iterable[Bucket], phases: Phases, vote: Vote
) -> Iterator[tuple[TensorMeta, Iterator[Span]]]:
    """Yield every tensor with its spans, each proved at their end."""
    windows = (window for bucket in buckets for window in _windows(bucket))
    following = next(windows, None)
    for entry in held.manifest.tensors:

        def spans(name: str = entry.meta.name) -> Iterator[Span]:
            nonlocal following
            total = ZERO
            while following is not None and following[0].name == name:
                _, start, bits = following
                if bits.size:
                    with phases("decode"):
                        total += kernels.fingerprint(bits, start, kernels.seeds(name))
                    yield Span(start, bits)
                following = next(windows, None)
            require(held, name, total)

        yield entry.meta, spans()
    vote([])
