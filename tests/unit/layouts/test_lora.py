"""Adapters: how they are cut, what they are called, and that shards and checkpoint convert."""

from __future__ import annotations

import numpy as np
import pytest

from random_layouts import empty_shards, random_values
from syncline.errors import VerifyError
from syncline.layouts import Layout, MegatronMesh, check, gather, megatron_layout, scatter
from syncline.layouts.families import BUILT_IN
from syncline.layouts.lora import with_lora

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "vocab_size": 20,
}
PREFIX = "base_model.model.model.layers.1.self_attn"


@pytest.fixture(scope="module")
def layout() -> Layout:
    family = with_lora(BUILT_IN["qwen3"], 8)
    return megatron_layout(CONFIG, MegatronMesh(4, tp=4), family=family)


def test_adapters_are_cut_as_their_matrices(layout: Layout) -> None:
    check(layout)
    shapes = {tensor.name: tensor.shape for tensor in layout.placements[1].tensors}
    local = "0/decoder.layers.1.self_attention"
    assert shapes[f"{local}.linear_qkv.adapter.linear_in.weight"] == (2, 16)
    assert shapes[f"{local}.linear_qkv.adapter.linear_out.weight"] == (12, 8)
    assert shapes[f"{local}.linear_proj.adapter.linear_in.weight"] == (8, 6)
    assert shapes[f"{local}.linear_proj.adapter.linear_out.weight"] == (4, 8)
    assert shapes[f"{local}.linear_qkv.to_wrap.weight"] == (12, 16)
    assert layout.catalog[f"{PREFIX}.o_proj.lora_A.weight"].meta.shape == (8, 24)
    adapters = [name for name in layout.catalog if ".lora_" in name]
    assert len(adapters) == 2 * 7 * 2
    assert all(name.startswith("base_model.model.model.layers.") for name in adapters)


def test_a_shared_input_is_stored_for_each_part(layout: Layout) -> None:
    values = random_values(layout.catalog, np.random.default_rng(1))
    for name, (_, bits) in values.items():
        if ".lora_A." in name:
            first = name.replace("k_proj", "q_proj").replace("v_proj", "q_proj")
            bits[:] = values[first.replace("up_proj", "gate_proj")][1]
    shards = empty_shards(layout)
    scatter(layout, values.values(), shards)
    for meta, bits in gather(layout, shards):
        np.testing.assert_array_equal(bits, values[meta.name][1])
    values[f"{PREFIX}.k_proj.lora_A.weight"][1][0] ^= 1
    with pytest.raises(VerifyError, match=r"k_proj\.lora_A\.weight is stored as a copy"):
        scatter(layout, values.values(), shards)
