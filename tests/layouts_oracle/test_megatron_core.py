"""megatron-core itself as an oracle, on Gloo: who holds what, and how a checkpoint moves between meshes.

Runs in an environment of its own (`make oracles` makes it): processes write what Megatron says, here it is
compared with what our tables say. DeepSeek-V3 is built of the stand-in for Transformer Engine, the others without.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from syncline.layouts import Layout, MegatronMesh, check, match, megatron_layout, scatter
from syncline.types import Bits

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = ROOT / ".venvs" / "oracles" / "bin" / "torchrun"
RANKS = ROOT / "tests" / "oracles" / "megatron_ranks.py"
WAIT_S = 900

BASE = {
    "dtype": "float32",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "tie_word_embeddings": False,
}
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**BASE, "model_type": "llama"},
    "llama_tied": {**BASE, "model_type": "llama", "tie_word_embeddings": True},
    "qwen3_moe": {**BASE, **MOE, "model_type": "qwen3_moe", "head_dim": 16},
    "deepseek_v3": {**BASE, **LATENT, "model_type": "deepseek_v3", "num_key_value_heads": 8},
    "mixtral": {**BASE, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
}
# What is saved and what is loaded: world, TP, PP, EP, expert-TP.
MOVES = {
    "llama": ((4, 2, 2, 1, 2), (4, 1, 2, 1, 1)),
    "llama_tied": ((4, 2, 2, 1, 2), (2, 2, 1, 1, 2)),
    "qwen3_moe": ((4, 2, 2, 2, 1), (4, 4, 1, 2, 2)),
    "deepseek_v3": ((4, 2, 2, 1, 2), (4, 4, 1, 4, 1)),
    "mixtral": ((4, 2, 1, 2, 2), (4, 2, 2, 2, 1)),
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not TORCHRUN.exists(), reason="no .venvs/oracles: make oracles makes it"),
]


class Launched:
    """The ranks of one mesh, and what Megatron says of them."""

    def __init__(self, folder: Path, config: Path, sizes: tuple[int, ...], mode: str) -> None:
        world, tp, pp, ep, etp = sizes
        self.mesh = MegatronMesh(world, tp=tp, pp=pp, ep=ep, etp=etp)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._log = folder / f"{mode}.log"
        for rank in range(world):
            (folder / f"rank{rank}.json").unlink(missing_ok=True)
        command = [
            *(str(TORCHRUN), f"--nproc_per_node={world}", f"--master_port={port}", str(RANKS)),
            *(str(folder), str(config), *map(str, (tp, pp, ep, etp)), mode),
        ]
        # torchrun leaves a folder wherever temporary files go.
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": "",
            "TMPDIR": str(folder),
        }
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        self.about = [self._read(folder / f"rank{rank}.json") for rank in range(world)]

    def _read(self, path: Path) -> dict[str, Any]:
        deadline_s = time.monotonic() + WAIT_S
        while not path.exists():
            assert self._process.poll() is None, self._log.read_text()[-4000:]
            assert time.monotonic() < deadline_s, f"{path} did not appear"
            time.sleep(0.1)
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def end(self) -> None:
        try:
            assert self._process.wait(WAIT_S) == 0, self._log.read_text()[-4000:]
        finally:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()

    def layout(self, config: dict[str, Any]) -> Layout:
        seen = {name for about in self.about for name in about["tensors"]}
        return megatron_layout(config, self.mesh, seen=seen)


def assert_placed_as_megatron_says(layout: Layout, about: list[dict[str, Any]]) -> int:
    """Two local tensors are the same piece for Megatron exactly if they are for us."""
    ours: dict[Any, set[tuple[int, str]]] = {}
    theirs: dict[Any, set[tuple[int, str]]] = {}
    for placement in layout.placements:
        described = about[placement.rank]["sharded"]
        pieces: dict[str, list[Any]] = {}
        for block in placement.blocks:
            pieces.setdefault(block.local, []).append((block.name, block.box))
        for name, (key, offset, shape) in described.items():
            at = (placement.rank, name)
            ours.setdefault(tuple(sorted(pieces[name])), set()).add(at)
            theirs.setdefault((key, tuple(offset), tuple(shape)), set()).add(at)
    assert sorted(map(sorted, ours.values())) == sorted(map(sorted, theirs.values()))
    return len(theirs)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_megatron_places_and_reshards_as_our_tables_say(name: str, tmp_path: Path) -> None:
    config, (saved, loaded) = CONFIGS[name], MOVES[name]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    rng = np.random.default_rng(3)
    source = Launched(tmp_path, path, saved, "save")
    layout = source.layout(config)
    check(layout)
    for placement in layout.placements:
        match(placement, _found(source.about[placement.rank]))
    assert assert_placed_as_megatron_says(layout, source.about) > 10
    whole = [
        (tensor.meta, rng.standard_normal(tensor.meta.count, np.float32).view(np.uint32))
        for tensor in layout.catalog.values()
    ]
    for rank, shard in _scattered(layout, whole).items():
        np.savez(tmp_path / "part.npz", **{k: v.view(np.float32) for k, v in shard.items()})
        (tmp_path / "part.npz").rename(tmp_path / f"given{rank}.npz")
    source.end()

    target = Launched(tmp_path, path, loaded, "load")
    wanted = target.layout(config)
    assert set(wanted.catalog) == set(layout.catalog)
    assert assert_placed_as_megatron_says(wanted, target.about) > 10
    target.end()
    for rank, shard in _scattered(wanted, whole).items():
        with np.load(tmp_path / f"loaded{rank}.npz") as got:
            assert set(got.files) == set(shard)
            for local, bits in shard.items():
                found = got[local].ravel().view(np.uint32)
                np.testing.assert_array_equal(found, bits, err_msg=f"rank {rank}: {local}")


def _found(about: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    assert {dtype for dtype, _ in about["tensors"].values()} == {"torch.float32"}
    return {name: ("F32", tuple(shape)) for name, (_, shape) in about["tensors"].items()}


def _scattered(layout: Layout, whole: list[Any]) -> dict[int, dict[str, Bits]]:
    shards = {
        placement.rank: {t.name: np.zeros(prod(t.shape), np.uint32) for t in placement.tensors}
        for placement in layout.placements
    }
    scatter(layout, whole, shards)
    return shards
