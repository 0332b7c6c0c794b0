"""Ways to keep a receiver's BF16 weights near a trainer's without sending exactly what changed.

A scheme sees flat weights and says what the receiver holds after one step and how many bytes that took. None of
this is in Syncline: it is what `lossy_deltas.py` measures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import rival_layouts
import torch
from torch import Tensor

from syncline import TensorMeta, codecs, kernels
from syncline.format import zstd
from syncline.types import WINDOW_UNITS, Bits, Window

KEPT_SHARE = 0.1
"""Of the changes, in the schemes that send only the largest."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step as a scheme sees it, all flat and of one length.

    Attributes:
        held: BF16 weights of the receiver before.
        before, after: BF16 weights of the trainer.
        master_before, master_after: its FP32 masters.
    """

    held: Tensor
    before: Tensor
    after: Tensor
    master_before: Tensor
    master_after: Tensor


Scheme = Callable[[Step], tuple[Tensor, int]]
"""Returns the BF16 weights of the receiver afterwards, and the bytes sent."""


def exact(step: Step) -> tuple[Tensor, int]:
    """Everything that changed, told from what the receiver holds: `tight`."""
    return _overwritten(step.held, step.after)


def bf16_sum(step: Step) -> tuple[Tensor, int]:
    """The difference of the trainer's weights, rounded to BF16; the receiver adds it and rounds."""
    delta = (step.after.float() - step.before.float()).bfloat16()
    held = (step.held.float() + delta.float()).bfloat16()
    values = bits_of(delta) * (bits_of(delta) != 0x8000)
    return held, rival_layouts.u16_gaps_zstd([(np.zeros_like(values), values)])


def fp32_increments(step: Step) -> tuple[Tensor, int]:
    """The optimizer's FP32 increment of every weight; the receiver adds it to BF16 and rounds."""
    increments = step.master_after - step.master_before
    held = (step.held.float() + increments).bfloat16()
    return held, len(zstd.compress(increments.numpy().tobytes()))


def no_single_ulps(step: Step) -> tuple[Tensor, int]:
    """What moved by more than one ulp in this step; the rest is forgotten."""
    return _chosen(step, ulps(step.before, step.after) > 1)


def no_single_ulps_kept(step: Step) -> tuple[Tensor, int]:
    """What is more than one ulp away from what the receiver holds; the rest waits."""
    return _chosen(step, ulps(step.held, step.after) > 1)


def largest(step: Step) -> tuple[Tensor, int]:
    """The tenth of this step's changes that moved farthest; the rest is forgotten."""
    return _chosen(step, _is_large((step.after.float() - step.before.float()).abs()))


def largest_kept(step: Step) -> tuple[Tensor, int]:
    """As many as that, of what is farthest from what the receiver holds; the rest waits."""
    count = _count_kept(step.after != step.before)
    distances = (step.after.float() - step.held.float()).abs()
    return _chosen(step, _is_large(distances, count))


SCHEMES: Mapping[str, Scheme] = {
    "exact (tight)": exact,
    "BF16 difference, added": bf16_sum,
    "FP32 increments, added and rounded": fp32_increments,
    "one-ulp changes dropped": no_single_ulps,
    "one-ulp changes deferred": no_single_ulps_kept,
    "largest tenth, rest dropped": largest,
    "largest tenth, rest deferred": largest_kept,
}


def bits_of(weights: Tensor) -> Bits:
    """Return BF16 weights as flat uint16 bits. Aliasing: a view."""
    bits: Bits = weights.view(torch.int16).numpy().view(np.uint16)
    return bits


def _chosen(step: Step, is_sent: Tensor) -> tuple[Tensor, int]:
    return _overwritten(step.held, torch.where(is_sent, step.after, step.held))


def _overwritten(held: Tensor, new: Tensor) -> tuple[Tensor, int]:
    """Return the new weights, and the bytes of `tight` for them as one tensor, without headers."""
    old_bits, new_bits = bits_of(held), bits_of(new)
    meta = TensorMeta("all", "BF16", (new_bits.size,))
    windows = []
    for start in range(0, new_bits.size, WINDOW_UNITS):
        at = slice(start, start + WINDOW_UNITS)
        windows.append(Window(start, new_bits[at], *kernels.diff(old_bits[at], new_bits[at])))
    return new.clone(), sum(len(piece) for piece in codecs.get("tight").encode(meta, windows))


def ulps(old: Tensor, new: Tensor) -> Tensor:
    """Return how many representable values apart two BF16 tensors are, across 0 too."""

    def ordered(weights: Tensor) -> Tensor:
        bits = weights.view(torch.int16).int()
        magnitude = bits & 0x7FFF
        return torch.where(bits < 0, -magnitude, magnitude)

    return (ordered(new) - ordered(old)).abs()


def _count_kept(is_changed: Tensor) -> int:
    return max(1, round(KEPT_SHARE * int(is_changed.sum())))


def _is_large(distances: Tensor, count: int | None = None) -> Tensor:
    if count is None:
        count = _count_kept(distances > 0)
    chosen = torch.zeros_like(distances, dtype=torch.bool)
    chosen[distances.topk(count).indices] = True
    return chosen & (distances > 0)
