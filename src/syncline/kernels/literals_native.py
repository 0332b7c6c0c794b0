"""The native writer of literals behind the signature of `literals_reference`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from syncline.kernels import _native


def compress(data: NDArray[np.uint8]) -> bytes | None:
    """See `literals_reference.compress`."""
    frame = np.empty(_native.literals_room(data.size), np.uint8)
    used = _native.compress_literals(data, frame)
    return frame[:used].tobytes() if used else None
