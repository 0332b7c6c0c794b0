"""The kernels' work as plain torch operations on one thread: what one would write without them."""

from __future__ import annotations

from typing import Any

import numpy as np

from syncline.kernels import reference
from syncline.types import Bits

_ROWS_AT_ONCE = 1024


class TorchRivals:
    """Each method does what the kernel of that name does, on whole tensors where torch can.

    Args:
        old, new: (n,) uint16; torch sees them as int16, bit for bit.
        places: (k,) int64, where they differ.
    """

    def __init__(self, old: Bits, new: Bits, places: Any) -> None:
        import torch

        torch.set_num_threads(1)
        self._torch = torch
        self._old = torch.from_numpy(old.view(np.int16))
        self._new = torch.from_numpy(new.view(np.int16))
        self._scratch = self._old.clone()
        self._places = torch.from_numpy(places)
        self._values = self._new[self._places]
        keys = np.stack(reference.column_keys()).astype(np.int64)
        self._column_keys = torch.from_numpy(keys)

    def copy(self) -> object:
        """Copy everything."""
        return self._scratch.copy_(self._new)

    def diff(self) -> object:
        """Return places, and both sides' bits there."""
        places = (self._old != self._new).nonzero().squeeze(1)
        return places.to(self._torch.int32), self._old[places], self._new[places]

    def diff_and_refresh(self) -> object:
        """Do the same, and copy the new bits over a snapshot."""
        found = self.diff()
        self._scratch.copy_(self._new)
        return found

    def fingerprint(self) -> object:
        """Return both lanes' row sums; the row keys, a thousandth of the work, are left out."""
        sums = []
        rows = self._new.view(-1, reference.ROW_DIGITS)
        for at in range(0, len(rows), _ROWS_AT_ONCE):
            digits = rows[at : at + _ROWS_AT_ONCE].to(self._torch.int64) & 0xFFFF
            squares = digits * digits
            sums.append([(squares * key).sum(1) for key in self._column_keys])
        return sums

    def scatter(self) -> object:
        """Write the new bits at the places."""
        return self._scratch.index_copy_(0, self._places, self._values)

    def gather(self) -> object:
        """Read the bits at the places."""
        return self._scratch[self._places]

    def xor(self) -> object:
        """Return old ^ new."""
        return self._old ^ self._new
