"""A patched server that pulls the slime layout by itself, against a double."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import sglang_tiny as tiny
import syncline
from sglang_fake import FakeSglang, FusedModel
from syncline.errors import (
    BaseVersionError,
    CommitError,
    ConfigError,
    EndpointError,
    OutcomeUnknownError,
    TornUpdateError,
)
from syncline.sglang.control import SglangHttp
from syncline.sglang.pulling import PullingServer


@dataclass
class Scene:
    fake: FakeSglang
    publisher: syncline.Publisher
    server: PullingServer
    weights: dict[str, torch.Tensor]

    def train(self, rng: np.random.Generator) -> int:
        for tensor in self.weights.values():
            flat = tensor.view(torch.int16).view(-1).numpy()
            at = rng.choice(flat.size, 3, replace=False)
            flat[at] ^= rng.integers(1, 1 << 7, 3, dtype=np.int16)
        return int(self.publisher.publish(self.weights).version)

    def check(self, version: int) -> None:
        fresh = FusedModel(tiny.QWEN3, 0, 1)
        fresh.load_weights(self.weights.items())
        held = self.fake.weights()[0]
        for name, tensor in fresh.named_parameters():
            assert torch.equal(held[name].view(torch.uint8), tensor.detach().view(torch.uint8))
        assert self.fake.label == str(version)
        assert not self.fake.is_paused


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    base = tiny.write(tmp_path / "base", tiny.QWEN3, seed=1)
    weights = load_file(base / "model.safetensors")
    store = syncline.open_store(str(tmp_path / "run"))
    publisher = syncline.Publisher(
        store, layout="slime", encoding="xor", checksum="adler32", anchor_every=None
    )
    publisher.publish(weights)
    shutil.copytree(base, tmp_path / "local")
    with FakeSglang("0.5.23", tmp_path / "local", pulls=True) as fake:
        server = PullingServer(
            SglangHttp(fake.url), store, str(tmp_path / "run"), str(tmp_path / "local")
        )
        yield Scene(fake, publisher, server, weights)
        server.close()


def test_it_is_told_to_pull_and_then_to_load(scene: Scene, rng: np.random.Generator) -> None:
    scene.server.sync()
    scene.check(1)
    for _ in range(3):
        version = scene.train(rng)
        scene.fake.calls.clear()
        scene.server.sync()
        scene.check(version)
        calls = [call for call in scene.fake.calls if "info" not in call]
        assert calls.index("/pull_weights") < calls.index("/pause_generation")
        assert scene.server.is_serving()
    assert scene.server.sync() is None
    with pytest.raises(BaseVersionError, match="cannot go back to 2"):
        scene.server.sync(2)


def test_a_refused_pull_changes_nothing(scene: Scene, rng: np.random.Generator) -> None:
    scene.server.sync()
    scene.train(rng)
    before = scene.fake.checksum()
    scene.fake.faults["/pull_weights"] = ("before", "checksum mismatch")
    with pytest.raises(EndpointError, match="checksum mismatch"):
        scene.server.sync()
    assert scene.fake.checksum() == before
    assert scene.server.is_serving()


def test_a_failed_load_is_never_called_the_version(scene: Scene, rng: np.random.Generator) -> None:
    scene.server.sync()
    version = scene.train(rng)
    scene.fake.faults["/flush_cache"] = ("before", "busy")
    with pytest.raises(TornUpdateError):
        scene.server.sync()
    assert scene.server.held() is None
    assert scene.fake.label == "1" and scene.fake.is_paused
    scene.server.sync()
    scene.check(version)


def test_a_server_that_is_paused_or_was_started_anew_is_not_ready(
    scene: Scene, rng: np.random.Generator, tmp_path: Path
) -> None:
    scene.server.sync()
    scene.fake.is_paused = True
    assert not scene.server.is_serving()
    with pytest.raises(CommitError, match="paused by somebody else"):
        scene.server.sync()
    scene.fake.is_paused = False
    assert scene.server.is_serving()
    shutil.copytree(tmp_path / "local", tmp_path / "first")
    version = scene.train(rng)
    scene.server.sync()
    scene.fake.restart(tmp_path / "first", str(version))  # old weights under the newest name
    assert not scene.server.is_serving()
    scene.server.sync()
    scene.check(version)


def test_a_load_that_does_nothing_is_not_named(scene: Scene, rng: np.random.Generator) -> None:
    scene.server.sync()
    version = scene.train(rng)
    scene.fake.lies["/update_weights_from_disk"] = {"success": True}
    with pytest.raises(TornUpdateError, match="holds what it held before"):
        scene.server.sync()
    assert scene.fake.label == "1" and scene.fake.is_paused
    scene.fake.lies.clear()
    scene.server.sync()
    scene.check(version)


def test_a_second_follower_of_a_server_that_pulls_is_refused(
    scene: Scene, rng: np.random.Generator, tmp_path: Path
) -> None:
    scene.server.sync()
    scene.train(rng)
    second = PullingServer(
        SglangHttp(scene.fake.url),
        syncline.open_store(str(tmp_path / "run")),
        str(tmp_path / "run"),
        str(tmp_path / "local"),
    )
    with pytest.raises(CommitError, match="another follower"):
        second.sync()
    assert scene.fake.pulled == 1
    scene.server.close()
    second.sync()
    scene.check(2)
    second.close()


def test_a_server_that_cannot_pull_is_refused(scene: Scene) -> None:
    scene.fake.rules["routes"].remove("/pull_weights")
    with pytest.raises(ConfigError, match="/pull_weights"):
        scene.server.sync()


@pytest.mark.parametrize("route", ["/pause_generation", "/update_weights_from_disk"])
def test_torn_weights_of_a_server_that_pulls_do_not_go_on(
    scene: Scene, rng: np.random.Generator, route: str
) -> None:
    scene.server.sync()
    version = scene.train(rng)
    scene.fake.faults["/flush_cache"] = ("before", "busy")
    with pytest.raises(TornUpdateError):
        scene.server.sync()
    scene.fake.faults[route] = ("before", "busy again")
    with pytest.raises((OutcomeUnknownError, TornUpdateError), match="busy again"):
        scene.server.sync()
    assert scene.fake.is_paused and scene.server.held() is None
    scene.server.sync()
    scene.check(version)


@pytest.mark.parametrize(
    "about", [{"dp_size": 2}, {"speculative_algorithm": "EAGLE"}, {"enable_lmcache": True}]
)
def test_a_server_of_a_kind_that_cannot_be_kept_exact_is_not_told_to_pull(
    scene: Scene, about: dict[str, Any]
) -> None:
    scene.fake.about.update(about)
    with pytest.raises(ConfigError):
        scene.server.sync()
    assert not {"/pull_weights", "/pause_generation"} & {*scene.fake.calls}
