"""transformers' own checkpoints: every name and shape that a family saves is in our tables, none more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shard_files import read_safetensors
from syncline.layouts import EngineMesh, Layout, MegatronMesh, check, engine_layout, megatron_layout
from syncline.types import TensorMeta

transformers = pytest.importorskip("transformers", reason="the oracle is transformers itself")

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "vocab_size": 80,
    "pad_token_id": 0,
}
MOE = {"num_experts": 4, "moe_intermediate_size": 20}
ROUTED = {"n_routed_experts": 4, "moe_intermediate_size": 20, "first_k_dense_replace": 1}
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 10,
    "num_key_value_heads": 8,
}
DELTA = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "layer_types": ["linear_attention", "full_attention"],
    "shared_expert_intermediate_size": 28,
}
FULL = {"layer_types": ["full_attention"] * 2}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 4,
    "out_hidden_size": 48,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("qwen2", {"head_dim": None}),
    ("qwen3", {}),
    ("qwen3", {"attention_bias": True}),
    ("qwen3_moe", MOE),
    ("qwen3_moe", {**MOE, "mlp_only_layers": [0]}),
    ("qwen3_moe", {**MOE, "decoder_sparse_step": 2}),
    ("deepseek_v3", {**ROUTED, **LATENT}),
    ("deepseek_v3", {**ROUTED, **LATENT, "q_lora_rank": None}),
    ("glm4", {"attention_bias": True}),
    ("glm4", {"attention_bias": False}),
    ("glm4_moe", {**ROUTED, "attention_bias": True, "use_qk_norm": True}),
    ("glm4_moe", {**ROUTED, "attention_bias": False, "use_qk_norm": False}),
    ("gpt_oss", {**FULL, "num_local_experts": 4}),
    ("gemma3_text", FULL),
    ("mixtral", {"num_local_experts": 4}),
    ("minimax_m2", {"num_local_experts": 4}),
    ("qwen3_next", {**MOE, **DELTA}),
    ("qwen3_next", {**MOE, **DELTA, "mlp_only_layers": [1]}),
    ("qwen3_5_text", DELTA),
    ("qwen3_5_moe_text", {**MOE, **DELTA}),
]


def _saved(model: Any, folder: Path) -> tuple[dict[str, Any], list[TensorMeta]]:
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    return config, [meta for meta, _ in read_safetensors(folder / "model.safetensors").values()]


def _assert_same(layout: Layout, metas: list[TensorMeta]) -> None:
    check(layout)
    ours = {name: tensor.meta.shape for name, tensor in layout.catalog.items()}
    assert ours == {meta.name: meta.shape for meta in metas}


@pytest.mark.parametrize(("kind", "sizes"), MODELS, ids=lambda value: str(value)[:60])
def test_tables_name_what_transformers_saves(
    kind: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    given = {key: value for key, value in {**SIZES, **sizes}.items() if key != "head_dim" or value}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.CONFIG_MAPPING[kind](**given)
    )
    config, metas = _saved(model, tmp_path)
    # transformers knows no MTP layers, whatever the config says.
    _assert_same(megatron_layout(config, MegatronMesh(1), mtp=0), metas)
    mesh = MegatronMesh(4, tp=2, pp=2)
    _assert_same(megatron_layout(config, mesh, checkpoint=metas, mtp=0), metas)
    _assert_same(engine_layout(config, EngineMesh(2)), metas)
    _assert_same(engine_layout(config, EngineMesh(4, ep=4), checkpoint=metas), metas)


VISION_GEMMA = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}


@pytest.mark.parametrize(
    ("kind", "model", "sizes", "vision", "locals_"),
    [
        ("qwen3_vl", "Qwen3VL", {}, VISION, "vision_model.patch_embed.proj.weight"),
        ("qwen3_vl_moe", "Qwen3VLMoe", MOE, VISION, "vision_model.merger.norm.bias"),
        ("qwen3_5", "Qwen3_5", DELTA, VISION, "vision_model.merger.norm.bias"),
        ("qwen3_5_moe", "Qwen3_5Moe", {**DELTA, **MOE}, VISION, "vision_model.merger.norm.bias"),
        ("glm4v_moe", "Glm4vMoe", ROUTED, VISION, "vision_model.downsample.bias"),
        ("gemma3", "Gemma3", FULL, VISION_GEMMA, "vision_tower.post_layernorm.bias"),
    ],
)
def test_a_model_around_a_text_model_keeps_its_prefixes(
    kind: str,
    model: str,
    sizes: dict[str, Any],
    vision: dict[str, Any],
    locals_: str,
    tmp_path: Path,
) -> None:
    given = {} if kind == "gemma3" else {"tie_word_embeddings": False}
    config = transformers.CONFIG_MAPPING[kind](
        text_config={**SIZES, **sizes}, vision_config=vision, **given
    )
    whole = getattr(transformers, f"{model}ForConditionalGeneration")(config)
    saved, metas = _saved(whole, tmp_path)
    layout = megatron_layout(saved, MegatronMesh(4, tp=2, pp=2), checkpoint=metas)
    _assert_same(layout, metas)
    held = {tensor.name for tensor in layout.placements[0].tensors}
    assert {"0/language_model.embedding.word_embeddings.weight", f"0/{locals_}"} <= held
