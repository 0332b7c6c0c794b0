"""Real models at full width: tensors and parameters counted elsewhere, from transformers' own models."""

from __future__ import annotations

from typing import Any

import pytest

from syncline.layouts import EngineMesh, MegatronMesh, engine_layout, megatron_layout
from syncline.plan import load_of, make_plan

QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
QWEN3_MOE = {
    **QWEN3,
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "moe_intermediate_size": 768,
}
GLM4_MOE = {
    "model_type": "glm4_moe",
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "num_hidden_layers": 92,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151552,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "moe_intermediate_size": 1536,
    "first_k_dense_replace": 3,
    "attention_bias": True,
    "use_qk_norm": True,
    "num_nextn_predict_layers": 1,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
}
KIMI_K2 = {
    **DEEPSEEK_V3,
    "model_type": "kimi_k2",
    "num_attention_heads": 64,
    "n_routed_experts": 384,
    "first_k_dense_replace": 1,
    "vocab_size": 163840,
    "num_nextn_predict_layers": 0,
}


@pytest.mark.parametrize(
    ("config", "mtp", "tensors", "parameters"),
    [
        (QWEN3, 0, 399, 8_190_735_360),
        (QWEN3_MOE, 0, 18_867, 30_532_122_624),
        (GLM4_MOE, 1, 44_691, 358_337_791_296),
        (GLM4_MOE, 0, 44_189, 352_797_829_024),
        (DEEPSEEK_V3, 1, 46_183, 684_489_845_504),
        (DEEPSEEK_V3, 0, 45_395, 671_026_419_200),
        (KIMI_K2, 0, 69_975, 1_026_408_232_448),
    ],
)
def test_as_many_tensors_and_parameters_as_the_model_has(
    config: dict[str, Any], mtp: int, tensors: int, parameters: int
) -> None:
    catalog = megatron_layout(config, MegatronMesh(1), mtp=mtp).catalog
    assert len(catalog) == tensors
    assert sum(tensor.meta.count for tensor in catalog.values()) == parameters


@pytest.mark.slow
@pytest.mark.parametrize("config", [DEEPSEEK_V3, KIMI_K2], ids=["deepseek_v3", "kimi_k2"])
def test_a_thousand_trainer_ranks_and_sixty_four_engines(config: dict[str, Any]) -> None:
    mesh = MegatronMesh(1024, tp=8, pp=16, ep=32, etp=1, first_layers=3, last_layers=2)
    source, target = megatron_layout(config, mesh), engine_layout(config, EngineMesh(16, ep=16))
    unused = source.catalog.keys() - target.catalog.keys()
    plan = make_plan(source, target, engines=64, limit_bytes=1 << 30, unused=unused)
    load = load_of(plan)
    assert load.staged_bytes <= 1 << 30
    wanted = [
        sum(b.count * target.catalog[b.name].meta.unit_bytes for b in placement.blocks)
        for placement in target.placements
    ]
    assert load.received_bytes.tolist() == wanted * 64
    # Every stage sends what it holds, its ranks as much as each other.
    stages = load.sent_bytes.reshape(16, 64)
    assert (stages.max(axis=1) <= 1.01 * stages.mean(axis=1)).all()
