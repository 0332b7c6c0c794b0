"""Values that are no numbers outlive the requests that left them, in the memory of the KV cache.

A block of the cache has more slots than its request has tokens. Attention multiplies what lies in the others by 0,
and 0 times NaN is NaN: so what one version left there spoils answers of later ones, though every cache was
reset, until all slots have been written again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any


class KvMemory:
    """The KV cache of one worker, as memory.

    Args:
        layers: by name, what vLLM calls the static forward context: those with a `kv_cache` count.
    """

    def __init__(self, layers: Mapping[str, Any]) -> None:
        # The cache is allocated when the layers are long there.
        self._layers = layers

    def is_finite(self) -> bool:
        """Tell whether all that lies in it is a number. Cost: reads it once; may run beside generation.

        A cache of integers or of eight bits is said not to be, since nobody can tell.
        """
        return all(_is_finite(cache) for cache in self._caches())

    def clear(self) -> None:
        """Fill it with zeros. No request may have anything in it. Cost: writes it once."""
        for cache in self._caches():
            cache.zero_()

    def _caches(self) -> Iterator[Any]:
        seen = set()
        for layer in self._layers.values():
            cache: Any = getattr(layer, "kv_cache", None)
            if hasattr(cache, "data_ptr") and cache.numel() and cache.data_ptr() not in seen:
                seen.add(cache.data_ptr())
                yield cache


def _is_finite(cache: Any) -> bool:
    if not cache.is_floating_point() or cache.element_size() == 1:
        return False
    # NaN goes through both, and neither can overflow.
    return all(math.isfinite(float(end)) for end in cache.aminmax())
