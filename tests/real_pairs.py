"""Weights before and after RL steps, out of `tests/data/pairs`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from syncline import CheckpointSource
from syncline.types import Bits, TensorMeta

DIRECTORY = Path(__file__).parent / "data" / "pairs"
LATER = ("one_step_later", "eight_steps_later")


def checkpoint(name: str) -> CheckpointSource:
    """Return one of the checkpoints: `old` or one of `LATER`."""
    return CheckpointSource(DIRECTORY / f"{name}.safetensors")


def pair(later: str) -> Iterator[tuple[TensorMeta, Bits, Bits]]:
    """Yield meta, bits before and bits after of every tensor."""
    after = checkpoint(later)
    for meta, bits in checkpoint("old").tensors():
        yield meta, bits, after.bits(meta.name)
