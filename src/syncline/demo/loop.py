"""One step of the demo: roll out, reward, train, publish, sync.

The trainer is this process, the engine another. Prompts and completions travel over a pipe; weights
travel only through the store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from syncline.demo.arithmetic import LINE_END, problems, reward
from syncline.demo.base import Base
from syncline.demo.config import BaseReport, DemoConfig, StepReport
from syncline.demo.identity import sha256_by_name
from syncline.demo.models import load_tokenizer
from syncline.demo.rollout import RolloutEngine, RolloutRequest, Synced
from syncline.demo.trainer import Experience, Trainer, compute_dtype
from syncline.errors import BaseVersionError
from syncline.stores import open_store
from syncline.sync import Publisher, PublishReport

SEED_STRIDE = 1_000_003
"""Keeps the sampling seeds of runs with different seeds apart."""
BF16_BYTES = 2


class Loop:
    """A trainer, a publisher and an engine at one store.

    Args:
        config: sizes, rate, seed, encoding.
        base: checkpoint directory that the engine has loaded; it becomes version 1.
        store: path or URL of an empty store, which the engine follows.
        engine: what generates.

    Attributes:
        trainer: what learns.
    """

    def __init__(self, config: DemoConfig, base: Path, store: str, engine: RolloutEngine) -> None:
        self._config = config
        self._engine = engine
        self._publisher = Publisher(
            open_store(store), base=base, encoding=config.encoding, anchor_every=None
        )
        self._tokenizer = load_tokenizer(base)
        self._dtype = compute_dtype()
        self.trainer = Trainer(
            base, learning_rate=config.rate, pad=self._tokenizer.pad_token_id, dtype=self._dtype
        )
        self._engine.sync()

    def base_report(self, written: Base, setup_s: float) -> BaseReport:
        """Describe the checkpoint that the run starts from."""
        counts = [tensor.numel() for _, tensor in self.trainer.weights()]
        return BaseReport(
            model=written.model,
            parameters=sum(counts),
            tensors=len(counts),
            vocabulary=written.vocabulary,
            vocabulary_before=written.vocabulary_before,
            is_dithered=written.is_dithered,
            compute_dtype=str(self._dtype).removeprefix("torch."),
            full_bytes=BF16_BYTES * sum(counts),
            setup_s=setup_s,
        )

    def step(self, number: int, phase: Callable[[str], None]) -> StepReport:
        """Go round once and say what happened and what each part took.

        Raises:
            BaseVersionError: the engine is not at the version that was just published.
        """
        start_s = time.perf_counter()
        phase(f"step {number}: the engine generates")
        experience, sample = self._roll_out(number)
        rolled_out_s = time.perf_counter()
        phase(f"step {number}: the trainer learns")
        self.trainer.step(experience)
        trained_s = time.perf_counter()
        phase(f"step {number}: publish and sync")
        published = self._publisher.publish(self.trainer.weights())
        synced = self._engine.sync()
        check_version(published, synced)
        return report(
            number,
            experience,
            published,
            synced,
            rollout_s=rolled_out_s - start_s,
            train_s=trained_s - rolled_out_s,
            step_s=time.perf_counter() - start_s,
            sample=sample,
        )

    def digests(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return the SHA-256 of every tensor in the trainer, and in the engine."""
        held = self._engine.digests()
        unsigned = self._engine.unsigned_zeros
        ours = (
            (name, tensor + 0.0 if name in unsigned else tensor)
            for name, tensor in self.trainer.weights()
        )
        return sha256_by_name(ours), held

    def _roll_out(self, number: int) -> tuple[Experience, str]:
        """Return the engine's completions and their rewards, and one of them as text."""
        asked = problems(self._config.prompts, seed=self._config.seed, step=number)
        request = RolloutRequest(
            prompts=[self._tokenizer.encode(problem.prompt) for problem in asked],
            samples=self._config.samples,
            max_new_tokens=self._config.max_new_tokens,
            stop=LINE_END,
            seed=self._config.seed * SEED_STRIDE + number,
        )
        completions = self._engine.rollout(request)
        texts = [
            self._tokenizer.batch_decode(group, skip_special_tokens=True) for group in completions
        ]
        rewards = [
            [reward(problem, text) for text in group]
            for problem, group in zip(asked, texts, strict=True)
        ]
        return Experience(request.prompts, completions, rewards), asked[0].prompt + texts[0][0]


def check_version(published: PublishReport, synced: Synced) -> None:
    """Check that the engine is at the version that was published last.

    Raises:
        BaseVersionError: it is at another.
    """
    if synced.version != published.version:
        raise BaseVersionError(
            f"expected the engine to be at version {published.version}, which was just published, "
            f"found it at {synced.version}; is something else writing to this store?",
            version=published.version,
        )


def report(
    number: int,
    experience: Experience,
    published: PublishReport,
    synced: Synced,
    *,
    rollout_s: float,
    train_s: float,
    step_s: float,
    sample: str,
) -> StepReport:
    """Sum up a step."""
    rewards = [one for group in experience.rewards for one in group]
    sent, taken = published.seconds, synced.seconds
    return StepReport(
        step=number,
        version=published.version,
        reward=sum(rewards) / len(rewards),
        changed=published.changed,
        total=published.total,
        payload_bytes=published.payload_bytes,
        full_bytes=published.full_bytes,
        rollout_s=rollout_s,
        train_s=train_s,
        diff_s=seconds_of(sent, "diff"),
        encode_s=seconds_of(sent, "encode"),
        publish_s=seconds_of(sent, "put", "commit"),
        pull_s=seconds_of(taken, "plan", "fetch", "decode"),
        apply_s=seconds_of(taken, "apply"),
        verify_s=seconds_of(taken, "verify"),
        step_s=step_s,
        sample=sample,
    )


def seconds_of(phases: Mapping[str, float], *names: str) -> float:
    """Return the seconds of the named phases together; one that did not occur took none.

    Example:
        >>> seconds_of({"put": 0.5, "commit": 0.25, "diff": 1.0}, "put", "commit", "fetch")
        0.75
    """
    return sum(phases.get(name, 0.0) for name in names)
