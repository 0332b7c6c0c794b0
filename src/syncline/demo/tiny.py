"""A language model that the demo makes itself in seconds, for tests.

Two layers over single characters. It is taught the sums for a moment, so that some completions earn a
reward and the updates that follow are not all zero.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from syncline.demo.arithmetic import LINE_END, SUMS, Problem
from syncline.demo.models import limit_threads, require, transformers

CHARACTERS = "\n" + "".join(map(chr, range(ord(" "), ord("~") + 1)))
PAD, END = "<pad>", "<eos>"
LESSONS = 120
LESSON_RATE = 3e-3


def write_tiny(
    target: Path, seed: int, *, hidden_size: int = 64, intermediate_size: int = 128
) -> None:
    """Write a BF16 checkpoint of about 10**5 parameters, taught sums, and its tokenizer to `target`."""
    import torch

    tokenizer = make_tokenizer()
    config = transformers().LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(seed)
    model = transformers().AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    limit_threads(model)
    teach(model, tokenizer)
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)


def make_tokenizer() -> Any:
    """Return a tokenizer with one token for each printable ASCII character and the line end."""
    tokenizers = require("tokenizers")
    vocabulary = {text: place for place, text in enumerate((PAD, END, *CHARACTERS))}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=PAD))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("[\\s\\S]"), "isolated")
    core.decoder = tokenizers.decoders.Fuse()
    return transformers().PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=END, clean_up_tokenization_spaces=False
    )


def teach(model: Any, tokenizer: Any) -> None:
    """Train the model on the sums and their answers for `LESSONS` steps."""
    import torch

    lines = [one.prompt + one.answer + LINE_END for one in (Problem(a, b) for a, b in SUMS)]
    encoded = tokenizer(lines, padding=True, padding_side="right", return_tensors="pt")
    ids, mask = encoded["input_ids"], encoded["attention_mask"]
    labels = ids.masked_fill(mask == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LESSON_RATE)
    for _ in range(LESSONS):
        optimizer.zero_grad()
        model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
        optimizer.step()
