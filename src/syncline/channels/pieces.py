"""Putting the pieces of a bucket into a buffer, whichever side of a GPU they and it lie on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from syncline.arrays import torch_module
from syncline.types import Bits, DeviceBits

Pieces = Sequence[tuple[int, Bits | DeviceBits]]


def nbytes_of(pieces: Pieces) -> int:
    """Return how long a bucket with these pieces is."""
    if not pieces:
        return 0
    offset, bits = pieces[-1]
    return offset + int(bits.nbytes)


def fill(buffer: Bits | DeviceBits, pieces: Pieces) -> None:
    """Copy every piece to its offset in `buffer`; what lies between pieces stays as it is."""
    for offset, bits in pieces:
        there = buffer[offset : offset + int(bits.nbytes)]
        if isinstance(bits, np.ndarray):
            raw = bits.view(np.uint8)
            if isinstance(there, np.ndarray):
                np.copyto(there, raw)
            else:
                there.copy_(torch_module().from_numpy(raw), non_blocking=True)
        elif isinstance(there, np.ndarray):
            torch_module().from_numpy(there).copy_(bits.view(torch_module().uint8))
        else:
            there.copy_(bits.view(torch_module().uint8), non_blocking=True)
