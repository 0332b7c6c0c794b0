"""SGLang's own loaders as an oracle: every parameter of every rank, name, shape and bits, padding included.

SGLang starts in the environment of `make sglang-env`, as it would to serve, and saves what its ranks hold.
"""

from __future__ import annotations

import json
import os
import subprocess
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from shard_files import read_safetensors
from syncline.layouts import EngineMesh, engine_layout, scatter

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venvs" / "sglang" / "bin" / "python"
WAIT_S = 600

CASES = [
    ("qwen3", 1, 1),
    ("qwen3", 2, 1),
    ("qwen3_moe", 1, 1),
    ("qwen3_moe", 2, 1),
    ("qwen3_moe", 2, 2),
    ("deepseek_v3", 1, 1),
    ("deepseek_v3", 2, 1),
]
_COMMON: dict[str, Any] = {
    "dtype": "float32",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 128,
    "num_attention_heads": 8,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 200,
}
_QWEN3 = {**_COMMON, "attention_bias": False, "head_dim": 16}
# SGLang pads what a CPU rank holds of an expert to a multiple of 32; 64 needs no padding at TP 2.
_EXPERTS = {"moe_intermediate_size": 64, "num_experts_per_tok": 2, "norm_topk_prob": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {**_QWEN3, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "qwen3_moe": {
        **_QWEN3,
        **_EXPERTS,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_experts": 8,
    },
    "deepseek_v3": {
        **_COMMON,
        **_EXPERTS,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "attention_bias": False,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 32,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_key_value_heads": 8,
        "q_lora_rank": 48,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        # On a CPU, SGLang builds this family with scaled positions only.
        "rope_scaling": {
            "type": "yarn",
            "factor": 1.0,
            "original_max_position_embeddings": 128,
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
    },
}
# Made anew from other parameters after loading, for absorbed attention.
_DERIVED = (".w_kc", ".w_vc")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="no .venvs/sglang: make sglang-env makes it"),
]


@pytest.mark.parametrize(("family", "tp", "ep"), CASES)
def test_rules_place_what_the_loaders_place(family: str, tp: int, ep: int, tmp_path: Path) -> None:
    config = CONFIGS[family]
    model = tmp_path / family
    model.mkdir()
    write_checkpoint(config, model)
    script, out = ROOT / "tests" / "oracles" / "sglang_shards.py", tmp_path / "out"
    done = subprocess.run(
        [PYTHON, script, model, out, str(tp), str(ep)],
        env={**os.environ, "PYTHONPATH": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert_placed(config, model, out, tp, ep)


def write_checkpoint(config: dict[str, Any], folder: Path) -> None:
    """Write random weights under the names and shapes that the family's table gives."""
    rng = np.random.default_rng(5)
    catalog = engine_layout(config, EngineMesh()).catalog
    weights = {
        name: rng.standard_normal(tensor.meta.shape, np.float32) for name, tensor in catalog.items()
    }
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def assert_placed(config: dict[str, Any], model: Path, out: Path, tp: int, ep: int) -> None:
    """Compare what the ranks saved with what the tables say, bit for bit."""
    kept = read_safetensors(model / "model.safetensors")
    metas = [meta for meta, _ in kept.values()]
    layout = engine_layout(config, EngineMesh(tp, ep=ep), checkpoint=metas, engine="sglang")
    shards = {
        placement.rank: {t.name: np.zeros(prod(t.shape), np.uint32) for t in placement.tensors}
        for placement in layout.placements
    }
    scatter(layout, [kept[name] for name in layout.catalog], shards)
    for placement in layout.placements:
        saved = read_safetensors(out / f"model-rank-{placement.rank}-part-0.safetensors")
        theirs = {name: held for name, held in saved.items() if not name.endswith(_DERIVED)}
        assert {t.name: t.shape for t in placement.tensors} == {
            name: meta.shape for name, (meta, _) in theirs.items()
        }
        for name, bits in shards[placement.rank].items():
            found = theirs[name][1]
            np.testing.assert_array_equal(bits, found, err_msg=f"rank {placement.rank}: {name}")
