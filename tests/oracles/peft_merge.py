"""Run in an environment with PEFT: what `merged_lora` yields is what PEFT's own merge leaves, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from syncline.errors import LayoutError
from syncline.sources import merged_lora


def base(dtype: torch.dtype) -> Any:
    """Return a small model."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).to(dtype)


def adapted(dtype: torch.dtype, *, autocast: bool, **options: Any) -> Any:
    """Return a model with random adapters, two of them on the same matrices."""
    config = LoraConfig(
        r=4, lora_alpha=12, target_modules=["q_proj", "v_proj", "down_proj"], **options
    )
    model = get_peft_model(base(dtype), config, autocast_adapter_dtype=autocast)
    model.add_adapter("second", LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj"]))
    model.base_model.set_adapter(["default", "second"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_(0, 0.05)
    return model


def main() -> None:
    """Compare, for every dtype of base and adapters; check that variants are refused."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for autocast in (True, False):
            model = adapted(dtype, autocast=autocast)
            found = dict(merged_lora(model))
            wanted = copy.deepcopy(model).merge_and_unload().state_dict()
            assert found.keys() == wanted.keys()
            changed = 0
            for name, tensor in wanted.items():
                assert found[name].dtype == tensor.dtype == dtype, name
                assert torch.equal(
                    found[name].detach().contiguous().view(torch.uint8),
                    tensor.contiguous().view(torch.uint8),
                ), name
                changed += not torch.equal(tensor, base(dtype).state_dict()[name])
            assert changed == 6
    for options in ({"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"lora_bias": True}):
        model = get_peft_model(
            base(torch.float32), LoraConfig(r=4, target_modules=["q_proj"], **options)
        )
        try:
            list(merged_lora(model))
        except LayoutError as error:
            assert "plain LoRA" in str(error)
        else:
            raise AssertionError(f"{options} were merged")
    model = adapted(torch.float32, autocast=False)
    model.merge_adapter()
    try:
        list(merged_lora(model))
    except LayoutError as error:
        assert "already" in str(error)
    else:
        raise AssertionError("a merged model was merged again")


if __name__ == "__main__":
    main()
