"""What payload sizes can be foreseen from counts alone, for changes that lie anywhere alike.

`tests/contracts/codecs.py` and `tests/unit/codecs/test_packed.py` hold them to what is encoded.
"""

from __future__ import annotations

from math import log2
from types import MappingProxyType

from syncline.types import TensorMeta

# Optimizer steps at BF16 are mostly one ulp; at F32 and F64 they are hundreds of ulps and more.
STEP_BITS = MappingProxyType({1: 1.4, 2: 1.4, 4: 12.0, 8: 40.0})
"""Entropy of one step by unit bytes."""

CHANGED_BYTES = MappingProxyType({1: 1.0, 2: 1.0, 4: 1.9, 8: 5.0})
"""How many bytes of a changed unit differ, by unit bytes."""


def place_bytes(meta: TensorMeta, changed: int) -> float:
    """Return the fewest bytes that can say which `changed` units of a tensor changed.

    Example:
        >>> round(place_bytes(TensorMeta("w", "BF16", (1000, 1000)), 10_000))
        10099
    """
    if not 0 < changed < meta.unit_count:
        return 0.0
    share = changed / meta.unit_count
    entropy_bits = -share * log2(share) - (1 - share) * log2(1 - share)
    return meta.unit_count * entropy_bits / 8
