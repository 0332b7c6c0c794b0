"""One store feeds a vLLM and an SGLang at once; both end with the trainer's bits. Against doubles of both."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file

import syncline
from sglang_scenes import build
from syncline.sglang.server import SglangServer
from syncline.vllm.server import VllmServer
from vllm_fakes import FakeVllm


def test_one_store_feeds_vllm_and_sglang_at_once(tmp_path: Path, rng: np.random.Generator) -> None:
    scene = build(tmp_path, "0.5.23", ranks=2)
    base = load_file(tmp_path / "base" / "model.safetensors")
    vllm = FakeVllm(base, timeout_s=60.0)
    url = str(tmp_path / "run")
    store = syncline.open_store(url)
    with scene.fake:
        engines: list[VllmServer | SglangServer] = [
            VllmServer(vllm, store, url),
            scene.follower,
        ]
        for engine in engines:
            engine.sync(None)
        for _ in range(3):
            version = scene.train(rng)
            threads = [threading.Thread(target=engine.sync, args=(None,)) for engine in engines]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            scene.check(version)
            assert vllm.name == str(version)
            trained = {
                name: tensor.view(-1).view(torch.int16).numpy().tobytes()
                for name, tensor in sorted(scene.weights.items())
            }
            assert vllm.bits() == trained
            assert [engine.held().version for engine in engines] == [version, version]  # type: ignore[union-attr]
