"""INT8 layers, which vLLM 0.32 on a CPU reloads wrong and calls that a success: Syncline refuses them."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file, save_file

import syncline
from vllm_engines import engine, greedy
from vllm_models import write_checkpoint

W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "channel",
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


def write_int8(path):
    """Write a tiny Qwen3 whose linear layers are INT8 with a scale for each row."""
    import torch

    write_checkpoint("qwen3", path)
    file = path / "model.safetensors"
    quantised = {}
    for name, tensor in load_file(file).items():
        if name.endswith("_proj.weight"):
            scale = tensor.abs().amax(1, keepdim=True) / 127
            quantised[name] = (tensor / scale).round().to(torch.int8)
            quantised[name + "_scale"] = scale
        else:
            quantised[name] = tensor
    save_file(quantised, file, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": W8A8}))
    return quantised


@pytest.mark.slow
def test_an_int8_model_is_refused_and_serves_on(tmp_path):
    weights = write_int8(tmp_path / "model")
    publisher = syncline.Publisher(syncline.open_store(tmp_path / "run"))
    publisher.publish(weights)
    with engine(tmp_path / "model") as llm:
        before = greedy(llm, [[5, 6, 7]], 8)
        [opened] = llm.collective_rpc("syncline_open", args=(str(tmp_path / "run"),))
        [staged] = llm.collective_rpc("syncline_stage", args=("1",))
        for answer in (opened, staged):
            assert "is quantised" in answer["error"]
            assert "serve full checkpoints" in answer["error"]
        assert greedy(llm, [[5, 6, 7]], 8) == before
