"""Tiny checkpoints for vLLM, made here: a Qwen3, a Llama with tied embeddings, a Qwen3-MoE and a PaliGemma."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
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


def write_tokenizer(target: Path, special: Mapping[str, int] = MappingProxyType({})) -> Any:
    """Write a tokenizer of one token a character, with other words at some of the numbers; return it."""
    import tokenizers
    import transformers

    named = {"<pad>": 0, "<eos>": 1, **special}
    taken = set(named.values())
    letters = {chr(i + 33): i for i in range(VOCAB) if i not in taken}
    core = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({**named, **letters}, unk_token="<pad>")
    )
    core.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("[\\s\\S]"), "isolated")
    core.decoder = tokenizers.decoders.Fuse()
    words = [word for word in special if word.startswith("<")]
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        add_bos_token=False,
        additional_special_tokens=words,
        **({"bos_token": "<bos>"} if "<bos>" in special else {}),
    )
    fast.save_pretrained(target)
    return fast


def read_config(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    return config


IMAGE_SIZE, IMAGE_TOKEN, NEWLINE = 56, VOCAB - 1, 3


def write_vision_checkpoint(target: Path, *, seed: int = 0) -> None:
    """Write a tiny PaliGemma with random weights in FP32, and what prepares its images."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    vision = transformers.SiglipVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=IMAGE_SIZE,
        patch_size=14,
        vision_use_head=False,
    )
    config = transformers.PaliGemmaConfig(
        vision_config=vision,
        text_config=transformers.GemmaConfig(**{**_COMMON, "bos_token_id": 2}),
        image_token_index=IMAGE_TOKEN,
        projection_dim=64,
        hidden_size=64,
        vocab_size=VOCAB,
    )
    torch.manual_seed(seed)
    model = transformers.PaliGemmaForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    model.save_pretrained(target)
    file = target / "model.safetensors"
    # The names of published checkpoints; vLLM 0.32 knows no others.
    named = {
        name.replace("vision_tower.", "vision_tower.vision_model."): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(named, file, metadata={"format": "pt"})
    tokenizer = write_tokenizer(target, {"<bos>": 2, "\n": NEWLINE, "<image>": IMAGE_TOKEN})
    images = transformers.SiglipImageProcessor(size={"height": IMAGE_SIZE, "width": IMAGE_SIZE})
    images.image_seq_length = (IMAGE_SIZE // 14) ** 2
    transformers.PaliGemmaProcessor(image_processor=images, tokenizer=tokenizer).save_pretrained(
        target
    )
