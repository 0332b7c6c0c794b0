"""A trainer for engines in tests: random deltas of a checkpoint, published, and as a checkpoint to start from."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

import syncline


class Trainer:
    """Publishes versions of a checkpoint.

    Attributes:
        path: a checkpoint of the current version, always the same directory.
        store: where versions are published.
    """

    def __init__(self, base: Path, directory: Path, seed: int = 0) -> None:
        self.path = directory / "checkpoint"
        self.store = str(directory / "run")
        shutil.copytree(base, self.path)
        self._file = self.path / "model.safetensors"
        self._rng = np.random.default_rng(seed)
        self.weights: dict[str, Any] = load_file(self._file)
        self._publisher = syncline.Publisher(syncline.open_store(self.store))
        self.version = self._publish()

    def step(self, share: float = 0.02, *, only: str = "") -> int:
        """Change a share of every tensor whose name begins so, publish, and return the version."""
        self.weights = {
            name: self._changed(tensor, share) if name.startswith(only) else tensor
            for name, tensor in self.weights.items()
        }
        save_file(self.weights, self._file, metadata={"format": "pt"})
        self.version = self._publish()
        return self.version

    def _publish(self) -> int:
        return self._publisher.publish({n: t.clone() for n, t in self.weights.items()}).version

    def _changed(self, tensor: Any, share: float) -> Any:
        later = tensor.clone()
        flat = later.view(-1)
        count = max(1, int(flat.numel() * share))
        where = torch.from_numpy(self._rng.choice(flat.numel(), count, replace=False))
        noise = torch.from_numpy(self._rng.normal(0, 0.3, count)).to(flat.dtype)
        flat[where] += noise
        return later
