"""The real SGLang on the CPU: its own checksums say that changes in place are a dense update and a fresh start."""

from __future__ import annotations

import json
import os
import shutil
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sglang.srt", reason="needs the environment of make sglang-env")

import torch
from safetensors.torch import load_file

import sglang_probe
import sglang_tiny as tiny
import syncline
from sglang_real import SOURCE
from sglang_real import SglangServer as RealServer
from syncline.engines import CheckpointDir
from syncline.errors import LayoutError, SynclineError
from syncline.sglang import spans
from syncline.sglang.change import LOADER, NOTHING
from syncline.sglang.commit import CommitOptions
from syncline.sglang.control import SglangHttp
from syncline.sglang.server import Route, SglangServer

TESTS = Path(sglang_probe.__file__).parent
PROMPT = [int(token) for token in np.random.default_rng(5).integers(3, 250, 200)]


class Pair:
    """A trainer and a real server that follows it."""

    def __init__(self, root: Path, model: str, tp: int, *, plugins: Path | None = None) -> None:
        self.root, self.tp, self.plugins = root, tp, plugins
        base = tiny.write(root / "base", tiny.MODELS[model], seed=1)
        self.weights = load_file(base / "model.safetensors")
        self.store = syncline.open_store(str(root / "run"))
        self.publisher = syncline.Publisher(self.store)
        self.publisher.publish(self.weights)
        self.checkpoint = CheckpointDir(root / "model")
        syncline.Receiver(self.store, self.checkpoint).sync()
        shutil.copy(base / "config.json", root / "model")
        self.rng = np.random.default_rng(11)
        self.start()

    def start(self) -> None:
        path = [SOURCE, TESTS, *([] if self.plugins is None else [self.plugins])]
        environment = {
            "SYNCLINE_SGLANG_STAGING": str(self.root / "staging"),
            "PYTHONPATH": os.pathsep.join(map(str, path)),
        }
        self.real = RealServer(
            self.root / "model",
            self.root / "server.log",
            tp=self.tp,
            arguments=["--custom-weight-loader", LOADER, sglang_probe.NAME],
            environment=environment,
        ).wait()
        self.control = SglangHttp(self.real.url)
        self.follower = self.another()

    def another(self, route: Route = "auto") -> SglangServer:
        return SglangServer(
            self.control,
            self.store,
            self.checkpoint,
            self.root / "staging",
            route=route,
            options=CommitOptions(step_timeout_s=120.0),
        )

    def train(self, *, share: float = 0.02) -> int:
        for tensor in self.weights.values():
            width = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
            flat = tensor.view(width).view(-1).numpy()
            count = max(1, int(share * flat.size * self.rng.random()))
            at = self.rng.choice(flat.size, count, replace=False)
            flat[at] ^= self.rng.integers(1, 1 << 5, count).astype(flat.dtype)
        return int(self.publisher.publish(self.weights).version)

    def generate(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        lines = list(self.stream(prompt, tokens))
        return lines[-1]

    def stream(self, prompt: list[int], tokens: int) -> Iterator[dict[str, Any]]:
        body = {
            "input_ids": prompt,
            "stream": True,
            "return_logprob": True,
            "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
        }
        request = urllib.request.Request(
            self.real.url + "/generate",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))

    def derived(self) -> dict[str, str]:
        """Return digests of what the ranks derived from their weights."""
        file = self.root / "staging" / sglang_probe.FILE
        file.unlink(missing_ok=True)
        self.control.begin(60)
        self.control.load_tensors([NOTHING] * self.tp, sglang_probe.NAME, 60)
        self.control.end(60)
        found: dict[str, str] = json.loads(file.read_text())
        return found

    def check_dense(self) -> None:
        """Compare with SGLang's own load of the whole checkpoint, which must change nothing."""
        found = self.control.checksums(120)
        assert len(found.ranks) == self.tp
        self.control.load_directory(str(self.root / "model"), 120)
        assert self.control.checksums(120) == found


@pytest.fixture(scope="module", params=["qwen3-1"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    model, tp = request.param.rsplit("-", 1)
    made = Pair(tmp_path_factory.mktemp(request.param), model, int(tp))
    yield made
    made.control.close()
    made.real.close()


def follow(pair: Pair, count: int) -> None:
    pair.follower.sync()
    for _ in range(count):
        version = pair.train()
        done = pair.follower.sync()
        assert done is not None and done.route == "in place"
        assert done.label == pair.control.label(60) == str(version)
        pair.check_dense()


def test_checksums_after_each_change_in_place_are_those_of_a_dense_update(pair: Pair) -> None:
    follow(pair, 5)
    assert pair.follower.figures()["syncline_dense_tensors"] == 0


@pytest.mark.parametrize(
    "route, name",
    [
        ("disk", "from disk"),
        ("memory", "from memory"),
        ("distributed", "from distributed"),
    ],
)
def test_whole_tensors_give_the_same_by_every_route(pair: Pair, route: Route, name: str) -> None:
    follower = pair.another(route)
    follower.sync()
    for _ in range(2):
        version = pair.train()
        done = follower.sync()
        assert done is not None and done.route == name
        assert pair.control.label(60) == str(version)
        pair.check_dense()
    follower.close()
    pair.follower = pair.another()


def test_a_retracted_request_ends_with_two_spans_and_the_new_weights_tokens(pair: Pair) -> None:
    pair.follower.sync()
    before = pair.control.label(60)
    version = pair.train(share=0.3)
    answers = pair.stream(PROMPT, 1200)
    next(answers)  # it runs
    done: list[Any] = []
    updating = threading.Thread(target=lambda: done.append(pair.follower.sync()))
    updating.start()
    last = list(answers)[-1]
    updating.join()
    assert done[0] is not None
    output = last["output_ids"]
    found = spans.of_answer(last, len(output))
    assert [span.label for span in found] == [before, str(version)]
    seam = found[1].start
    assert 0 < seam < len(output)
    fresh = pair.generate(PROMPT + output[:seam], len(output) - seam)
    assert fresh["output_ids"] == output[seam:]
    assert [s.version for s in spans.of_answer(fresh, len(output) - seam)] == [version]


def test_a_cached_prompt_is_computed_again_after_an_update(pair: Pair) -> None:
    pair.follower.sync()
    old = pair.generate(PROMPT, 40)
    assert pair.generate(PROMPT, 1)["meta_info"]["cached_tokens"] > 0
    pair.train(share=0.5)
    pair.follower.sync()
    new = pair.generate(PROMPT, 40)
    assert new["meta_info"]["cached_tokens"] == 0
    pair.control.flush(60)
    assert pair.generate(PROMPT, 40)["output_ids"] == new["output_ids"] != old["output_ids"]


def test_a_server_of_another_shape_is_refused_and_lives_on(pair: Pair, tmp_path: Path) -> None:
    """SGLang itself would die of it."""
    other = tiny.write(tmp_path / "base", {**tiny.QWEN3, "intermediate_size": 64}, seed=2)
    store = syncline.open_store(str(tmp_path / "run"))
    syncline.Publisher(store).publish(load_file(other / "model.safetensors"))
    follower = SglangServer(
        pair.control, store, CheckpointDir(tmp_path / "model"), tmp_path / "staging"
    )
    label, before = pair.control.label(60), pair.control.checksums(60)
    with pytest.raises(LayoutError, match="gate_proj"):
        follower.sync()
    assert pair.control.label(60) == label
    assert pair.control.checksums(60) == before


def test_a_killed_server_comes_back_at_the_version_it_is_said_to_have(pair: Pair) -> None:
    pair.follower.sync()
    pair.train()
    pair.follower.sync()
    before = pair.control.checksums(60)
    pair.real.close()
    assert not pair.follower.is_serving()
    assert pair.follower.held() is None
    with pytest.raises(SynclineError):
        pair.follower.sync()
    pair.start()
    assert pair.control.checksums(60) == before  # a fresh start is the same weights
    version = pair.train()
    pair.follower.sync()
    assert pair.control.label(60) == str(version)
    pair.check_dense()


@pytest.mark.slow
def test_the_plugin_is_a_second_door(tmp_path: Path) -> None:
    """Found through the metadata of an installed distribution, as SGLang looks for plugins."""
    found = tmp_path / "path" / "syncline_hook-0.dist-info"
    found.mkdir(parents=True)
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: syncline-hook\nVersion: 0\n")
    (found / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nsyncline_hook = syncline.sglang.plugin:register\n"
    )
    pair = Pair(tmp_path, "qwen3", 2, plugins=found.parent)
    try:
        follower = pair.another("plugin")
        follower.sync()
        for _ in range(3):
            version = pair.train()
            done = follower.sync()
            assert done is not None and done.route == "in place"
            assert pair.control.label(60) == str(version)
            pair.check_dense()
    finally:
        pair.control.close()
        pair.real.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "pair", ["qwen3-1", "qwen3-2", "qwen3_moe-1", "qwen3_moe-2"], indirect=True, scope="module"
)
def test_fifty_random_deltas_are_fifty_dense_updates_and_a_fresh_start(pair: Pair) -> None:
    follow(pair, 50)
    assert pair.follower.figures()["syncline_dense_tensors"] == 0
    pair.train(share=0.5)
    pair.follower.sync()
    in_place = pair.generate(PROMPT, 30)
    before = pair.control.checksums(120)
    pair.real.close()
    pair.start()
    assert pair.control.checksums(120) == before
    fresh = pair.generate(PROMPT, 30)
    assert fresh["output_ids"] == in_place["output_ids"]
    scores = [answer["meta_info"]["output_token_logprobs"] for answer in (fresh, in_place)]
    assert scores[0] == scores[1]


@pytest.mark.slow
@pytest.mark.parametrize("pair", ["deepseek_v3-1"], indirect=True, scope="module")
def test_what_deepseek_derives_from_its_weights_follows_them(pair: Pair) -> None:
    """Its absorbed projections have no checksum, and no build of its kernels runs here: they are read."""
    pair.follower.sync()
    seen = [pair.derived()]
    assert len(seen[0]) == 2 * tiny.DEEPSEEK_V3["num_hidden_layers"]
    for _ in range(20):
        pair.train()
        done = pair.follower.sync()
        assert done is not None and done.route == "in place"
        assert pair.follower.figures()["syncline_dense_tensors"] == 0
        found = pair.derived()
        assert found != seen[-1]
        pair.check_dense()
        assert pair.derived() == found
        seen.append(found)
    before = pair.control.checksums(120)
    pair.real.close()
    pair.start()
    assert pair.control.checksums(120) == before
    assert pair.derived() == seen[-1]
