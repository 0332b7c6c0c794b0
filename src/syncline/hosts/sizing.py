"""How large buckets are: a pure function of what is free and what is to move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from syncline.errors import ConfigError

ALIGN_BYTES = 256


@dataclass(frozen=True, slots=True)
class Buckets:
    """How a checkpoint is staged: `count` buckets of `nbytes` each, on every receiver."""

    nbytes: int
    count: int


def size_buckets(
    free_bytes: Sequence[int],
    checkpoint_bytes: int,
    *,
    share: float = 0.5,
    limit_bytes: int = 1 << 30,
    least_bytes: int = 1 << 20,
) -> Buckets:
    """Return two buckets that fit into the smallest free memory, one if two would be too small.

    A bucket is never larger than the checkpoint, nor than `limit_bytes`, and a multiple of 256 bytes.

    Args:
        free_bytes: free memory of every receiver.
        checkpoint_bytes: what the largest receiver is to get.
        share: of the free memory that may be used.
        least_bytes: a bucket smaller than this is not worth its round trips; two become one before.

    Raises:
        ConfigError: not even one bucket of `ALIGN_BYTES` fits.

    Example:
        >>> size_buckets([8 << 30, 4 << 20], 1 << 30)
        Buckets(nbytes=1048576, count=2)
        >>> size_buckets([100 << 30], 4 << 20)
        Buckets(nbytes=4194304, count=2)
        >>> size_buckets([1 << 20], 1 << 30)
        Buckets(nbytes=524288, count=1)
    """
    if not free_bytes or min(free_bytes) < 0 or not 0 < share <= 1 or limit_bytes < ALIGN_BYTES:
        raise ConfigError(
            f"need free memory of every receiver, a share in (0, 1] and a limit of {ALIGN_BYTES} bytes or "
            f"more; found {list(free_bytes)}, {share}, {limit_bytes}"
        )
    usable = int(min(free_bytes) * share)
    most = min(limit_bytes, _up(max(1, checkpoint_bytes)))
    for count in (2, 1):
        nbytes = min(most, usable // count) // ALIGN_BYTES * ALIGN_BYTES
        if nbytes >= min(most, max(least_bytes, ALIGN_BYTES)) or (count == 1 and nbytes):
            return Buckets(nbytes, count)
    raise ConfigError(f"{min(free_bytes)} bytes are free on a receiver: no bucket fits")


def _up(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
