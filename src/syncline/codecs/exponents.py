"""Where a dtype keeps its exponent, and into which classes of exponents a window is best divided.

The chance of a change halves with every step of the exponent, so classes by exponent tell a reader,
who has the base, most of what there is to know about places.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from syncline.kernels.tight import Classes
from syncline.types import Bits, TensorMeta, Window

FIELDS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "BF16": (7, 0xFF),
        "F16": (10, 0x1F),
        "F32": (23, 0xFF),
        "F64": (52, 0x7FF),
        "F8_E4M3": (3, 0xF),
        "F8_E4M3FNUZ": (3, 0xF),
        "F8_E5M2": (2, 0x1F),
        "F8_E5M2FNUZ": (2, 0x1F),
    }
)
"""Shift and mask of the exponent by dtype; units of any other dtype are all of one class."""

# So many units out of every so many make the sample: few lines of memory are touched, and since the
# second number is prime, those of a matrix do not all come from the same columns.
_SAMPLED, _STRIDE = 64, 4093
_LEAST_SAMPLED = 1 << 18
_CLASS_BITS = 56.0
_MAX_CHOSEN = 12


def field(meta: TensorMeta) -> tuple[int, int]:
    """Return shift and mask of the exponent; mask 0 where there is none.

    Example:
        >>> field(TensorMeta("w", "BF16", (2,))), field(TensorMeta("w", "I32", (2,)))
        ((7, 255), (0, 0))
    """
    return FIELDS.get(meta.dtype, (0, 0))


def choose(meta: TensorMeta, window: Window) -> Classes:
    """Return the classes by which the window's changes are told in the fewest bits, by estimate.

    Cost: reads a sample of the window, and all changes.
    """
    shift, mask = field(meta)
    if not mask:
        return Classes(shift, mask, 0, 1)
    sample = _histogram(_sample(window.new), shift, mask)
    changes = _histogram(window.old_bits, shift, mask)
    members = np.maximum(sample * (window.new.size / sample.sum()), changes)
    lowest, count = _cheapest(members, changes)
    return Classes(shift, mask, lowest, count)


def _sample(bits: Bits) -> Bits:
    if bits.size < _LEAST_SAMPLED:
        return bits
    rows = bits[: bits.size // _STRIDE * _STRIDE].reshape(-1, _STRIDE)
    return rows[:, :_SAMPLED].reshape(-1)


def _histogram(bits: Bits, shift: int, mask: int) -> NDArray[np.float64]:
    exponents = bits >> bits.dtype.type(shift) & bits.dtype.type(mask)
    return np.bincount(exponents.astype(np.int64), minlength=mask + 1).astype(np.float64)


def _cheapest(members: NDArray[np.float64], changes: NDArray[np.float64]) -> tuple[int, int]:
    """Return lowest exponent and number of classes."""
    apart = np.concatenate(([0.0], np.cumsum(_cost_bits(members, changes))))
    up_to = _cost_bits(np.cumsum(members), np.cumsum(changes))
    from_on = _cost_bits(np.cumsum(members[::-1]), np.cumsum(changes[::-1]))[::-1]
    best_bits, best = float(up_to[-1]), (0, 1)
    for count in range(2, min(_MAX_CHOSEN, members.size) + 1):
        # Class 0 ends with exponent i, the last one begins with i + count - 1.
        ends = members.size - count + 1
        middle = apart[count - 1 : count - 1 + ends] - apart[1 : 1 + ends]
        costs = up_to[:ends] + middle + from_on[count - 1 :] + count * _CLASS_BITS
        lowest = int(np.argmin(costs))
        if costs[lowest] < best_bits:
            best_bits, best = float(costs[lowest]), (lowest, count)
    return best


def _cost_bits(members: NDArray[np.float64], changes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the entropy of which members change, in bits."""
    return _n_log_n(members) - _n_log_n(changes) - _n_log_n(members - changes)


def _n_log_n(count: NDArray[np.float64]) -> NDArray[np.float64]:
    safe: NDArray[np.float64] = np.maximum(count, 1.0)
    product: NDArray[np.float64] = count * np.log2(safe)
    return product
