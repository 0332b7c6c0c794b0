"""The cut and the noise, on a GGUF file of a few rows; the real model is run by `make demo`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from syncline.demo.gemma import (
    SPECIAL,
    begin_with_bos,
    cut_vocabulary,
    dither,
    is_spelled_out,
)
from syncline.demo.models import load_tokenizer
from syncline.demo.tiny import make_tokenizer

gguf = pytest.importorskip("gguf")
torch = pytest.importorskip("torch")

TOKENS = [
    "<pad>",
    "<eos>",
    "<bos>",
    "the",
    "<0x0A>",
    "\n",
    "\n\n",
    "▁",
    "7",
    "77",
    "é",
    "<unused0>",
]
NORMAL, CONTROL, USER, BYTE = 1, 3, 4, 6
TYPES = [CONTROL] * 3 + [NORMAL, BYTE, USER, USER] + [NORMAL] * 4 + [CONTROL]
KEPT = ["<pad>", "<eos>", "<bos>", "<0x0A>", "\n", "▁", "7"]


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    path = tmp_path / "whole.gguf"
    writer = gguf.GGUFWriter(path, arch="gemma3")
    writer.add_token_list(TOKENS)
    writer.add_token_types(TYPES)
    writer.add_token_scores([float(place) for place in range(len(TOKENS))])
    writer.add_bos_token_id(2)
    writer.add_context_length(99)
    rows = np.arange(len(TOKENS) * 32, dtype=np.float32).reshape(len(TOKENS), 32)
    quantised = gguf.quants.quantize(rows, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("token_embd.weight", quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_cut_file_has_the_kept_rows_and_all_else_unchanged(whole: Path, tmp_path: Path) -> None:
    assert cut_vocabulary(whole, tmp_path / "small.gguf") == len(TOKENS)

    before, after = gguf.GGUFReader(whole), gguf.GGUFReader(tmp_path / "small.gguf")
    kept = [TOKENS.index(text) for text in KEPT]
    assert after.fields["tokenizer.ggml.tokens"].contents() == KEPT
    assert after.fields["tokenizer.ggml.scores"].contents() == [float(place) for place in kept]
    assert after.fields["tokenizer.ggml.token_type"].contents() == [TYPES[place] for place in kept]
    assert after.fields["tokenizer.ggml.bos_token_id"].contents() == KEPT.index("<bos>")
    assert after.fields["gemma3.context_length"].contents() == 99

    old = {tensor.name: tensor for tensor in before.tensors}
    new = {tensor.name: tensor for tensor in after.tensors}
    assert new.keys() == old.keys()
    assert new["token_embd.weight"].tensor_type == gguf.GGMLQuantizationType.Q8_0
    assert np.array_equal(new["token_embd.weight"].data, old["token_embd.weight"].data[kept])
    assert np.array_equal(new["output_norm.weight"].data, old["output_norm.weight"].data)


@pytest.mark.parametrize("text", ["7", "+", "=", "a", "~", "!", "▁", "\n"])
def test_single_characters_are_kept(text: str) -> None:
    assert is_spelled_out(text)


@pytest.mark.parametrize("text", ["77", "", " ", "é", "\t", "\n\n", "▁7"])
def test_all_other_text_is_not(text: str) -> None:
    assert not is_spelled_out(text)
    assert text not in SPECIAL


def test_noise_fills_the_zeros_stays_within_half_a_step_and_is_always_the_same() -> None:
    grid = torch.randint(-16, 16, (64, 64), generator=torch.Generator().manual_seed(1)) / 16.0
    models = [torch.nn.Linear(64, 64, dtype=torch.bfloat16) for _ in range(2)]
    for model in models:
        with torch.no_grad():
            model.weight.copy_(grid)
            model.bias.zero_()
        dither(model)
    weight = models[0].weight.detach().float()
    assert torch.equal(weight, models[1].weight.detach().float())
    assert (grid == 0).any()
    assert (weight != 0).all()
    step = grid.view(-1, 32).abs().amax(1, keepdim=True) / 16
    moved = (weight - grid).view(-1, 32).abs()
    assert (moved <= step / 2 + grid.view(-1, 32).abs() / 256 + step / 256).all()
    assert moved.max() > step.min() / 3
    assert (models[0].bias == 0).all()


def test_every_text_begins_with_bos_once(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    plain = tokenizer.encode("1+1")
    for _ in range(2):
        begin_with_bos(tokenizer)
        tokenizer.save_pretrained(tmp_path)
        tokenizer = load_tokenizer(tmp_path)
        assert tokenizer.encode("1+1") == [tokenizer.bos_token_id, *plain]
