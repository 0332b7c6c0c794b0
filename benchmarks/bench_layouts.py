"""How fast are plans, mapped positions and dense moves? Prints JSON; one core, best of five.

python benchmarks/bench_layouts.py [--quick]
"""

from __future__ import annotations

import json
import platform
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from syncline.layouts import (
    Block,
    EngineMesh,
    MegatronMesh,
    PositionMap,
    engine_layout,
    megatron_layout,
    plain,
)
from syncline.layouts.blocks import run_of
from syncline.layouts.dense import canonical_view, local_view
from syncline.plan import load_of, make_plan
from syncline.types import TensorMeta

DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "vocab_size": 129280,
    "num_nextn_predict_layers": 1,
}
KIMI_K2 = {
    **DEEPSEEK_V3,
    "model_type": "kimi_k2",
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "first_k_dense_replace": 1,
    "vocab_size": 163840,
    "num_nextn_predict_layers": 0,
}
QWEN3_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
QWEN3_MOE = {
    **QWEN3_8B,
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_key_value_heads": 4,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 201088,
    "num_local_experts": 2,
}


def best_s(work: Callable[[], object]) -> float:
    """Return the least of five times."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def plan(config: dict[str, Any]) -> dict[str, float]:
    """1,024 trainer ranks to 64 engines of 16: tables, checks, plan, digest and load."""
    start = time.perf_counter()
    mesh = MegatronMesh(1024, tp=8, pp=16, ep=32, etp=1, first_layers=3, last_layers=2)
    source, target = megatron_layout(config, mesh), engine_layout(config, EngineMesh(16, ep=16))
    tables_s = time.perf_counter() - start
    unused = source.catalog.keys() - target.catalog.keys()
    made = make_plan(source, target, engines=64, unused=unused)
    load = load_of(made)
    return {
        "tables_s": tables_s,
        "all_s": time.perf_counter() - start,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "tensors": len(target.catalog),
        "buckets": len(made.buckets),
        "transfers": sum(len(t.senders) for bucket in made.buckets for t in bucket),
        "moved_tib": load.moved_bytes / 2**40,
    }


def positions(config: dict[str, Any], tp: int, ending: str, share: float) -> float:
    """Millions of positions a second, from a rank's local tensor to canonical ones."""
    layout = megatron_layout(config, MegatronMesh(tp, tp=tp))
    placement = layout.placements[tp - 1]
    tensor = next(t for t in placement.tensors if t.name.endswith(ending))
    rng = np.random.default_rng(0)
    where = np.flatnonzero(rng.random(int(np.prod(tensor.shape))) < share)
    bits = rng.integers(0, 1 << 16, where.size, np.uint16)
    position_map = PositionMap(layout.catalog, placement)
    return where.size / best_s(lambda: position_map.to_canonical(tensor.name, where, bits)) / 1e6


def sort(count: int) -> float:
    """Millions of shuffled 64-bit words a second through numpy's sort: the roof of what must be sorted."""
    words = np.random.default_rng(0).permutation(np.arange(count, dtype=np.uint64))
    return count / best_s(lambda: np.sort(words)) / 1e6


def experts(config: dict[str, Any], share: float) -> float:
    """Millions of positions a second, through all experts' tensors of a layer, one after the other."""
    layout = megatron_layout(config, MegatronMesh(1))
    placement = layout.placements[0]
    rng = np.random.default_rng(0)
    changes = []
    for tensor in placement.tensors:
        if ".experts." in tensor.name:
            where = np.flatnonzero(rng.random(int(np.prod(tensor.shape))) < share)
            changes.append((tensor.name, where, rng.integers(0, 1 << 16, where.size, np.uint16)))
    position_map = PositionMap(layout.catalog, placement)
    count = sum(where.size for _, where, _ in changes)

    def work() -> None:
        for change in changes:
            position_map.to_canonical(*change)

    return count / best_s(work) / 1e6


def dense(columns: int) -> dict[str, float]:
    """GB/s through a row-parallel block of 16,384 rows in BF16, and of memcpy of as much."""
    rows, total = 16384, 4 * columns
    tensor = plain(TensorMeta("w", "BF16", (rows, total)))
    run = run_of(Block("w", (0, columns), (rows, columns), "t", 0, (columns, 1)), tensor.grid)
    whole, local = np.ones(rows * total, np.uint16), np.ones(rows * columns, np.uint16)
    other = np.ones_like(local)
    there, here = canonical_view(run, tensor.meta, whole), local_view(run, tensor.meta, local)
    size = local.nbytes / 1e9
    return {
        "row_bytes": 2 * columns,
        "gather_gb_s": size / best_s(lambda: np.copyto(there, here)),
        "scatter_gb_s": size / best_s(lambda: np.copyto(here, there)),
        "memcpy_gb_s": size / best_s(lambda: np.copyto(other, local)),
    }


def main() -> None:
    """Print every figure as JSON."""
    figures: dict[str, Any] = {"machine": platform.machine(), "numpy": np.__version__}
    # Plans first: the peak of the process is then theirs.
    if "--quick" not in sys.argv:
        figures["deepseek_v3"] = plan(DEEPSEEK_V3)
        figures["kimi_k2"] = plan(KIMI_K2)
    figures["positions_m_s"] = {
        "qkv": positions(QWEN3_8B, 1, "linear_qkv.weight", 0.3),
        "row": positions(QWEN3_8B, 4, "linear_proj.weight", 0.5),
        "qwen3_moe_experts": experts(QWEN3_MOE, 0.02),
        "gpt_oss_fc1": positions(GPT_OSS, 1, "linear_fc1.weight0", 0.3),
        "sort_of_as_many": sort(5_000_000),
    }
    figures["dense"] = [dense(2048), dense(4096)]
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
