"""Case C: 256,406,528 BF16 weights in 128 tensors, some of each tensor's moved by one ulp at random places.

14 Llama-style layers, hidden size 1024, vocabulary 64,000. Places have no structure, so that no encoding
does better than entropy allows. The draws are torch's, in a fixed order: other projects are measured on the
same bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from syncline.types import Bits, TensorMeta

LAYERS, HIDDEN, INTERMEDIATE, VOCABULARY = 14, 1024, 3072, 64_000
DEVIATION = 0.02


def shapes(vocabulary: int = VOCABULARY) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of every tensor, in the order of the draws."""
    yield "model.embed_tokens.weight", (vocabulary, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"{prefix}self_attn.{name}.weight", (HIDDEN, HIDDEN)
        for name in ("gate_proj", "up_proj"):
            yield f"{prefix}mlp.{name}.weight", (INTERMEDIATE, HIDDEN)
        yield f"{prefix}mlp.down_proj.weight", (HIDDEN, INTERMEDIATE)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{name}.weight", (HIDDEN,)
    yield "model.norm.weight", (HIDDEN,)


def tensors(density: float = 0.01, seed: int = 0) -> Iterator[tuple[TensorMeta, Bits, Bits]]:
    """Yield meta, bits before and bits after of every tensor.

    A little less than `density` of each changes, since places may be drawn twice.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    for name, shape in shapes():
        drawn = torch.randn(shape, generator=generator) * DEVIATION
        old = drawn.to(torch.bfloat16).view(torch.int16).reshape(-1)
        count = max(1, round(old.numel() * density))
        places = torch.randint(0, old.numel(), (count,), generator=generator).unique()
        signs = torch.randint(0, 2, (places.numel(),), generator=generator) * 2 - 1
        new = old.clone()
        new[places] += signs.to(torch.int16)
        meta = TensorMeta(name, "BF16", shape)
        yield meta, old.numpy().view(np.uint16), new.numpy().view(np.uint16)
