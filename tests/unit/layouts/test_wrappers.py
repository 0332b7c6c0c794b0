"""Every text family inside every model around one: one prefix on each side, and nothing else differs."""

from __future__ import annotations

from itertools import product

import pytest

from syncline.layouts import EngineMesh, MegatronMesh, check, engine_layout, megatron_layout
from syncline.layouts.blocks import row_major
from syncline.layouts.families import BUILT_IN, WRAPPERS
from syncline.types import TensorMeta

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "tie_word_embeddings": False,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "num_nextn_predict_layers": 0,
}
MESH = MegatronMesh(4, tp=2, pp=2)


def _outside(name: str) -> str:
    """A canonical name without what a model around the text model puts before it."""
    for prefix in ("model.language_model.", "language_model.model."):
        if name.startswith(prefix):
            return "model." + name.removeprefix(prefix)
    return name.removeprefix("language_model.")


@pytest.mark.parametrize(("family", "kind"), [*product(sorted(BUILT_IN), sorted(WRAPPERS))])
def test_a_wrapped_model_is_the_text_model_under_a_prefix(family: str, kind: str) -> None:
    text = {**TEXT, "model_type": family}
    plain = megatron_layout(text, MESH)
    config = {"model_type": kind, "text_config": text}
    wrapped = megatron_layout(config, MESH)
    check(wrapped)
    assert [_outside(name) for name in wrapped.catalog] == list(plain.catalog)
    root, local_root = WRAPPERS[kind].root, WRAPPERS[kind].local_root
    assert all(
        name.startswith(root) or name in ("lm_head.weight", "language_model.lm_head.weight")
        for name in wrapped.catalog
        if not name.startswith("mtp.")
    )
    for mine, theirs in zip(wrapped.placements, plain.placements, strict=True):
        for tensor, other in zip(mine.tensors, theirs.tensors, strict=True):
            chunk, _, local = other.name.partition("/")
            assert tensor.name == f"{chunk}/{local_root}{local}"
            assert (tensor.shape, tensor.padding) == (other.shape, other.padding)
        assert [b.box for b in mine.blocks] == [b.box for b in theirs.blocks]
    engine = engine_layout(config, EngineMesh(2))
    check(engine)
    assert set(engine.catalog) == set(wrapped.catalog)


@pytest.mark.parametrize(
    ("kind", "projector"),
    [
        ("kimi_vl", "multi_modal_projector.linear_1.weight"),
        ("kimi_k25", "mm_projector.proj.0.weight"),
    ],
)
def test_kimi_keeps_its_tower_whole_and_its_output_beside_the_text(
    kind: str, projector: str
) -> None:
    config = {"model_type": kind, "text_config": {**TEXT, "model_type": "kimi_k2"}}
    text = [tensor.meta for tensor in megatron_layout(config, MESH).catalog.values()]
    tower = [
        TensorMeta("vision_tower.patch_embed.proj.weight", "BF16", (6, 3, 2, 2)),
        TensorMeta(projector, "BF16", (6, 6)),
    ]
    layout = megatron_layout(config, MESH, checkpoint=[*text, *tower])
    check(layout)
    assert "language_model.lm_head.weight" in layout.catalog
    assert "language_model.model.layers.3.mlp.experts.3.up_proj.weight" in layout.catalog
    for meta in tower:
        (block, other) = [
            block for p in layout.placements for block in p.blocks if block.name == meta.name
        ]
        assert block == other
        assert (block.local, block.shape) == (f"0/{meta.name}", meta.shape)
        assert block.strides == row_major(meta.shape)
