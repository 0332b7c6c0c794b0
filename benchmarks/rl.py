"""The demo's RL loop without a store: what is served is whatever the caller puts into the engine's model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from syncline.demo.arithmetic import LINE_END, SUMS, Problem, problems, reward
from syncline.demo.config import DemoConfig
from syncline.demo.engine import TransformersEngine
from syncline.demo.models import load_model, load_tokenizer
from syncline.demo.rollout import RolloutRequest
from syncline.demo.trainer import Experience, Trainer

SEED_STRIDE = 1_000_003


class Rl:
    """A trainer with FP32 arithmetic and masters anywhere in their cells, and an engine.

    Args:
        base: checkpoint directory of both.
        scratch: an empty directory; nothing is written to it.
    """

    def __init__(self, config: DemoConfig, base: Path, scratch: Path) -> None:
        self._config = config
        self.tokenizer = load_tokenizer(base)
        self.engine = TransformersEngine(base, str(scratch))
        self.trainer = Trainer(
            base,
            learning_rate=config.rate,
            pad=self.tokenizer.pad_token_id,
            dtype=torch.float32,
        )
        self.trainer.spread_masters(config.seed)

    def step(self, number: int) -> float:
        """Generate with the engine, train on it; return the mean reward."""
        asked = problems(self._config.prompts, seed=self._config.seed, step=number)
        request = RolloutRequest(
            prompts=[self.tokenizer.encode(problem.prompt) for problem in asked],
            samples=self._config.samples,
            max_new_tokens=self._config.max_new_tokens,
            stop=LINE_END,
            seed=self._config.seed * SEED_STRIDE + number,
        )
        completions = self.engine.rollout(request)
        rewards = [
            [reward(problem, text) for text in self.tokenizer.batch_decode(group, skip_special_tokens=True)]
            for problem, group in zip(asked, completions, strict=True)
        ]  # fmt: skip
        self.trainer.step(Experience(request.prompts, completions, rewards))
        flat = [one for group in rewards for one in group]
        return sum(flat) / len(flat)

    def weights(self) -> Tensor:
        """Return all BF16 weights of the trainer, flat, copied."""
        return torch.cat([tensor.reshape(-1) for _, tensor in self.trainer.weights()])

    def masters(self) -> Tensor:
        """Return all FP32 masters, flat, copied, in the order of `weights`."""
        return torch.cat([master.reshape(-1) for master in self.trainer._master])  # noqa: SLF001

    def serve(self, weights: Tensor) -> None:
        """Put flat weights into the engine's model."""
        put(self.engine.model, weights)


class Judge:
    """Says what weights make of all sums, with no sampling: in FP32, by probability.

    Args:
        base: checkpoint directory.
    """

    def __init__(self, base: Path) -> None:
        self._model = load_model(base, torch.float32)
        tokenizer = load_tokenizer(base)
        asked = [Problem(a, b) for a, b in SUMS]
        prompts = [tokenizer.encode(one.prompt) for one in asked]
        answers = [tokenizer.encode(one.answer + LINE_END) for one in asked]
        width = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
        self._rows = torch.full((len(asked), width), tokenizer.pad_token_id)
        self._is_answer = torch.zeros((len(asked), width), dtype=torch.bool)
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            self._rows[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
            self._is_answer[row, len(prompt) : len(prompt) + len(answer)] = True

    def logits(self, weights: Tensor) -> Tensor:
        """Return (sums, tokens - 1, vocabulary) FP32 logits, of the token after each."""
        put(self._model, weights)
        with torch.inference_mode():
            out: Tensor = self._model(input_ids=self._rows).logits[:, :-1]
        return out

    def reward(self, logits: Tensor) -> float:
        """Return the mean probability of writing the answer and ending the line."""
        taken = logits.log_softmax(-1).gather(2, self._rows[:, 1:, None]).squeeze(2)
        return float((taken * self._is_answer[:, 1:]).sum(1).exp().mean())

    def divergence(self, exact: Tensor, found: Tensor) -> tuple[float, float]:
        """Return mean KL(exact || found) over the answers' tokens, and the largest logit difference."""
        p, q = (logits.double().log_softmax(-1) for logits in (exact, found))
        divergence = (p.exp() * (p - q)).sum(-1)[self._is_answer[:, 1:]]
        return float(divergence.mean()), float((exact - found)[self._is_answer[:, 1:]].abs().max())


def put(model: Any, weights: Tensor) -> None:
    """Overwrite the model's parameters with flat weights, in their order."""
    with torch.no_grad():
        for parameter, piece in zip(parameters(model), split(model, weights), strict=True):
            parameter.copy_(piece)


def split(model: Any, weights: Tensor) -> Iterator[Tensor]:
    """Yield the pieces of flat weights, in the shapes of the model's parameters."""
    at = 0
    for parameter in parameters(model):
        yield weights[at : at + parameter.numel()].view(parameter.shape)
        at += parameter.numel()


def parameters(model: Any) -> list[Tensor]:
    """Return the model's parameters, tied ones once."""
    return [parameter for _, parameter in model.named_parameters()]
