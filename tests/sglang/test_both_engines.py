"""One store feeds a vLLM and an SGLang at once; both end with the trainer's bits. Against doubles, and against both."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import sglang_tiny as tiny
import syncline
from sglang_pair import Pair
from sglang_scenes import build
from syncline.demo.identity import sha256_by_name
from syncline.sglang.server import SglangServer
from syncline.vllm.control import HttpControl
from syncline.vllm.server import VllmServer
from vllm_fakes import FakeVllm
from vllm_serving import ROOT, Served

VLLM = ROOT / ".venvs" / "vllm" / "bin" / "python"


def bring(engines: Sequence[VllmServer | SglangServer], version: int) -> None:
    """Bring all engines to the store's version at once."""
    threads = [threading.Thread(target=engine.sync, args=(None,)) for engine in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [engine.held().version for engine in engines] == [version] * len(engines)  # type: ignore[union-attr]


def test_one_store_feeds_vllm_and_sglang_at_once(tmp_path: Path, rng: np.random.Generator) -> None:
    scene = build(tmp_path, "0.5.23", ranks=2)
    base = load_file(tmp_path / "base" / "model.safetensors")
    vllm = FakeVllm(base, timeout_s=60.0)
    url = str(tmp_path / "run")
    store = syncline.open_store(url)
    with scene.fake:
        engines: list[VllmServer | SglangServer] = [VllmServer(vllm, store, url), scene.follower]
        bring(engines, 1)
        for _ in range(3):
            version = scene.train(rng)
            bring(engines, version)
            scene.check(version)
            assert vllm.name == str(version)
            trained = {
                name: tensor.view(-1).view(torch.int16).numpy().tobytes()
                for name, tensor in sorted(scene.weights.items())
            }
            assert vllm.bits() == trained


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("sglang") is None or not VLLM.exists(),
    reason="needs the environments of make sglang-env and make vllm-env",
)
def test_one_store_feeds_a_real_vllm_and_a_real_sglang_at_once(tmp_path: Path) -> None:
    # vLLM's attention on a CPU takes heads of 32 and more.
    pair = Pair(tmp_path, {**tiny.QWEN3, "head_dim": 32})
    (tmp_path / "vllm").mkdir()
    reads = ("--worker-extension-cls", "syncline.demo.vllm_worker.DemoWorker")
    served = Served(
        tmp_path / "base",
        tmp_path / "vllm",
        dtype="bfloat16",
        more=("--skip-tokenizer-init", *reads),
        python=VLLM,
    )
    try:
        served.start()
        url = str(tmp_path / "run")
        engines: list[VllmServer | SglangServer] = [
            VllmServer(HttpControl(served.url), pair.store, url),
            pair.follower,
        ]
        bring(engines, 1)
        for _ in range(5):
            version = pair.train()
            bring(engines, version)
            assert pair.control.label(60) == HttpControl(served.url).label(60) == str(version)
            pair.check()
            [found] = served.rpc("demo_digests")
            # Where a kernel keeps a weight packed, its -0.0 cannot be told from 0.0.
            trained = sha256_by_name(
                (name, tensor + 0.0 if name in found["through"] else tensor)
                for name, tensor in pair.weights.items()
            )
            assert found["digests"] == trained
    finally:
        served.stop()
        pair.close()
