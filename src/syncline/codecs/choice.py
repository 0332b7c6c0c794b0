"""Which encoding brings a tensor's changes over soonest, by the link's speed and what coding costs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from syncline.codecs import exponents
from syncline.codecs.indices import Indices
from syncline.codecs.packed import Packed
from syncline.codecs.tight import Tight
from syncline.types import TensorMeta


class _Cost(NamedTuple):
    """Seconds that one thread takes to encode and decode, and the payload against `predict_bytes`."""

    unit_s: float
    change_s: float
    size_ratio: float


# One core of an EPYC with AVX-512, `syncline bench`; the sizes on weights out of RL (docs/explanation/performance.md).
_COSTS: Mapping[str, _Cost] = MappingProxyType(
    {
        Indices.name: _Cost(0.0, 3e-9, 1.0),
        Packed.name: _Cost(0.0, 11e-9, 1.0),
        Tight.name: _Cost(0.34e-9, 17e-9, 0.72),
    }
)
DELTAS = tuple(_COSTS)
"""The encodings that compete, from the quickest to the smallest."""

_CODECS = MappingProxyType({codec.name: codec for codec in (Indices(), Packed(), Tight())})


def smallest(meta: TensorMeta) -> str:
    """Return the encoding that makes the smallest deltas of a tensor of this dtype.

    What an optimizer changes depends on the exponent, which `tight` makes use of; a dtype without one
    gives it nothing to go by, and `packed` is the quicker of the two.
    """
    return Tight.name if meta.dtype in exponents.FIELDS else Packed.name


def soonest(meta: TensorMeta, changed: int, link_bytes_per_s: float) -> str:
    """Return the encoding whose bytes and coding together take the least time.

    Args:
        changed: how many units are expected to change.
        link_bytes_per_s: what one engine gets of the way from trainer to engine.

    Example:
        >>> meta = TensorMeta("w", "BF16", (4096, 4096))
        >>> [soonest(meta, 160_000, speed) for speed in (1e6, 1e8, 1e10)]
        ['tight', 'packed', 'indices']
    """

    def seconds(name: str) -> float:
        cost = _COSTS[name]
        size_bytes = cost.size_ratio * _CODECS[name].predict_bytes(meta, changed)
        return (
            size_bytes / link_bytes_per_s + cost.unit_s * meta.unit_count + cost.change_s * changed
        )

    names = [name for name in _COSTS if name != Tight.name or meta.dtype in exponents.FIELDS]
    return min(names, key=seconds)
