"""The trainer: FP32 master weights, AdamW, a GRPO-style loss, and a working copy in BF16.

After every update the working copy is the master rounded to BF16, to nearest even; those bits are what
is published. The master starts on BF16 values, so at first elements of one exponent reach their rounding
boundary together: more of them change around steps 5, 9 and 17 than between. Forward and backward run on exactly these values, in BF16 or, where the processor has no
fast BF16, in FP32 over the same values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncline.demo.identity import live_tensors
from syncline.demo.models import load_model

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BETAS = (0.9, 0.95)
EPSILON = 1e-8
BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})
TINY = 1e-4
"""Keeps the advantage finite where all completions of a prompt earn the same."""


@dataclass(frozen=True, slots=True)
class Experience:
    """Completions of one step and what they earned.

    Attributes:
        prompts: token ids by prompt.
        completions: token ids by prompt and sample; none is empty.
        rewards: by prompt and sample.
    """

    prompts: Sequence[Sequence[int]]
    completions: Sequence[Sequence[Sequence[int]]]
    rewards: Sequence[Sequence[float]]


class Trainer:
    """Trains one causal language model by policy gradient.

    Args:
        base: checkpoint directory to start from.
        learning_rate: of AdamW, constant.
        pad: token id that fills rows.
        dtype: of forward and backward, BF16 or FP32.
    """

    def __init__(self, base: Path, *, learning_rate: float, pad: int, dtype: torch.dtype) -> None:
        import torch

        # The checkpoint is BF16, so widening to FP32 keeps every value.
        self._model = load_model(base, dtype)
        self._pad = pad
        self._working = list(self._model.parameters())
        self._master = [weight.detach().float().clone() for weight in self._working]
        self._optimizer = torch.optim.AdamW(
            self._master, lr=learning_rate, betas=BETAS, eps=EPSILON, weight_decay=0.0, fused=True
        )

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and BF16 bits of every tensor, as the engine must hold them.

        Aliasing: a tensor may be the live one; it is valid until the next `step`.
        """
        import torch

        for name, tensor in live_tensors(self._model).items():
            is_widened = tensor.dtype == torch.float32
            yield name, tensor.to(torch.bfloat16) if is_widened else tensor

    def spread_masters(self, seed: int) -> None:
        """Move every master somewhere into the rounding cell of its weight, as after a long run.

        The working copy stays as it is. Call it before the first `step`.
        """
        import torch

        generator = torch.Generator().manual_seed(seed)
        for master in self._master:
            bits = master.view(torch.int32)
            offsets = torch.randint(-0x7FFF, 0x8000, bits.shape, generator=generator).int()
            # Magnitudes ascend as integers; below 0 there is none.
            bits += torch.where(master == 0, offsets.abs(), offsets)

    def step(self, experience: Experience) -> None:
        """Make one optimiser step on one batch, which the current weights generated."""
        loss: Any = self._loss(experience)
        loss.backward()
        self._update()

    def _loss(self, experience: Experience) -> Tensor:
        """Return minus the mean over tokens of advantage times log-probability.

        There is one update per batch, so the ratio to the generating policy is 1 and its clipping
        never acts: this is the gradient of GRPO's clipped objective without its KL term.
        """
        import torch

        rows, mask, width = self._rows(experience)
        places = (mask.cumsum(1) - 1).clamp(min=0)
        length = rows.shape[1] - width
        logits = self._model(
            input_ids=rows, attention_mask=mask, position_ids=places, logits_to_keep=length + 1
        ).logits[:, :-1]
        taken = rows[:, width:, None]
        log_probabilities = logits.float().log_softmax(-1).gather(2, taken).squeeze(2)
        counted = mask[:, width:].float()
        advantages = group_advantages(torch.tensor(experience.rewards)).flatten()
        loss: Tensor = -(advantages[:, None] * log_probabilities * counted).sum() / counted.sum()
        return loss

    def _rows(self, experience: Experience) -> tuple[Tensor, Tensor, int]:
        """Return token ids and mask, one row a completion, and the width of the prompts.

        Prompts are filled on the left and completions on the right, so all completions begin in
        the same column.
        """
        import torch

        width = max(map(len, experience.prompts))
        length = max(len(one) for group in experience.completions for one in group)
        rows, mask = [], []
        for prompt, group in zip(experience.prompts, experience.completions, strict=True):
            for completion in group:
                before, after = width - len(prompt), length - len(completion)
                rows.append([self._pad] * before + [*prompt, *completion] + [self._pad] * after)
                used = len(prompt) + len(completion)
                mask.append([0] * before + [1] * used + [0] * after)
        return torch.tensor(rows), torch.tensor(mask), width

    def _update(self) -> None:
        """Step the master weights and round them into the working copy."""
        import torch

        for master, weight in zip(self._master, self._working, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        self._optimizer.step()
        with torch.no_grad():
            for master, weight in zip(self._master, self._working, strict=True):
                weight.copy_(master.to(torch.bfloat16))


def group_advantages(rewards: Tensor) -> Tensor:
    """Return (reward - mean of its row) / (standard deviation of its row + `TINY`).

    Args:
        rewards: (prompts, samples), FP32, at least two samples.
    """
    centred = rewards - rewards.mean(1, keepdim=True)
    return centred / (rewards.std(1, keepdim=True) + TINY)


def compute_dtype(cpuinfo: Path = Path("/proc/cpuinfo")) -> torch.dtype:
    """Return BF16 if this processor multiplies BF16 matrices in hardware, else FP32.

    Measured for one step of the default demo on two cores: with AVX512-BF16 1.4 s in BF16 and 3.5 s in
    FP32; held to AVX2, 115 s in BF16.
    """
    import torch

    # Not by a stopwatch: on a busy machine that picks the wrong one, and another one each time.
    flags = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()
    return torch.bfloat16 if flags & BF16_FLAGS else torch.float32
