"""Layers that vLLM and SGLang fuse, cut by the sizes that the layers themselves give.

Both have these modules and attributes, and neither Syncline's tables nor its learned placements are asked.
"""

from __future__ import annotations

from typing import Any

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Fused layers, and the names of their parts in a checkpoint, in the order of their rows."""


def parts(path: str, module: Any) -> list[tuple[str, int]]:
    """Return the names in the checkpoint of a layer's parts, with their rows, padding left out.

    Args:
        path: the module's name.
        module: a linear layer, embedding or output head, not split over ranks.
    """
    parent, _, leaf = path.rpartition(".")
    if leaf in FUSED:
        sizes = [int(size) for size in module.output_sizes]
        return [(f"{parent}.{name}", rows) for name, rows in zip(FUSED[leaf], sizes, strict=True)]
    vocabulary = getattr(module, "org_vocab_size", None)
    if vocabulary is not None:
        return [(path, int(vocabulary))]
    rows = getattr(module, "output_size_per_partition", None)
    return [(path, int(module.weight.shape[0] if rows is None else rows))]
