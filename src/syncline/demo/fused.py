"""Layers that vLLM and SGLang fuse, cut by the sizes that the layers themselves give.

Both have these modules and attributes, and neither Syncline's tables nor its learned placements are asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Fused layers, and the names of their parts in a checkpoint, in the order of their rows."""


def parameters(model: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield every parameter once: its name, itself, and the layer that it is the weight of, None if of none."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                is_layer = leaf == "weight" and hasattr(module, "quant_method")
                yield f"{path}.{leaf}", parameter.detach(), module if is_layer else None


def parts(name: str, weight: Any, layer: Any) -> list[tuple[str, int]]:
    """Return the names in the checkpoint of a parameter's parts, with their rows, padding left out.

    Args:
        layer: a linear layer, embedding or output head, not split over ranks, or None; see `parameters`.
    """
    if layer is None:
        return [(name, len(weight))]
    path = name.removesuffix(".weight")
    parent, _, leaf = path.rpartition(".")
    if leaf in FUSED:
        sizes = [int(size) for size in layer.output_sizes]
        named = zip(FUSED[leaf], sizes, strict=True)
        return [(f"{parent}.{part}.weight", rows) for part, rows in named]
    for size in ("org_vocab_size", "output_size_per_partition"):
        if hasattr(layer, size):
            return [(name, int(getattr(layer, size)))]
    return [(name, len(weight))]
