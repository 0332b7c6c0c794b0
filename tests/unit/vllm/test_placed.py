"""Live weights changed in place, on a torch model that loads as vLLM's models do: what can go wrong."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from syncline import MemoryStore, Publisher
from syncline.errors import LayoutError, VerifyError
from syncline.sources import CheckpointSource
from syncline.vllm.copy import HostCopy
from syncline.vllm.placed import PlacedWeights
from syncline.vllm.ranks import OneWorker
from vllm_fakes import Shared, ThreadWorkers

SHAPES = {
    "embed": (10, 4),
    "q": (8, 4),
    "k": (4, 4),
    "scale": (6,),
    "head": (10, 4),
    "unused": (3,),
}


class Model(torch.nn.Module):
    """q and k fused; `scale` transformed while it is loaded; the head tied; a tensor that is skipped."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in {"embed": (16, 4), "qk": (12, 4), "scale": (6,)}.items():
            parameter = torch.nn.Parameter(torch.zeros(shape), requires_grad=False)
            self.register_parameter(name, parameter)
        self.head = self.embed

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name in ("embed", "head"):
                self.embed.data[: len(tensor)].copy_(tensor)
                self.embed.data[len(tensor) :].fill_(0)
            elif name in ("q", "k"):
                first = {"q": 0, "k": 8}[name]
                self.qk.data.narrow(0, first, len(tensor)).copy_(tensor)
            elif name == "scale":
                self.scale.data.copy_(self.transformed(tensor))

    def transformed(self, tensor: torch.Tensor) -> torch.Tensor:
        return -torch.exp(tensor)


class Setting:
    """A model, its checkpoint, and a trainer."""

    def __init__(self, path: Path, model: Model | None = None) -> None:
        generator = torch.Generator().manual_seed(1)
        self.weights = {n: torch.randn(s, generator=generator) for n, s in SHAPES.items()}
        self.weights["head"] = self.weights["embed"].clone()
        save_file(self.weights, path / "model.safetensors", metadata={"format": "pt"})
        self.source = CheckpointSource(path)
        self.model = Model() if model is None else model
        self.model.load_weights(self.weights.items())
        self.store = MemoryStore()
        self.publisher = Publisher(self.store)
        self.publish()
        self.copy = HostCopy(self.source)
        self.copy.follow(self.store, None)

    def placed(self, **options: Any) -> PlacedWeights:
        return PlacedWeights(self.model, self.source, OneWorker(), **options)

    def publish(self) -> None:
        self.publisher.publish({name: tensor.clone() for name, tensor in self.weights.items()})

    def step(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for name, tensor in self.weights.items():
            where = torch.from_numpy(rng.integers(0, tensor.numel(), 3))
            tensor.view(-1)[where] += 1
            if name == "head":
                tensor.copy_(self.weights["embed"])
        self.publish()
        self.copy.follow(self.store, None)

    def held(self) -> dict[str, bytes]:
        return {n: t.data.numpy().tobytes() for n, t in self.model.named_parameters()}

    def check(self, placed: PlacedWeights) -> None:
        """The model is what loading everything makes of it, and its fingerprint the version's."""
        fresh = Model()
        fresh.load_weights(self.weights.items())
        for name, tensor in fresh.named_parameters():
            assert torch.equal(tensor, dict(self.model.named_parameters())[name]), name
        held = self.copy.held()
        assert held is not None
        assert placed.fingerprint(self.copy) == held.manifest.fingerprint
        assert placed.fingerprint_in_full(self.copy) == held.manifest.fingerprint


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(tmp_path)


def settle(setting: Setting, placed: PlacedWeights) -> None:
    setting.copy.settle()
    placed.settle()


def test_versions_are_followed(setting: Setting) -> None:
    placed = setting.placed()
    assert set(placed.whole) == {"scale"}
    for seed in range(6):
        setting.step(seed)
        if seed % 2:
            placed.prepare(setting.copy)
        placed.write(setting.copy)
        setting.check(placed)
        settle(setting, placed)


def test_what_is_written_can_be_taken_back(setting: Setting) -> None:
    placed = setting.placed()
    before = setting.held()
    setting.step(1)
    placed.prepare(setting.copy)
    assert setting.held() == before
    placed.write(setting.copy)
    assert setting.held() != before
    placed.undo(setting.copy)
    placed.undo(setting.copy)
    assert setting.held() == before
    placed.write(setting.copy)
    setting.check(placed)
    settle(setting, placed)


@pytest.mark.parametrize("part", ["_prepared", "_forms", "_whole", "_shares"])
def test_a_failure_anywhere_restores_every_bit(
    setting: Setting, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed = setting.placed()
    before = setting.held()
    setting.step(1)
    placed.prepare(setting.copy)
    method = {"_prepared": "write", "_forms": "swap", "_whole": "load", "_shares": "change"}[part]
    own = getattr(getattr(placed, part), method)

    def failing(*args: Any, **options: Any) -> None:
        own(*args, **options)
        raise MemoryError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(getattr(placed, part), method, failing)
        with pytest.raises(MemoryError):
            placed.write(setting.copy)
    assert setting.held() == before
    placed.write(setting.copy)
    setting.check(placed)


def test_weights_that_something_else_changed_are_noticed_and_repaired(setting: Setting) -> None:
    placed = setting.placed()
    setting.step(1)
    placed.write(setting.copy)
    setting.check(placed)
    settle(setting, placed)
    setting.model.qk.data += 1
    held = setting.copy.held()
    assert held is not None
    assert placed.fingerprint_in_full(setting.copy) != held.manifest.fingerprint
    setting.step(2)
    with pytest.raises(VerifyError, match="something else changed the weights"):
        placed.write(setting.copy)
    placed.write(setting.copy, everything=True)
    setting.check(placed)


def test_a_model_that_holds_something_else_is_refused(setting: Setting) -> None:
    setting.model.qk.data.copy_(setting.model.qk.data.flip(0))
    with pytest.raises(LayoutError, match="do not stand where vLLM loaded them, 'k'"):
        setting.placed()


def test_a_loader_that_gives_something_else_each_time_is_refused(tmp_path: Path) -> None:
    """A layout that was changed after loading: the loader still takes the tensor, and would break it."""

    class Rescaled(Model):
        def transformed(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor * 2

    setting = Setting(tmp_path, Rescaled())
    setting.model.scale.data *= 2
    before = setting.held()
    with pytest.raises(LayoutError, match="changes 'scale'"):
        setting.placed()
    assert setting.held() == before


def test_a_model_of_another_dtype_is_refused(tmp_path: Path) -> None:
    setting = Setting(tmp_path, Model().bfloat16())
    with pytest.raises(LayoutError, match="the checkpoint's own dtype"):
        setting.placed()


def test_tied_names_that_differ_are_refused(setting: Setting) -> None:
    placed = setting.placed()
    before = setting.held()
    setting.weights["head"] += 1
    setting.publish()
    setting.copy.follow(setting.store, None)
    with pytest.raises(LayoutError, match="tied"):
        placed.write(setting.copy)
    assert setting.held() == before


def test_a_parameter_that_was_replaced_is_noticed(setting: Setting) -> None:
    placed = setting.placed()
    setting.step(1)
    setting.model.qk = torch.nn.Parameter(setting.model.qk.data.clone(), requires_grad=False)
    with pytest.raises(LayoutError, match="'qk' was replaced"):
        placed.write(setting.copy)


def test_a_replica_that_something_else_changed_is_noticed(tmp_path: Path) -> None:
    """What several workers hold counts once in the fingerprint, which said nothing of the others' bits."""
    settings, shared = [], Shared(2)
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        settings.append(Setting(tmp_path / str(rank)))
    placed: list[Any] = [None, None]

    def place(rank: int) -> None:
        one = settings[rank]
        placed[rank] = PlacedWeights(one.model, one.source, ThreadWorkers(rank, shared))

    threads = [threading.Thread(target=place, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    settings[1].model.qk.data[5, 1] += 1
    for rank, live in enumerate(placed):
        if rank == 0:
            live.fingerprint(settings[rank].copy)
            continue
        with pytest.raises(VerifyError, match="'q': this worker's own copy of it, in 'qk'"):
            live.fingerprint(settings[rank].copy)
        live.write(settings[rank].copy, everything=True)
        live.fingerprint(settings[rank].copy)
