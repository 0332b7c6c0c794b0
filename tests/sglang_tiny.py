"""Tiny checkpoints with random weights, in the shapes of real families, that SGLang can serve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

_COMMON = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 256,
}

QWEN3: dict[str, Any] = {
    **_COMMON,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
}

QWEN3_MOE: dict[str, Any] = {
    **QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 64,  # on a CPU, SGLang pads a rank's share to 32, and loads what is padded whole
    "norm_topk_prob": True,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}

DEEPSEEK_V3: dict[str, Any] = {
    **_COMMON,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "kv_lora_rank": 32,
    "moe_intermediate_size": 32,
    "moe_layer_freq": 1,
    "n_group": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "rope_scaling": {
        "type": "yarn",
        "factor": 1.0,
        "original_max_position_embeddings": 2048,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 16,
}

MODELS = {"qwen3": QWEN3, "qwen3_moe": QWEN3_MOE, "deepseek_v3": DEEPSEEK_V3}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a checkpoint of this configuration."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        found[at + "input_layernorm.weight"] = (hidden,)
        found[at + "post_attention_layernorm.weight"] = (hidden,)
        attention = _mla(config) if "kv_lora_rank" in config else _attention(config)
        found |= {f"{at}self_attn.{name}": shape for name, shape in attention.items()}
        experts = config.get("num_experts", config.get("n_routed_experts", 0))
        if experts == 0 or layer < config.get("first_k_dense_replace", 0):
            found |= _mlp(f"{at}mlp.", hidden, config["intermediate_size"])
            continue
        found[at + "mlp.gate.weight"] = (experts, hidden)
        if config.get("topk_method") == "noaux_tc":
            found[at + "mlp.gate.e_score_correction_bias"] = (experts,)
        inner = config["moe_intermediate_size"]
        for expert in range(experts):
            found |= _mlp(f"{at}mlp.experts.{expert}.", hidden, inner)
        if config.get("n_shared_experts"):
            found |= _mlp(f"{at}mlp.shared_experts.", hidden, inner * config["n_shared_experts"])
    return found


def write(directory: Path, config: dict[str, Any], seed: int) -> Path:
    """Write a checkpoint with random weights, BF16 but for the experts' bias."""
    directory.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes(config).items():
        if name.endswith("norm.weight"):
            values = rng.uniform(0.8, 1.2, shape)
        else:
            values = rng.normal(0.0, 0.3, shape) if "bias" in name else rng.normal(0.0, 0.15, shape)
        single = values.astype(np.float32)
        is_single = name.endswith("e_score_correction_bias")  # as in the checkpoints of the family
        tensors[name] = single if is_single else single.astype(ml_dtypes.bfloat16)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    return directory


def _attention(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, side = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    return {
        "q_proj.weight": (heads * side, hidden),
        "k_proj.weight": (kv_heads * side, hidden),
        "v_proj.weight": (kv_heads * side, hidden),
        "o_proj.weight": (hidden, heads * side),
        "q_norm.weight": (side,),
        "k_norm.weight": (side,),
    }


def _mla(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    nope, rope, v_side = (
        config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    return {
        "q_a_proj.weight": (q_rank, hidden),
        "q_a_layernorm.weight": (q_rank,),
        "q_b_proj.weight": (heads * (nope + rope), q_rank),
        "kv_a_proj_with_mqa.weight": (kv_rank + rope, hidden),
        "kv_a_layernorm.weight": (kv_rank,),
        "kv_b_proj.weight": (heads * (nope + v_side), kv_rank),
        "o_proj.weight": (hidden, heads * v_side),
    }


def _mlp(at: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        at + "gate_proj.weight": (inner, hidden),
        at + "up_proj.weight": (inner, hidden),
        at + "down_proj.weight": (hidden, inner),
    }
