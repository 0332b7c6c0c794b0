"""Make a tiny checkpoint of a family with transformers: `tiny_checkpoints.py FOLDER FAMILY...`

Values follow from the names of tensors, so that any two differ; sides differ too, where a family lets them.
Which transformers writes it matters: the environment of mbridge has 4.57.6, that of megatron-bridge 5.12.1.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import transformers
from safetensors.torch import load_file, save_file

TRANSFORMERS_4 = transformers.__version__.startswith("4.")


def _rope(theta: float = 10000.0, **more: Any) -> dict[str, Any]:
    """Return how positions are turned, as this release of transformers wants it said."""
    if TRANSFORMERS_4:
        return {"rope_theta": theta, **more}
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
EXPERTS = {
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
ROUTED = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
}
LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 16,
}
DELTA = {
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}
DEEPSEEK = {
    **SIZES,
    **ROUTED,
    **LATENT,
    "num_key_value_heads": 8,
    "routed_scaling_factor": 2.5,
    **({"rope_scaling": None} if TRANSFORMERS_4 else {}),
}
INTERLEAVED = {
    "partial_rotary_factor": 0.25,
    "mrope_interleaved": True,
    "mrope_section": [1, 1, 0],
}
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "out_hidden_size": 64,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 16,
}
DEEPSTACK = {"deepstack_visual_indexes": [0, 1]}
MOE_STEPS = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**SIZES, **_rope(), "attention_bias": False}),
    "qwen2_tied": ("Qwen2Config", {**SIZES, **_rope(), "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {**SIZES, **_rope(), "head_dim": 16}),
    "qwen3v": (
        "Qwen3Config",
        {**SIZES, **_rope(), "vocab_size": 250, "tie_word_embeddings": True, "head_dim": 16},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**SIZES, **EXPERTS, **MOE_STEPS, **_rope(), "head_dim": 16},
    ),
    "mixtral": (
        "MixtralConfig",
        {**SIZES, **_rope(), "head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "deepseek_v3": ("DeepseekV3Config", {**DEEPSEEK, **_rope()}),
    "deepseek_v3_mtp": ("DeepseekV3Config", {**DEEPSEEK, **_rope(), "num_nextn_predict_layers": 1}),
    "kimi_k2": (
        "DeepseekV3Config",
        {**DEEPSEEK, **_rope(), "n_routed_experts": 12, "num_nextn_predict_layers": 0},
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            **SIZES,
            **ROUTED,
            "head_dim": 16,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
            **_rope(partial_rotary_factor=0.5),
            "num_nextn_predict_layers": 1,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            **SIZES,
            "rms_norm_eps": 1e-5,
            "intermediate_size": 64,
            "head_dim": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "vocab_size": 256,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 128,
            "sliding_window": 8,
            "query_pre_attn_scalar": 16,
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            **SIZES,
            **EXPERTS,
            **DELTA,
            "head_dim": 16,
            "shared_expert_intermediate_size": 32,
            **_rope(partial_rotary_factor=0.25),
        },
    ),
    "qwen3_5": (
        "Qwen3_5TextConfig",
        {**SIZES, **DELTA, "head_dim": 16, **_rope(**INTERLEAVED)},
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        {
            **SIZES,
            **EXPERTS,
            **DELTA,
            "head_dim": 16,
            "shared_expert_intermediate_size": 40,
            **_rope(**INTERLEAVED),
        },
    ),
    "minimax_m2": (
        "MiniMaxM2Config",
        {
            **SIZES,
            "head_dim": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            **_rope(partial_rotary_factor=0.5),
        },
    ),
    "qwen3_vl": (
        "Qwen3VLConfig",
        {
            "text_config": {**SIZES, "head_dim": 16, **_rope(mrope_section=[4, 2, 2])},
            "vision_config": {**VISION, **DEEPSTACK},
            "tie_word_embeddings": False,
        },
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoeConfig",
        {
            "text_config": {
                **SIZES,
                **EXPERTS,
                "moe_intermediate_size": 40,
                **MOE_STEPS,
                "head_dim": 16,
                **_rope(mrope_section=[4, 2, 2]),
            },
            "vision_config": {**VISION, **DEEPSTACK},
            "tie_word_embeddings": False,
        },
    ),
}
"""Names of cases: the class of transformers that holds the config, and what it is given."""

# A draft layer is not part of what transformers saves; these get one, as the released checkpoints have it.
WITH_DRAFT = ("deepseek_v3_mtp", "glm4_moe")
# Saved by transformers under one name, published by its makers under another.
RENAMED = {
    "kimi_k2": {
        "model_type": "kimi_k2",
        "architectures": ["KimiK2ForCausalLM"],
        "scoring_func": "sigmoid",
    }
}
# Here the config is saved by itself, and so does not name a class.
BARE = ("qwen3v",)


def fill(name: str, tensor: torch.Tensor) -> None:
    """Give a tensor the values that belong to its name."""
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    values = torch.randn(tensor.shape, generator=generator)
    if tensor.dim() == 1 and "norm" in name:
        tensor.copy_(1 + 0.2 * values)
    else:
        tensor.copy_((0.05 if "e_score" in name else 0.08) * values)


def make(folder: Path, name: str) -> None:
    """Write `config.json` and `model.safetensors`."""
    kind, given = FAMILIES[name]
    config = getattr(transformers, kind)(**given)
    is_text = not hasattr(config, "text_config")
    of = transformers.AutoModelForCausalLM if is_text else transformers.AutoModelForImageTextToText
    model = of.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for tensor_name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if isinstance(tensor, torch.nn.Parameter) or "e_score" in tensor_name:
                fill(tensor_name, tensor)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    if name in BARE:
        getattr(transformers, kind)(**given).save_pretrained(folder)
    if name in WITH_DRAFT:
        _append_draft(folder / "model.safetensors", given["num_hidden_layers"])
    if name in RENAMED:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **RENAMED[name]}, indent=2))


def _append_draft(path: Path, layers: int) -> None:
    """Add one layer of multi-token prediction after the last, with copies of embedding and output."""
    tensors = load_file(path)
    last, draft = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    hidden = tensors["model.norm.weight"].numel()
    added = {
        name.replace(last, draft): torch.empty_like(tensor)
        for name, tensor in tensors.items()
        if name.startswith(last)
    }
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        added[f"{draft}{norm}.weight"] = torch.empty(hidden)
    added[f"{draft}eh_proj.weight"] = torch.empty(hidden, 2 * hidden)
    for name, tensor in added.items():
        fill(name, tensor)
    added[f"{draft}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    added[f"{draft}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file({**tensors, **added}, path, metadata={"format": "pt"})


if __name__ == "__main__":
    for family in sys.argv[2:]:
        make(Path(sys.argv[1]) / family / "huggingface", family)
