"""The checkpoint that both processes load: written once, an ordinary Hugging Face directory."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from syncline.demo.config import DemoConfig
from syncline.demo.gemma import write_gemma
from syncline.demo.models import load_model, load_tokenizer, require
from syncline.demo.tiny import write_tiny

TINY_SIZES: Mapping[str, Mapping[str, int]] = {
    "transformers": {},
    "sglang": {},
    # vLLM's attention on a CPU takes heads of 32 and more.
    "vllm": {"hidden_size": 128, "intermediate_size": 256},
}


@dataclass(frozen=True, slots=True)
class Base:
    """What was written.

    Attributes:
        model: what it is, in words.
        vocabulary: tokens in it, and `vocabulary_before` the cut.
        is_dithered: noise was added to its matrices.
    """

    model: str
    vocabulary: int
    vocabulary_before: int
    is_dithered: bool


def write_base(config: DemoConfig, target: Path, phase: Callable[[str], None]) -> Base:
    """Write the BF16 checkpoint that `config` asks for to `target`, with its tokenizer.

    Args:
        phase: told what is being done, a few words at a time.

    Raises:
        ConfigError: the model or a package is missing.
    """
    require("torch")
    if config.tiny:
        phase("making a tiny model")
        write_tiny(target, config.seed, **TINY_SIZES[config.engine])
        vocabulary = len(load_tokenizer(target))
        return Base("tiny two-layer model", vocabulary, vocabulary, is_dithered=False)
    if config.model is not None:
        phase(f"converting {config.model} to BF16")
        vocabulary = convert(config.model, target)
        return Base(str(config.model), vocabulary, vocabulary, is_dithered=False)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        before = write_gemma(target, Path(scratch), phase)
    return Base("Gemma 3 270M", len(load_tokenizer(target)), before, is_dithered=True)


def convert(source: Path, target: Path) -> int:
    """Write the model in `source` as BF16 to `target`, whole; return the size of its vocabulary."""
    import torch

    tokenizer = load_tokenizer(source)
    load_model(source, torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)
    return len(tokenizer)
