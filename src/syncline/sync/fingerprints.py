"""Fingerprints of whole tensors, computed on the thread pool."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from syncline import kernels
from syncline.sync.phases import Phases
from syncline.sync.slices import Slice, by_tensor, in_batches, whole, windows_of
from syncline.types import ZERO, Bits, DeviceBits, Fingerprint, TensorMeta


class _Part(NamedTuple):
    meta: TensorMeta
    fingerprint: Fingerprint


def fingerprints(
    metas: Iterable[TensorMeta], bits_of: Callable[[str], Bits | DeviceBits]
) -> Iterator[tuple[TensorMeta, Fingerprint]]:
    """Yield the fingerprint of every tensor, in order. Cost: reads every bit once.

    Args:
        bits_of: returns the bits of the tensor with this name; called in this thread.
    """

    def part(piece: Slice, bits: Bits | DeviceBits) -> _Part:
        window = bits[piece.units.start : piece.units.stop]
        seeds = kernels.seeds(piece.meta.name)
        return _Part(piece.meta, kernels.fingerprint(window, piece.units.start, seeds))

    work = (
        (piece, partial(part, piece, bits))
        for meta in metas
        for bits in [bits_of(meta.name)]
        # A device takes a whole tensor at once; starting work there costs more than it does by windows.
        for piece in (windows_of(meta) if isinstance(bits, np.ndarray) else [whole(meta)])
    )
    for meta, parts in by_tensor(in_batches(work, Phases())):
        yield meta, sum((found.fingerprint for found in parts), ZERO)
