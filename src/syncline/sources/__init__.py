"""Where a publisher's weights come from: memory, a checkpoint on disk, or memory whose writes are seen.

A source yields canonical tensors as bits, each once, in views that stay unchanged until the next is asked
for. It never converts a value and never leaves a tensor out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from syncline.abc import WeightSource
from syncline.errors import ConfigError
from syncline.sources.checkpoint import CheckpointSource
from syncline.sources.hook import watch
from syncline.sources.memory import MemorySource
from syncline.sources.merged_lora import merged_lora
from syncline.sources.torch_shards import fsdp_layout, megatron_shards
from syncline.sources.watched import WatchedWeights

__all__ = [
    "CheckpointSource",
    "MemorySource",
    "WatchedWeights",
    "as_source",
    "fsdp_layout",
    "megatron_shards",
    "merged_lora",
    "watch",
]


def as_source(
    weights: WeightSource | Mapping[str, Any] | Iterable[tuple[str, Any]],
) -> WeightSource:
    """Return a source for what a user hands to a publisher; a source is returned as it is.

    Args:
        weights: a source; or torch tensors and numpy arrays, as a mapping by name or as pairs of name
            and tensor, such as `module.state_dict()` or `module.named_parameters()`.

    Raises:
        ConfigError: it is none of these; a path, for one, must be opened as `CheckpointSource(path)`.
    """
    if isinstance(weights, WeightSource):
        return weights
    given: object = weights
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise ConfigError(
            f"weights: expected a source, a mapping of names to tensors, or pairs of them, found "
            f"{type(weights).__name__}; pass module.state_dict() or CheckpointSource(path)"
        )
    return MemorySource(weights)
