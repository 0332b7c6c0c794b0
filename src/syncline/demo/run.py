"""The demo's loop: roll out, reward, train, publish, sync; then the proof.

The trainer is this process, the engine another. Prompts and completions travel over a pipe; weights
travel only through the store.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from syncline.demo.arithmetic import LINE_END, problems, reward
from syncline.demo.base import Base, write_base
from syncline.demo.config import BaseReport, DemoConfig, DemoResult, StepReport
from syncline.demo.display import Display, JsonDisplay, TableDisplay
from syncline.demo.identity import differences, sha256_by_name
from syncline.demo.models import load_tokenizer
from syncline.demo.picture import draw
from syncline.demo.rollout import EngineProcess, RolloutEngine, RolloutRequest, Synced
from syncline.demo.trainer import Experience, Trainer, faster_dtype
from syncline.errors import ConfigError, VerifyError
from syncline.sources import CheckpointSource
from syncline.stores import open_store
from syncline.sync import Publisher, PublishReport

PICTURE = "syncline-demo.png"

StartEngine = Callable[[Path, str, Path], RolloutEngine]
"""Starts an engine for a checkpoint directory and a store; the last argument is a log file."""


def start_process(base: Path, store: str, log: Path) -> RolloutEngine:
    """Start the transformers engine in a process of its own; it loads while this one goes on."""
    command = [sys.executable, "-m", "syncline.demo.engine", str(base), store]
    return EngineProcess(command, log=log)


def run(config: DemoConfig, start_engine: StartEngine = start_process) -> DemoResult:
    """Train, keep the engine in step through the store, and prove that it is bit-identical.

    Prints a table, or JSON lines, on standard output, and draws a picture.

    Raises:
        VerifyError: at the end some tensor in the engine process differs; all are named, after
            the result has been printed.
        ConfigError: `out` is not new or empty, or a package or the model is missing.
        PeerLostError, TransportTimeoutError: the engine process died, or does not answer.
    """
    display = _display(config)
    with display.live(), working_directory(config.out) as work:
        result = _run(config, work, start_engine, display)
        display.result(result)
    if not result.bit_identical:
        names = ", ".join(result.differences)
        raise VerifyError(
            f"expected every tensor of the engine to be bit-identical to the trainer's, found "
            f"{len(result.differences)} of {result.tensors} that are not: {names}"
        )
    return result


@contextmanager
def working_directory(out: Path | None) -> Iterator[Path]:
    """Yield `out`, made if need be, or a temporary directory that is removed afterwards.

    Raises:
        ConfigError: `out` holds something already.
    """
    if out is None:
        with tempfile.TemporaryDirectory(prefix="syncline-demo-") as temporary:
            yield Path(temporary)
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            f"{out}: expected a new or empty directory for the demo's files; choose another one"
        )
    out.mkdir(parents=True, exist_ok=True)
    yield out


def _display(config: DemoConfig) -> Display:
    if config.json:
        return JsonDisplay(_write_line)
    from rich.console import Console

    return TableDisplay(Console())


def _write_line(line: str) -> None:
    sys.stdout.write(line)
    sys.stdout.flush()


def _run(config: DemoConfig, work: Path, start_engine: StartEngine, display: Display) -> DemoResult:
    start_s = time.perf_counter()
    base_path, store = work / "base", str(work / "run")
    base = write_base(config, base_path, display.phase)
    display.phase("publishing the base as version 1")
    publisher = Publisher(
        open_store(store), base=base_path, encoding=config.encoding, anchor_every=None
    )
    with start_engine(base_path, store, work / "engine.log") as engine:
        display.phase("loading the model in two processes")
        tokenizer = load_tokenizer(base_path)
        dtype = faster_dtype()
        trainer = Trainer(
            base_path, learning_rate=config.rate, pad=tokenizer.pad_token_id, dtype=dtype
        )
        engine.wait_until_ready()
        engine.sync()
        setup_s = time.perf_counter() - start_s
        report = _base_report(base, base_path, str(dtype).removeprefix("torch."), setup_s)
        display.base(report)
        loop = _Loop(config, tokenizer, trainer, publisher, engine, display)
        steps = []
        for number in range(1, config.steps + 1):
            steps.append(loop.step(number))
            display.step(steps[-1])
        display.phase("comparing every tensor of the two processes")
        wanted = sha256_by_name(trainer.weights())
        found = differences(wanted, engine.digests())
    picture = Path(PICTURE) if config.out is None else config.out / PICTURE
    draw(report, steps, picture)
    return DemoResult(
        bit_identical=not found,
        differences=found,
        tensors=len(wanted),
        base=report,
        steps=tuple(steps),
        picture=picture,
        out=config.out,
        total_s=time.perf_counter() - start_s,
    )


class _Loop:
    """One step after the other: roll out, reward, train, publish, sync."""

    def __init__(
        self,
        config: DemoConfig,
        tokenizer: Any,
        trainer: Trainer,
        publisher: Publisher,
        engine: RolloutEngine,
        display: Display,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._trainer = trainer
        self._publisher = publisher
        self._engine = engine
        self._display = display

    def step(self, number: int) -> StepReport:
        start_s = time.perf_counter()
        self._display.phase(f"step {number}: rollout")
        experience, sample = self._rollout(number)
        rolled_s = time.perf_counter()
        self._display.phase(f"step {number}: training")
        self._trainer.step(experience)
        trained_s = time.perf_counter()
        self._display.phase(f"step {number}: publish and sync")
        published = self._publisher.publish(self._trainer.weights())
        synced = self._engine.sync()
        if synced.version != published.version:
            raise VerifyError(
                f"step {number}: expected the engine at version {published.version}, found "
                f"{synced.version}",
                version=published.version,
            )
        rewards = [one for group in experience.rewards for one in group]
        return StepReport(
            step=number,
            reward=sum(rewards) / len(rewards),
            rollout_s=rolled_s - start_s,
            train_s=trained_s - rolled_s,
            step_s=time.perf_counter() - start_s,
            sample=sample,
            **_sync_figures(published, synced),
        )

    def _rollout(self, number: int) -> tuple[Experience, str]:
        config = self._config
        asked = problems(config.prompts, seed=config.seed, step=number)
        prompts = [self._tokenizer(problem.prompt)["input_ids"] for problem in asked]
        completions = self._engine.rollout(
            RolloutRequest(
                prompts=prompts,
                samples=config.samples,
                max_new_tokens=config.max_new_tokens,
                stop=LINE_END,
                seed=config.seed + number,
            )
        )
        texts = [[self._tokenizer.decode(one) for one in group] for group in completions]
        rewards = [
            [reward(problem, text) for text in group]
            for problem, group in zip(asked, texts, strict=True)
        ]
        return Experience(prompts, completions, rewards), asked[0].prompt + texts[0][0]


def _sync_figures(published: PublishReport, synced: Synced) -> dict[str, Any]:
    out, back = published.seconds, synced.seconds
    verify_s = back.get("verify", 0.0)
    return {
        "version": published.version,
        "changed": published.changed,
        "total": published.total,
        "payload_bytes": published.payload_bytes,
        "full_bytes": published.full_bytes,
        "diff_s": out.get("diff", 0.0),
        "encode_s": out.get("encode", 0.0),
        "publish_s": out.get("put", 0.0) + out.get("commit", 0.0),
        "pull_s": sum(back.get(name, 0.0) for name in ("plan", "fetch", "decode")),
        "apply_s": back.get("apply", 0.0),
        "verify_s": verify_s,
        "pause_s": back.get("apply", 0.0) + verify_s,
    }


def _base_report(base: Base, path: Path, dtype: str, setup_s: float) -> BaseReport:
    metas = CheckpointSource(path).metas().values()
    return BaseReport(
        model=base.model,
        parameters=sum(meta.count for meta in metas),
        tensors=len(metas),
        vocabulary=base.vocabulary,
        vocabulary_before=base.vocabulary_before,
        dithered=base.is_dithered,
        compute_dtype=dtype,
        full_bytes=sum(meta.nbytes for meta in metas),
        setup_s=setup_s,
    )
