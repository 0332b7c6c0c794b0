"""Rules that several families share: embedding and output, attention, MLPs, experts, latent attention.

Local names are megatron-core's, canonical names those of the checkpoint.
"""

from __future__ import annotations

from dataclasses import replace

from syncline.layouts.rules import Rule

EMBEDDING = Rule(
    "vocab", "embedding.word_embeddings.weight", ("model.embed_tokens.weight: vocab hidden",)
)
FINAL_NORM = Rule("replicated", "decoder.final_layernorm.weight", ("model.norm.weight: hidden",))
OUTPUT = Rule("vocab", "output_layer.weight", ("lm_head.weight: vocab hidden",))
# The copy of a tied embedding that a last stage of its own holds.
TIED_OUTPUT = replace(OUTPUT, pieces=EMBEDDING.pieces)


def norm(local: str, canonical: str, on: str = "", side: str = "hidden") -> Rule:
    """Return a rule for a norm, which no rank cuts."""
    return Rule("replicated", local, (f"{canonical}: {side}",), on)


INPUT_NORM = norm(
    "self_attention.linear_qkv.layer_norm_weight|input_layernorm.weight", "input_layernorm.weight"
)
QKV = (
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
ATTENTION_OUT = (
    Rule("row", "self_attention.linear_proj.weight", ("self_attn.o_proj.weight: hidden q",)),
    Rule(
        "replicated",
        "self_attention.linear_proj.bias",
        ("self_attn.o_proj.bias: hidden",),
        "attention_bias out_bias",
    ),
)
QK_NORM = (
    norm("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", "qk_norm", "head"),
    norm("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", "qk_norm", "head"),
)
ATTENTION = (INPUT_NORM, *QKV, *ATTENTION_OUT, *QK_NORM)

MLP_NORM = norm(
    "mlp.linear_fc1.layer_norm_weight|pre_mlp_layernorm.weight",
    "post_attention_layernorm.weight",
    "dense",
)
DENSE = (
    MLP_NORM,
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

# Grouped, sequential, and (newest Transformer Engine) stacked experts.
_EXPERT_NAMES = (
    "mlp.experts.linear_{fc}.weight{{e}}"
    "|mlp.experts.local_experts.{{e}}.linear_{fc}.weight"
    "|mlp.experts.linear_{fc}.weight"
)
FC1, FC2 = _EXPERT_NAMES.format(fc="fc1"), _EXPERT_NAMES.format(fc="fc2")
EXPERT_NORM = norm("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", "moe")


def experts(prefix: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """Router and experts, for checkpoints with one tensor for each expert and matrix."""
    each = f"{prefix}.experts.{{e}}."
    return (
        EXPERT_NORM,
        Rule("replicated", "mlp.router.weight", (f"{prefix}.gate.weight: experts hidden",), "moe"),
        Rule(
            "column",
            FC1,
            (f"{each}{gate}.weight: expert hidden", f"{each}{up}.weight: expert hidden"),
            "moe",
        ),
        Rule("row", FC2, (f"{each}{down}.weight: hidden expert",), "moe"),
    )


# Checkpoints of some families stack the experts of a layer, outputs before inputs.
STACKED = (
    "mlp.experts.gate_up_proj: e expert+expert#0 hidden",
    "mlp.experts.gate_up_proj: e expert+expert#1 hidden",
    "mlp.experts.down_proj: e hidden expert",
)
EXPERTS = experts("mlp", "gate_proj", "up_proj", "down_proj")


def expert_bias(canonical: str) -> Rule:
    """Return a rule for what a router adds to its scores: a buffer, in F32 whatever the model is in."""
    return Rule("replicated", "mlp.router.expert_bias", (f"{canonical}: experts",), "moe", "F32")


SIGMOID_ROUTER = expert_bias("mlp.gate.e_score_correction_bias")


def shared_expert(name: str) -> tuple[Rule, ...]:
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


MLA = (
    norm("input_layernorm.weight", "input_layernorm.weight"),
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
    norm(
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
    norm(
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

MTP = (
    norm("enorm.weight", "enorm.weight"),
    norm("hnorm.weight", "hnorm.weight"),
    Rule("column", "eh_proj.weight", ("eh_proj.weight: hidden 2*hidden",)),
    norm("final_layernorm.weight", "shared_head.norm.weight"),
)
MTP_COPIES = ("embed_tokens.weight: vocab hidden", "shared_head.head.weight: vocab hidden")
