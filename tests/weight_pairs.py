"""Weights before and after an optimizer step, by the arithmetic that makes real ones sparse."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from syncline.types import Bits


def bf16(values: NDArray[np.float32 | np.float64]) -> Bits:
    """Return float32 values rounded to the nearest BF16, ties to even."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return (
        (bits + np.uint64(0x7FFF) + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)
    ).astype(np.uint16)


def optimizer_step(count: int, learning_rate: float, seed: int = 0) -> tuple[Bits, Bits]:
    """Return BF16 weights before and after one AdamW-like step on FP32 masters.

    The masters lie anywhere in the rounding cell of their weight, as after a long run, and the step
    is the learning rate times a normal number of mean size 0.26: what |m / sqrt(v)| comes down to.
    """
    rng = np.random.default_rng(seed)
    weights = bf16(rng.standard_normal(count, np.float32) * np.float32(0.02))
    values = (weights.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    exponents = (weights >> 7 & 0xFF).astype(np.int64)
    cells = np.ldexp(1.0, np.maximum(exponents, 1) - 127 - 7)
    masters = values + (rng.random(count) - 0.5) * 0.999 * cells
    steps = rng.standard_normal(count) * learning_rate * 0.26 * np.sqrt(np.pi / 2)
    return bf16(masters), bf16(masters - steps)
