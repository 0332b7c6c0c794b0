"""A trainer, a store and a double of an SGLang server, with what follows it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

import sglang_tiny as tiny
import syncline
from sglang_fake import FakeSglang, FusedModel
from syncline.engines import CheckpointDir
from syncline.sglang.change import LOADER
from syncline.sglang.commit import CommitOptions
from syncline.sglang.control import SglangHttp
from syncline.sglang.server import SglangServer

QUICK = CommitOptions(step_timeout_s=60.0, load_timeout_s=60.0)


@dataclass
class Scene:
    """A trainer, a store, a server's checkpoint, and the double."""

    root: Path
    fake: FakeSglang
    weights: dict[str, torch.Tensor]
    publisher: syncline.Publisher
    follower: SglangServer

    def train(
        self, rng: np.random.Generator, *, names: tuple[str, ...] = (), share: float = 0.01
    ) -> int:
        """Change some elements and publish; return the version."""
        for name in names or tuple(self.weights):
            flat = self.weights[name].view(torch.int16).view(-1).numpy()
            count = max(1, int(share * flat.size))
            at = rng.choice(flat.size, count, replace=False)
            flat[at] ^= rng.integers(1, 1 << 7, count, dtype=np.int16)
        return int(self.publisher.publish(self.weights).version)

    def another(self, **given: Any) -> SglangServer:
        """Return a follower as after a restart: with nothing but what is on disk, and none before it alive."""
        self.follower.close()
        self.follower = self.beside(**given)
        return self.follower

    def beside(self, **given: Any) -> SglangServer:
        """Return a follower as another process has it, beside the scene's."""
        return SglangServer(
            SglangHttp(self.fake.url),
            syncline.open_store(str(self.root / "run")),
            CheckpointDir(self.root / "model"),
            given.pop("staging", self.root / "staging"),
            **{"options": QUICK, **given},
        )

    def check(self, version: int) -> None:
        """Check that every rank holds the trainer's weights, and that all say so."""
        config = tiny.QWEN3
        for rank, held in enumerate(self.fake.weights()):
            fresh = FusedModel(config, rank, self.fake.ranks)
            fresh.load_weights(self.weights.items())
            wanted = {**dict(fresh.named_parameters()), "derived": fresh.derived}
            assert held.keys() == wanted.keys()
            for name, tensor in wanted.items():
                assert torch.equal(
                    held[name].view(torch.uint8), tensor.detach().view(torch.uint8)
                ), name
        assert set(self.fake.labels.values()) == {str(version)}
        assert not self.fake.is_paused
        assert self.fake.session is None


def build(root: Path, version: str, *, ranks: int = 1, loader: bool = True, **given: Any) -> Scene:
    """Publish version 1, start the double from it, and make its follower."""
    base = tiny.write(root / "base", tiny.QWEN3, seed=1)
    weights = load_file(base / "model.safetensors")
    store = syncline.open_store(str(root / "run"))
    publisher = syncline.Publisher(store)
    publisher.publish(weights)
    checkpoint = CheckpointDir(root / "model")
    syncline.Receiver(store, checkpoint).sync()
    shutil.copy(base / "config.json", root / "model")
    fake = FakeSglang(
        version,
        root / "model",
        ranks=ranks,
        staging=root / "staging",
        loaders=(LOADER,) if loader else (),
        **given,
    )
    follower = SglangServer(
        SglangHttp(fake.url), store, checkpoint, root / "staging", options=QUICK
    )
    return Scene(root, fake, weights, publisher, follower)
