"""How many bytes other layouts take for the same changes: re-implementations of layouts, not other programs.

Only what carries the changes is counted, without any header, which is in the others' favour. Each function
takes the changed tensors of a model as pairs of uint16 bits. Sources: the projects' formats as of 2026.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from syncline.format import zstd
from syncline.types import Bits

Pair = tuple[Bits, Bits]
BUCKET_BYTES = 512 << 20


def slime_xor(pairs: Sequence[Pair]) -> int:
    """One zstd-1 frame of the dense XOR for each tensor."""
    return sum(len(zstd.compress((old ^ new).data)) for old, new in pairs)


def slime_overwrite(pairs: Sequence[Pair]) -> int:
    """Count, u32 byte positions and new bytes of each tensor in one zstd-1 frame."""
    total_bytes = 0
    for old, new in pairs:
        before, after = old.view(np.uint8), new.view(np.uint8)
        places = np.flatnonzero(before != after)
        head = np.array([places.size], "<u4").tobytes()
        content = head + places.astype("<u4").tobytes() + after[places].tobytes()
        total_bytes += len(zstd.compress(content))
    return total_bytes


def nemo_rl(pairs: Sequence[Pair]) -> int:
    """Gaps in the narrowest of u8, u16 and u32 for each tensor and 16-bit XOR, a zstd-1 frame a bucket."""
    total_bytes = held_bytes = 0
    gaps: list[bytes] = []
    flips: list[bytes] = []
    for number, (old, new) in enumerate(pairs, 1):
        places = np.flatnonzero(old != new)
        distances = np.diff(places, prepend=-1) - 1
        gaps.append(distances.astype(np.min_scalar_type(distances.max())).tobytes())
        flips.append((old[places] ^ new[places]).tobytes())
        held_bytes += len(gaps[-1]) + len(flips[-1])
        if held_bytes >= BUCKET_BYTES or number == len(pairs):
            total_bytes += len(zstd.compress(b"".join(gaps + flips)))
            gaps, flips, held_bytes = [], [], 0
    return total_bytes


def trl(pairs: Sequence[Pair]) -> int:
    """An int32 position and the new value for every change."""
    return sum(6 * int(np.count_nonzero(old != new)) for old, new in pairs)


def int32_zstd(pairs: Sequence[Pair]) -> int:
    """Int32 positions and new values of all tensors through zstd-1."""
    return _zstd_1(pairs, lambda places: places.astype("<i4"))


def u16_gaps_zstd(pairs: Sequence[Pair]) -> int:
    """16-bit gaps, 32-bit for a tensor with a longer one, and new values of all tensors through zstd-1."""

    def gaps(places: NDArray[np.int64]) -> NDArray[np.generic]:
        distances = np.diff(places, prepend=-1) - 1
        return distances.astype("<u2" if distances.max() <= 0xFFFF else "<u4")

    return _zstd_1(pairs, gaps)


LAYOUTS: Mapping[str, Callable[[Sequence[Pair]], int]] = {
    "slime XOR + zstd-1": slime_xor,
    "slime overwrite + zstd-1": slime_overwrite,
    "NeMo-RL gaps + XOR + zstd-1": nemo_rl,
    "TRL int32 + value": trl,
    "int32 + value + zstd-1": int32_zstd,
    "u16 gaps + value + zstd-1": u16_gaps_zstd,
}


def uniform_bound_bytes(pairs: Sequence[Pair]) -> float:
    """Entropy of places that lie anywhere alike in their tensor, and of steps in ulps over all tensors."""
    bits = sum(_place_bits(np.count_nonzero(old != new), old.size) for old, new in pairs)
    return (bits + _entropy_bits(_counts(_steps(pairs)))) / 8


def exponent_bound_bytes(pairs: Sequence[Pair]) -> float:
    """The same, places given tensor and exponent of the base, steps given the exponent.

    What it costs to say how many units of each exponent change is not in it.
    """
    bits, steps = 0.0, _steps(pairs)
    moved = []
    for old, new in pairs:
        exponents, changed = old >> 7 & 0xFF, old != new
        members = np.bincount(exponents, minlength=256)
        moved.append(exponents[changed])
        counts = np.bincount(moved[-1], minlength=256)
        bits += sum(map(_place_bits, counts.tolist(), members.tolist()))
    given = np.concatenate(moved)
    for exponent in np.unique(given):
        bits += _entropy_bits(_counts(steps[given == exponent]))
    return bits / 8


def _zstd_1(pairs: Sequence[Pair], told: Callable[[NDArray[np.int64]], NDArray[np.generic]]) -> int:
    places, values = [], []
    for old, new in pairs:
        where = np.flatnonzero(old != new)
        places.append(told(where).tobytes())
        values.append(new[where].tobytes())
    return len(zstd.compress(b"".join(places + values)))


def _steps(pairs: Sequence[Pair]) -> NDArray[np.int16]:
    return np.concatenate([(new - old)[old != new].view(np.int16) for old, new in pairs])


def _counts(symbols: NDArray[np.generic]) -> NDArray[np.int64]:
    return np.unique(symbols, return_counts=True)[1]


def _place_bits(changed: int, members: int) -> float:
    return _entropy_bits(np.array([changed, members - changed]))


def _entropy_bits(counts: NDArray[np.int64]) -> float:
    """Return the entropy of as many symbols as the counts add up to, in bits."""
    some = counts[counts > 0].astype(np.float64)
    return float(-(some * np.log2(some / some.sum())).sum())
