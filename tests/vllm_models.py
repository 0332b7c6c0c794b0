"""Tiny checkpoints for vLLM, made here: a Qwen3, a Llama with tied embeddings, and a Qwen3-MoE."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

KINDS = ("qwen3", "llama_tied", "qwen3_moe")
VOCAB = 250  # not a multiple of 64, so that engines pad it

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def write_checkpoint(
    kind: str, target: Path, *, dtype: str = "float32", seed: int = 0, **changes: Any
) -> None:
    """Write a checkpoint with random weights, and a tokenizer of one token a byte."""
    import torch
    import transformers

    options = {**_COMMON, **changes}
    config: Any
    if kind == "qwen3":
        config = transformers.Qwen3Config(tie_word_embeddings=False, **options)
    elif kind == "llama_tied":
        # One head of keys and values, so that two workers hold the same one.
        options = {**_COMMON, "num_key_value_heads": 1, **changes}
        config = transformers.LlamaConfig(tie_word_embeddings=True, **options)
    else:
        config = transformers.Qwen3MoeConfig(
            moe_intermediate_size=64,
            num_experts=4,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            tie_word_embeddings=False,
            **options,
        )
    config.initializer_range = 0.2
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                # Norms of nothing but ones would look right in any order.
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(target)
    write_tokenizer(target)


def write_tokenizer(target: Path) -> None:
    import tokenizers
    import transformers

    vocabulary = {"<pad>": 0, "<eos>": 1, **{chr(i + 33): i for i in range(2, VOCAB)}}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("[\\s\\S]"), "isolated")
    core.decoder = tokenizers.decoders.Fuse()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>"
    )
    fast.save_pretrained(target)


def read_config(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    return config
