"""Megatron families, as tables. To add one, add rows; how rows are read is in `rules`.

Sources: megatron-core's modules and the checkpoints of each family; docs/explanation/layouts.md says
which rows have been checked against real shards, and which have only been read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import entry_points
from types import MappingProxyType

from syncline.layouts.model import Family, Wrapper
from syncline.layouts.parts import (
    ATTENTION,
    ATTENTION_OUT,
    DENSE,
    EXPERT_NORM,
    EXPERTS,
    FC1,
    FC2,
    INPUT_NORM,
    MLA,
    MLP_NORM,
    MTP,
    MTP_COPIES,
    QK_NORM,
    QKV,
    SIGMOID_ROUTER,
    STACKED,
    expert_bias,
    experts,
    norm,
    shared_expert,
)
from syncline.layouts.rules import Rule

LLAMA = Family((*ATTENTION, *DENSE), tags=frozenset({"out_bias"}))
QWEN2 = Family((*ATTENTION, *DENSE), tags=frozenset({"attention_bias"}))
QWEN3 = Family((*ATTENTION, *DENSE), tags=frozenset({"out_bias", "qk_norm"}))
QWEN3_MOE = Family((*ATTENTION, *DENSE, *EXPERTS), tags=QWEN3.tags)
DEEPSEEK_V3 = Family(
    (*MLA, *DENSE, *EXPERTS, SIGMOID_ROUTER, *shared_expert("shared_experts")),
    mtp=MTP,
    mtp_copies=MTP_COPIES,
)
GLM4_MOE = Family(
    (
        *(replace(rule, on="use_qk_norm") if rule in QK_NORM else rule for rule in ATTENTION),
        *DENSE,
        *EXPERTS,
        SIGMOID_ROUTER,
        *shared_expert("shared_experts"),
    ),
    mtp=MTP,
    mtp_copies=MTP_COPIES,
)
GLM4 = Family(
    (
        *ATTENTION,
        norm(
            "post_self_attn_layernorm.weight|self_attention.linear_proj.post_layernorm.weight",
            "post_self_attn_layernorm.weight",
        ),
        MLP_NORM,
        Rule(
            "column",
            "mlp.linear_fc1.weight",
            (
                "mlp.gate_up_proj.weight: inter+inter#0 hidden",
                "mlp.gate_up_proj.weight: inter+inter#1 hidden",
            ),
        ),
        Rule("row", "mlp.linear_fc2.weight", ("mlp.down_proj.weight: hidden inter",)),
        norm(
            "post_mlp_layernorm.weight|mlp.linear_fc2.post_layernorm.weight",
            "post_mlp_layernorm.weight",
        ),
    )
)
GPT_OSS = Family(
    (
        *ATTENTION,
        Rule("column", "self_attention.core_attention.softmax_offset", ("self_attn.sinks: heads",)),
        EXPERT_NORM,
        Rule("replicated", "mlp.router.weight", ("mlp.router.weight: experts hidden",)),
        Rule("replicated", "mlp.router.bias", ("mlp.router.bias: experts",)),
        Rule(
            "column",
            FC1,
            (
                "mlp.experts.gate_up_proj: T e hidden expert.1+1#0",
                "mlp.experts.gate_up_proj: T e hidden expert.1+1#1",
            ),
        ),
        Rule(
            "column",
            FC1.replace("weight", "bias"),
            (
                "mlp.experts.gate_up_proj_bias: e expert.1+1#0",
                "mlp.experts.gate_up_proj_bias: e expert.1+1#1",
            ),
        ),
        Rule("row", FC2, ("mlp.experts.down_proj: T e expert hidden",)),
        Rule(
            "replicated", FC2.replace("weight", "bias"), ("mlp.experts.down_proj_bias: e hidden",)
        ),
    ),
    engine_names=(("self_attn.", "attn."), ("embed_tokens.", "embedding.")),
    tags=frozenset({"out_bias"}),
    defaults=MappingProxyType({"attention_bias": True}),
)
GEMMA3 = Family(
    (
        *ATTENTION,
        norm("self_attention.linear_proj.post_layernorm.weight", "post_attention_layernorm.weight"),
        *(
            replace(rule, pieces=("pre_feedforward_layernorm.weight: hidden",))
            if rule is MLP_NORM
            else rule
            for rule in DENSE
        ),
        norm("mlp.linear_fc2.post_layernorm.weight", "post_feedforward_layernorm.weight"),
    ),
    tags=frozenset({"out_bias", "qk_norm"}),
    defaults=MappingProxyType({"tie_word_embeddings": True}),
)

_GATED_QKV = (
    replace(INPUT_NORM, on="full"),
    Rule(
        "qkv",
        "self_attention.linear_qkv.weight",
        (
            "self_attn.q_proj.weight: heads.head+head#0 hidden",
            "self_attn.q_proj.weight: heads.head+head#1 hidden",
            "self_attn.k_proj.weight: kv hidden",
            "self_attn.v_proj.weight: kv hidden",
        ),
        "full",
    ),
    replace(ATTENTION_OUT[0], on="full"),
    *(replace(rule, on="full") for rule in QK_NORM),
)
_CONV = "linear_attn.conv1d.weight: key_heads*key+key_heads*key+value_heads*value#{} 1 kernel"
_GATED_DELTA = (
    norm(
        "self_attention.in_proj.layer_norm_weight|input_layernorm.weight",
        "input_layernorm.weight",
        "linear",
    ),
    Rule(
        "column",
        "self_attention.conv1d.weight",
        tuple(_CONV.format(index) for index in range(3)),
        "linear",
    ),
    Rule("column", "self_attention.A_log", ("linear_attn.A_log: value_heads",), "linear"),
    Rule("column", "self_attention.dt_bias", ("linear_attn.dt_bias: value_heads",), "linear"),
    Rule(
        "replicated",
        "self_attention.out_norm.weight",
        ("linear_attn.norm.weight: value",),
        "linear",
        add=1,
    ),
    Rule(
        "row",
        "self_attention.out_proj.weight",
        ("linear_attn.out_proj.weight: hidden value_heads*value",),
        "linear",
    ),
)
_QKVZ = (
    "linear_attn.in_proj_qkvz.weight: "
    "key_heads.key+key+value_ratio*value+value_ratio*value#{} hidden"
)
_BA = "linear_attn.in_proj_ba.weight: key_heads.value_ratio+value_ratio#{} hidden"
_SHARED_GATE = Rule(
    "replicated",
    "mlp.shared_experts.gate_weight",
    ("mlp.shared_expert_gate.weight: 1 hidden",),
    "moe shared",
)
_NEXT_MTP = (
    norm("enorm.weight", "mtp.pre_fc_norm_embedding.weight"),
    norm("hnorm.weight", "mtp.pre_fc_norm_hidden.weight"),
    Rule("column", "eh_proj.weight", ("mtp.fc.weight: hidden 2*hidden",)),
    norm("final_layernorm.weight", "mtp.norm.weight"),
)
QWEN3_NEXT = Family(
    (
        *_GATED_QKV,
        *_GATED_DELTA,
        Rule(
            "column",
            "self_attention.in_proj.weight",
            (*(_QKVZ.format(index) for index in range(4)), _BA.format(0), _BA.format(1)),
            "linear",
        ),
        *DENSE,
        *EXPERTS,
        *shared_expert("shared_expert"),
        _SHARED_GATE,
    ),
    mtp=_NEXT_MTP,
    mtp_prefix="",
    mtp_inner="mtp.layers.{k}.",
    tags=frozenset({"qk_norm"}),
)
_QKV_FLAT = (
    "linear_attn.in_proj_qkv.weight: key_heads*key+key_heads*key+value_heads*value#{} hidden"
)
QWEN3_5 = replace(
    QWEN3_NEXT,
    layer=(
        *_GATED_QKV,
        *_GATED_DELTA,
        Rule(
            "column",
            "self_attention.in_proj.weight",
            (
                *(_QKV_FLAT.format(index) for index in range(3)),
                "linear_attn.in_proj_z.weight: value_heads*value hidden",
                "linear_attn.in_proj_b.weight: value_heads hidden",
                "linear_attn.in_proj_a.weight: value_heads hidden",
            ),
            "linear",
        ),
        *DENSE,
        *EXPERTS[:2],
        *(
            replace(rule, pieces=tuple(" | ".join(pair) for pair in pairs))
            for rule, pairs in (
                (EXPERTS[2], zip(EXPERTS[2].pieces, STACKED[:2], strict=True)),
                (EXPERTS[3], zip(EXPERTS[3].pieces, STACKED[2:], strict=True)),
            )
        ),
        *shared_expert("shared_expert"),
        _SHARED_GATE,
    ),
)
MIXTRAL = Family((*ATTENTION, *experts("block_sparse_moe", "w1", "w3", "w2")))
MINIMAX_M2 = Family(
    (
        INPUT_NORM,
        *QKV,
        *ATTENTION_OUT,
        # One norm over all heads, cut with them.
        Rule("column", "self_attention.q_layernorm.weight", ("self_attn.q_norm.weight: q",)),
        Rule("groups", "self_attention.k_layernorm.weight", ("self_attn.k_norm.weight: kv",)),
        *experts("block_sparse_moe", "w1", "w3", "w2"),
        expert_bias("block_sparse_moe.e_score_correction_bias"),
    )
)
QWEN3_VL_MOE = Family(
    (
        *ATTENTION,
        *DENSE,
        *EXPERTS[:2],
        Rule(
            "column",
            FC1,
            (
                f"mlp.experts.gate_up_proj: T e hidden expert+expert#0 | {STACKED[0]}",
                f"mlp.experts.gate_up_proj: T e hidden expert+expert#1 | {STACKED[1]}",
            ),
            "moe",
        ),
        Rule("row", FC2, (f"mlp.experts.down_proj: T e expert hidden | {STACKED[2]}",), "moe"),
    ),
    tags=QWEN3.tags,
)

BUILT_IN: Mapping[str, Family] = MappingProxyType(
    {
        "llama": LLAMA,
        "qwen2": QWEN2,
        "qwen3": QWEN3,
        "qwen3_moe": QWEN3_MOE,
        "qwen3_next": QWEN3_NEXT,
        "qwen3_5_text": QWEN3_5,
        "qwen3_5_moe_text": QWEN3_5,
        "qwen3_vl_text": QWEN3,
        "qwen3_vl_moe_text": QWEN3_VL_MOE,
        "deepseek_v3": DEEPSEEK_V3,
        "kimi_k2": DEEPSEEK_V3,
        "glm4": GLM4,
        "glm4_moe": GLM4_MOE,
        "glm4v_moe_text": GLM4_MOE,
        "gpt_oss": GPT_OSS,
        "gemma3_text": GEMMA3,
        "mixtral": MIXTRAL,
        "minimax_m2": MINIMAX_M2,
    }
)
"""The families of this package by `model_type`."""

_VISUAL = Wrapper("model.language_model.", "language_model.", (("model.visual.", "vision_model."),))
# A whole causal model, its output included, beside what sees.
_BESIDE_A_TOWER = Wrapper(
    "language_model.model.",
    "language_model.",
    (("vision_tower.", "vision_tower."), ("multi_modal_projector.", "multi_modal_projector.")),
    head_root="language_model.",
)
WRAPPERS: Mapping[str, Wrapper] = MappingProxyType(
    {
        "qwen3_vl": _VISUAL,
        "qwen3_vl_moe": _VISUAL,
        "qwen3_5": _VISUAL,
        "qwen3_5_moe": _VISUAL,
        "glm4v_moe": _VISUAL,
        "gemma3": _BESIDE_A_TOWER,
        "kimi_vl": _BESIDE_A_TOWER,
        "kimi_k25": replace(
            _BESIDE_A_TOWER,
            towers=(("vision_tower.", "vision_tower."), ("mm_projector.", "mm_projector.")),
        ),
    }
)
"""Models around a text model, by `model_type`."""


def families() -> dict[str, Family]:
    """Return all families by `model_type`: those of this package, then those of entry points.

    An entry point of the group `syncline.families` is named for its `model_type` and gives a `Family`.
    """
    found = dict(BUILT_IN)
    for point in entry_points(group="syncline.families"):
        found[point.name] = point.load()
    return found
