"""Megatron families, as tables. To add one, add rows; how rows are read is in `rules`.

Sources: megatron-core's modules and the checkpoints of each family; docs/explanation/layouts.md says
which rows have been checked against real shards, and which have only been read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import entry_points
from types import MappingProxyType

from syncline.layouts.model import Family
from syncline.layouts.rules import Rule

EMBEDDING = Rule(
    "vocab", "embedding.word_embeddings.weight", ("model.embed_tokens.weight: vocab hidden",)
)
FINAL_NORM = Rule("replicated", "decoder.final_layernorm.weight", ("model.norm.weight: hidden",))
OUTPUT = Rule("vocab", "output_layer.weight", ("lm_head.weight: vocab hidden",))
# The copy of a tied embedding that a last stage of its own holds.
TIED_OUTPUT = replace(OUTPUT, pieces=EMBEDDING.pieces)


def _norm(local: str, canonical: str, on: str = "", side: str = "hidden") -> Rule:
    return Rule("replicated", local, (f"{canonical}: {side}",), on)


_INPUT_NORM = _norm(
    "self_attention.linear_qkv.layer_norm_weight|input_layernorm.weight", "input_layernorm.weight"
)
_QKV = (
    Rule(
        "qkv",
        "self_attention.linear_qkv.weight",
        (
            "self_attn.q_proj.weight: q hidden",
            "self_attn.k_proj.weight: kv hidden",
            "self_attn.v_proj.weight: kv hidden",
        ),
    ),
    Rule(
        "qkv",
        "self_attention.linear_qkv.bias",
        ("self_attn.q_proj.bias: q", "self_attn.k_proj.bias: kv", "self_attn.v_proj.bias: kv"),
        "attention_bias",
    ),
)
_ATTENTION_OUT = (
    Rule("row", "self_attention.linear_proj.weight", ("self_attn.o_proj.weight: hidden q",)),
    Rule(
        "replicated",
        "self_attention.linear_proj.bias",
        ("self_attn.o_proj.bias: hidden",),
        "attention_bias out_bias",
    ),
)
_QK_NORM = (
    _norm("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", "qk_norm", "head"),
    _norm("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", "qk_norm", "head"),
)
_ATTENTION = (_INPUT_NORM, *_QKV, *_ATTENTION_OUT, *_QK_NORM)

_MLP_NORM = _norm(
    "mlp.linear_fc1.layer_norm_weight|pre_mlp_layernorm.weight",
    "post_attention_layernorm.weight",
    "dense",
)
_DENSE = (
    _MLP_NORM,
    Rule(
        "column",
        "mlp.linear_fc1.weight",
        ("mlp.gate_proj.weight: inter hidden", "mlp.up_proj.weight: inter hidden"),
        "dense",
    ),
    Rule("row", "mlp.linear_fc2.weight", ("mlp.down_proj.weight: hidden inter",), "dense"),
    Rule(
        "column",
        "mlp.linear_fc1.bias",
        ("mlp.gate_proj.bias: inter", "mlp.up_proj.bias: inter"),
        "dense mlp_bias",
    ),
    Rule("replicated", "mlp.linear_fc2.bias", ("mlp.down_proj.bias: hidden",), "dense mlp_bias"),
)

_FC1 = "mlp.experts.linear_fc1.weight{e}|mlp.experts.local_experts.{e}.linear_fc1.weight"
_FC2 = "mlp.experts.linear_fc2.weight{e}|mlp.experts.local_experts.{e}.linear_fc2.weight"
_EXPERT_NORM = _norm("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", "moe")


def _experts(prefix: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """Router and experts, for checkpoints with one tensor for each expert and matrix."""
    each = f"{prefix}.experts.{{e}}."
    return (
        _EXPERT_NORM,
        Rule("replicated", "mlp.router.weight", (f"{prefix}.gate.weight: experts hidden",), "moe"),
        Rule(
            "column",
            _FC1,
            (f"{each}{gate}.weight: expert hidden", f"{each}{up}.weight: expert hidden"),
            "moe",
        ),
        Rule("row", _FC2, (f"{each}{down}.weight: hidden expert",), "moe"),
    )


# Checkpoints of some families stack the experts of a layer, outputs before inputs.
_STACKED = (
    "mlp.experts.gate_up_proj: e expert+expert#0 hidden",
    "mlp.experts.gate_up_proj: e expert+expert#1 hidden",
    "mlp.experts.down_proj: e hidden expert",
)
_EXPERTS = _experts("mlp", "gate_proj", "up_proj", "down_proj")


def _expert_bias(canonical: str) -> Rule:
    return Rule("replicated", "mlp.router.expert_bias", (f"{canonical}: experts",), "moe", "F32")


_SIGMOID_ROUTER = _expert_bias("mlp.gate.e_score_correction_bias")


def _shared_expert(name: str) -> tuple[Rule, ...]:
    """The expert that every token visits: cut as a dense MLP, not as an expert."""
    return (
        Rule(
            "column",
            "mlp.shared_experts.linear_fc1.weight",
            (
                f"mlp.{name}.gate_proj.weight: shared hidden",
                f"mlp.{name}.up_proj.weight: shared hidden",
            ),
            "moe shared",
        ),
        Rule(
            "row",
            "mlp.shared_experts.linear_fc2.weight",
            (f"mlp.{name}.down_proj.weight: hidden shared",),
            "moe shared",
        ),
    )


_MLA = (
    _norm("input_layernorm.weight", "input_layernorm.weight"),
    Rule(
        "column",
        "self_attention.linear_q_proj.weight",
        ("self_attn.q_proj.weight: heads*nope+heads*rope hidden",),
        "!q_lora",
    ),
    Rule(
        "replicated",
        "self_attention.linear_q_down_proj.weight",
        ("self_attn.q_a_proj.weight: q_lora hidden",),
        "q_lora",
    ),
    _norm(
        "self_attention.linear_q_up_proj.layer_norm_weight|self_attention.q_layernorm.weight",
        "self_attn.q_a_layernorm.weight",
        "q_lora",
        "q_lora",
    ),
    Rule(
        "column",
        "self_attention.linear_q_up_proj.weight",
        ("self_attn.q_b_proj.weight: heads*nope+heads*rope q_lora",),
        "q_lora",
    ),
    Rule(
        "replicated",
        "self_attention.linear_kv_down_proj.weight",
        ("self_attn.kv_a_proj_with_mqa.weight: kv_lora+rope hidden",),
    ),
    _norm(
        "self_attention.linear_kv_up_proj.layer_norm_weight|self_attention.kv_layernorm.weight",
        "self_attn.kv_a_layernorm.weight",
        side="kv_lora",
    ),
    Rule(
        "column",
        "self_attention.linear_kv_up_proj.weight",
        ("self_attn.kv_b_proj.weight: heads*nope+heads*v_head kv_lora",),
    ),
    Rule(
        "row",
        "self_attention.linear_proj.weight",
        ("self_attn.o_proj.weight: hidden heads*v_head",),
    ),
)

_MTP = (
    _norm("enorm.weight", "enorm.weight"),
    _norm("hnorm.weight", "hnorm.weight"),
    Rule("column", "eh_proj.weight", ("eh_proj.weight: hidden 2*hidden",)),
    _norm("final_layernorm.weight", "shared_head.norm.weight"),
)
_MTP_COPIES = ("embed_tokens.weight: vocab hidden", "shared_head.head.weight: vocab hidden")

LLAMA = Family((*_ATTENTION, *_DENSE), tags=frozenset({"out_bias"}))
QWEN2 = Family((*_ATTENTION, *_DENSE), tags=frozenset({"attention_bias"}))
QWEN3 = Family((*_ATTENTION, *_DENSE), tags=frozenset({"out_bias", "qk_norm"}))
QWEN3_MOE = Family((*_ATTENTION, *_DENSE, *_EXPERTS), tags=QWEN3.tags)
DEEPSEEK_V3 = Family(
    (*_MLA, *_DENSE, *_EXPERTS, _SIGMOID_ROUTER, *_shared_expert("shared_experts")),
    mtp=_MTP,
    mtp_copies=_MTP_COPIES,
)
GLM4_MOE = Family(
    (
        *(replace(rule, on="use_qk_norm") if rule in _QK_NORM else rule for rule in _ATTENTION),
        *_DENSE,
        *_EXPERTS,
        _SIGMOID_ROUTER,
        *_shared_expert("shared_experts"),
    ),
    mtp=_MTP,
    mtp_copies=_MTP_COPIES,
)
GLM4 = Family(
    (
        *_ATTENTION,
        _norm(
            "post_self_attn_layernorm.weight|self_attention.linear_proj.post_layernorm.weight",
            "post_self_attn_layernorm.weight",
        ),
        _MLP_NORM,
        Rule(
            "column",
            "mlp.linear_fc1.weight",
            (
                "mlp.gate_up_proj.weight: inter+inter#0 hidden",
                "mlp.gate_up_proj.weight: inter+inter#1 hidden",
            ),
        ),
        Rule("row", "mlp.linear_fc2.weight", ("mlp.down_proj.weight: hidden inter",)),
        _norm(
            "post_mlp_layernorm.weight|mlp.linear_fc2.post_layernorm.weight",
            "post_mlp_layernorm.weight",
        ),
    )
)
GPT_OSS = Family(
    (
        *_ATTENTION,
        Rule("column", "self_attention.core_attention.softmax_offset", ("self_attn.sinks: heads",)),
        _EXPERT_NORM,
        Rule("replicated", "mlp.router.weight", ("mlp.router.weight: experts hidden",)),
        Rule("replicated", "mlp.router.bias", ("mlp.router.bias: experts",)),
        Rule(
            "column",
            _FC1,
            (
                "mlp.experts.gate_up_proj: T e hidden expert.1+1#0",
                "mlp.experts.gate_up_proj: T e hidden expert.1+1#1",
            ),
        ),
        Rule(
            "column",
            _FC1.replace("weight", "bias"),
            (
                "mlp.experts.gate_up_proj_bias: e expert.1+1#0",
                "mlp.experts.gate_up_proj_bias: e expert.1+1#1",
            ),
        ),
        Rule("row", _FC2, ("mlp.experts.down_proj: T e expert hidden",)),
        Rule(
            "replicated", _FC2.replace("weight", "bias"), ("mlp.experts.down_proj_bias: e hidden",)
        ),
    ),
    tags=frozenset({"out_bias"}),
    defaults=MappingProxyType({"attention_bias": True}),
)
GEMMA3 = Family(
    (
        *_ATTENTION,
        _norm(
            "self_attention.linear_proj.post_layernorm.weight", "post_attention_layernorm.weight"
        ),
        *(
            replace(rule, pieces=("pre_feedforward_layernorm.weight: hidden",))
            if rule is _MLP_NORM
            else rule
            for rule in _DENSE
        ),
        _norm("mlp.linear_fc2.post_layernorm.weight", "post_feedforward_layernorm.weight"),
    ),
    tags=frozenset({"out_bias", "qk_norm"}),
    defaults=MappingProxyType({"tie_word_embeddings": True}),
)

_GATED_QKV = (
    replace(_INPUT_NORM, on="full"),
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
    replace(_ATTENTION_OUT[0], on="full"),
    *(replace(rule, on="full") for rule in _QK_NORM),
)
_CONV = "linear_attn.conv1d.weight: key_heads*key+key_heads*key+value_heads*value#{} 1 kernel"
_GATED_DELTA = (
    _norm(
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
    _norm("enorm.weight", "mtp.pre_fc_norm_embedding.weight"),
    _norm("hnorm.weight", "mtp.pre_fc_norm_hidden.weight"),
    Rule("column", "eh_proj.weight", ("mtp.fc.weight: hidden 2*hidden",)),
    _norm("final_layernorm.weight", "mtp.norm.weight"),
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
        *_DENSE,
        *_EXPERTS,
        *_shared_expert("shared_expert"),
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
        *_DENSE,
        *_EXPERTS[:2],
        *(
            replace(rule, pieces=tuple(" | ".join(pair) for pair in pairs))
            for rule, pairs in (
                (_EXPERTS[2], zip(_EXPERTS[2].pieces, _STACKED[:2], strict=True)),
                (_EXPERTS[3], zip(_EXPERTS[3].pieces, _STACKED[2:], strict=True)),
            )
        ),
        *_shared_expert("shared_expert"),
        _SHARED_GATE,
    ),
)
MIXTRAL = Family((*_ATTENTION, *_experts("block_sparse_moe", "w1", "w3", "w2")))
MINIMAX_M2 = Family(
    (
        _INPUT_NORM,
        *_QKV,
        *_ATTENTION_OUT,
        _norm("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", side="q"),
        _norm("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", side="kv"),
        *_experts("block_sparse_moe", "w1", "w3", "w2"),
        _expert_bias("block_sparse_moe.e_score_correction_bias"),
    )
)
QWEN3_VL_MOE = Family(
    (
        *_ATTENTION,
        *_DENSE,
        *_EXPERTS[:2],
        Rule(
            "column",
            _FC1,
            (
                f"mlp.experts.gate_up_proj: T e hidden expert+expert#0 | {_STACKED[0]}",
                f"mlp.experts.gate_up_proj: T e hidden expert+expert#1 | {_STACKED[1]}",
            ),
            "moe",
        ),
        Rule("row", _FC2, (f"mlp.experts.down_proj: T e expert hidden | {_STACKED[2]}",), "moe"),
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
        "gpt_oss": GPT_OSS,
        "gemma3_text": GEMMA3,
        "mixtral": MIXTRAL,
        "minimax_m2": MINIMAX_M2,
    }
)
"""The families of this package by `model_type`."""

WRAPPERS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "qwen3_vl": ("model.language_model.", "language_model."),
        "qwen3_vl_moe": ("model.language_model.", "language_model."),
        "qwen3_5": ("model.language_model.", "language_model."),
        "qwen3_5_moe": ("model.language_model.", "language_model."),
        "gemma3": ("model.language_model.", "language_model."),
        "glm4v_moe": ("model.language_model.", "language_model."),
    }
)
"""Models around a text model, by `model_type`: canonical prefix and local prefix of the text part."""


def families() -> dict[str, Family]:
    """Return all families by `model_type`: those of this package, then those of entry points.

    An entry point of the group `syncline.families` is named for its `model_type` and gives a `Family`.
    """
    found = dict(BUILT_IN)
    for point in entry_points(group="syncline.families"):
        found[point.name] = point.load()
    return found
