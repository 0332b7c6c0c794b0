"""The door to a fast writer of zstd frames that are nothing but Huffman-coded literals.

For noise from a small alphabet, such as the exponents of weights, that is all that a zstd frame gains.
Any zstd library reads the frames; they are the same on every machine and with every release.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from syncline.errors import LayoutError
from syncline.kernels.backend import fastest
from syncline.kernels.checks import check_bits

MAX_BYTES = (1 << 32) - 1


def compress(data: NDArray[np.uint8]) -> bytes | None:
    """Return one zstd frame of `data`, with its content size; None if a byte is above 128.

    Args:
        data: (n,) uint8, n below 2**32.

    Cost: two passes; about twice as fast as zstandard's own entropy coder with hardly any match search.

    Raises:
        LayoutError: `data` is not of the right type, or too long.

    Example:
        >>> import zstandard
        >>> symbols = np.arange(3000, dtype=np.uint8) % 5 % 3
        >>> frame = compress(symbols)
        >>> len(frame), zstandard.ZstdDecompressor().decompress(frame) == symbols.tobytes()
        (627, True)
    """
    check_bits(data)
    if data.dtype != np.uint8 or data.size > MAX_BYTES:
        raise LayoutError(
            f"literals are at most {MAX_BYTES} uint8, not {data.size} of {data.dtype}"
        )
    frame: bytes | None = fastest("literals").compress(data)
    return frame
