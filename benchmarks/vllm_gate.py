"""What the gate sees in BF16 on a real vLLM: right updates and faults against the limits of the first version.

Runs in the environment of `make vllm-env`: .venvs/vllm/bin/python benchmarks/vllm_gate.py [RESULT.json]

A tiny Qwen3 with random weights in BF16, scored by transformers and by a vLLM whose linear layers compute
with the very parameter, so that faults can be put into it. Steps come in two sizes: `large` changes 2 % of
all elements by 0.3 in the mean, `small` changes 1 % of them by one unit in the last place, as most changes of
a training step are. Faults are put in one by one and taken back; every one is tried in several places.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [
    str(Path(__file__).resolve().parent.parent / part) for part in ("tests", "benchmarks")
]

from machine import machine  # noqa: E402

import syncline  # noqa: E402
from syncline.gate import Committed, Gate, draw_probes, make_reference  # noqa: E402
from syncline.scorers import TorchScorer, VllmOfflineScorer  # noqa: E402
from syncline.vllm.commit import CommitOptions, bring  # noqa: E402
from syncline.vllm.control import OfflineControl  # noqa: E402
from vllm_engines import engine, model_of, plain_kernels  # noqa: E402
from vllm_models import VOCAB, write_checkpoint  # noqa: E402
from vllm_trainer import Trainer  # noqa: E402

FIGURES = ("max_difference", "mean_difference", "kl")
RIGHT, TRIES = 20, 6
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
GATE_UP, DOWN, QKV = (
    f"model.layers.1.{name}.weight"
    for name in ("mlp.gate_up_proj", "mlp.down_proj", "self_attn.qkv_proj")
)
FLIPPED = (EMBEDDING, GATE_UP, DOWN, NORM)
WHOLE = (EMBEDDING, GATE_UP, DOWN, QKV, NORM, HEAD)


class Small(Trainer):
    """Changes by one unit in the last place."""

    def _changed(self, tensor: Any, share: float) -> Any:
        import torch

        later = tensor.clone()
        flat = later.view(-1).view(torch.int16)
        count = max(1, int(flat.numel() * share))
        flat[torch.from_numpy(self._rng.choice(flat.numel(), count, replace=False))] ^= 1
        return later


class Judged:
    """A vLLM, the trainer that it follows, and a gate with the limits of their first version."""

    def __init__(self, llm: Any, trainer: Trainer, share: float) -> None:
        self.llm, self.trainer, self.share = llm, trainer, share
        self.control = OfflineControl(llm)
        self.live = dict(model_of(llm).named_parameters())
        self.probes = draw_probes(VOCAB, scorer=self.ours())
        self.store = syncline.open_store(trainer.store)
        # Another run of the same model is begun with a repair.
        bring(self.control, trainer.store, trainer.version, CommitOptions(), repair=True)
        self.begin()

    def begin(self) -> None:
        """Learn limits from what the engine holds now."""
        self.gate = Gate(VllmOfflineScorer(self.llm), self.store, wait_s=0)
        self.first = self.judge()
        if self.first.verdict != "learned":
            raise RuntimeError(f"no limits were learned: {self.first}")

    def ours(self) -> TorchScorer:
        import transformers

        return TorchScorer(transformers.AutoModelForCausalLM.from_pretrained(self.trainer.path))

    def sync(self) -> None:
        bring(self.control, self.trainer.store, self.trainer.version, CommitOptions())

    def judge(self) -> Any:
        """Hold what the engine computes now against the trainer's newest version."""
        version = self.trainer.version
        digest = f"{version:064x}"
        self.llm.reset_prefix_cache()
        reference = make_reference(version, digest, self.ours(), self.probes)
        return self.gate.check(Committed(version, digest, is_proven=True), reference=reference)

    def size(self) -> float:
        """The root mean square of all weights but norms, which are near 1."""
        kept = [t.float() for n, t in self.trainer.weights.items() if not n.endswith("norm.weight")]
        return float(
            (sum(float((t * t).sum()) for t in kept) / sum(t.numel() for t in kept)) ** 0.5
        )

    def right(self) -> Iterator[Any]:
        for _ in range(RIGHT):
            self.trainer.step(self.share)
            self.sync()
            yield self.judge()

    def missed(self, count: int) -> Iterator[Any]:
        """The engine is so many versions behind what it is taken for."""
        for _ in range(TRIES):
            for _ in range(count):
                self.trainer.step(self.share)
            yield self.judge()
            self.sync()

    def stale(self, names: tuple[str, ...], count: int) -> Iterator[Any]:
        """One tensor stayed so many versions behind."""
        for name in names:
            old = self.live[name].data.clone()
            for _ in range(count):
                self.trainer.step(self.share)
            self.sync()
            with self.instead(name, lambda bits, old=old: bits.copy_(old)):
                yield self.judge()

    def flipped(self, names: tuple[str, ...], bit: int) -> Iterator[Any]:
        """One bit of one element of a tensor; of the embedding, in a row that the probes have."""
        import torch

        rng = np.random.default_rng(0)
        for name in names:
            for _ in range(TRIES):
                shape = self.live[name].shape
                place = [int(rng.integers(length)) for length in shape]
                if name == EMBEDDING:
                    place[0] = self.probes[0].prompt[0]

                def flip(data: Any, place: tuple[int, ...] = tuple(place)) -> None:
                    data.view(torch.int16)[place] ^= 1 << bit

                with self.instead(name, flip):
                    yield self.judge()

    def swapped(self, names: tuple[str, ...]) -> Iterator[Any]:
        """Two rows of a tensor in each other's place; of the embedding, one that the probes have."""
        rng = np.random.default_rng(0)
        for name in names:
            for _ in range(TRIES):
                pair = rng.choice(len(self.live[name]), 2, replace=False).tolist()
                if name == EMBEDDING:
                    pair[0] = self.probes[0].prompt[0]

                def swap(data: Any, pair: list[int] = pair) -> None:
                    data[pair] = data[pair[::-1]].clone()

                with self.instead(name, swap):
                    yield self.judge()

    @contextmanager
    def instead(self, name: str, change: Callable[[Any], object]) -> Iterator[None]:
        data = self.live[name].data
        kept = data.clone()
        change(data)
        try:
            yield
        finally:
            data.copy_(kept)


def told(reports: Iterator[Any]) -> dict[str, Any]:
    """Return how many were flagged, and least, middle and greatest of each figure."""
    found = list(reports)
    rows = [[getattr(report.deviation, name) for report in found] for name in FIGURES]
    return {
        "tried": len(found),
        "flagged": sum(report.verdict == "flagged" for report in found),
        "not finite": sum(report.deviation.not_finite > 0 for report in found),
        **{
            name: [round(float(value), 6) for value in (min(row), np.median(row), max(row))]
            for name, row in zip(FIGURES, rows, strict=True)
        },
    }


def learned(report: Any) -> dict[str, Any]:
    return {
        "first version": {name: round(getattr(report.deviation, name), 6) for name in FIGURES},
        "limits": {name: round(value, 6) for name, value in asdict(report.limits).items()},
        "scored tokens": report.deviation.positions,
    }


def measure(judged: Judged) -> dict[str, Any]:
    begun, size, version = learned(judged.first), judged.size(), judged.trainer.version
    found = {
        "right updates": told(judged.right()),
        "bit 14 (exponent) flipped": told(judged.flipped(FLIPPED, 14)),
        "bit 10 (exponent) flipped": told(judged.flipped(FLIPPED, 10)),
        "bit 0 flipped": told(judged.flipped(FLIPPED, 0)),
        "two rows swapped": told(judged.swapped((EMBEDDING, GATE_UP, DOWN, QKV, HEAD))),
        "one tensor one version behind": told(judged.stale(WHOLE, 1)),
        "one tensor ten versions behind": told(judged.stale(WHOLE, 10)),
        "one delta missed": told(judged.missed(1)),
        "ten deltas missed": told(judged.missed(10)),
        "right updates after all these": told(judged.right()),
    }
    steps, growth = judged.trainer.version - version, judged.size() / size
    judged.begin()
    return {
        **begun,
        "least, middle and greatest": found,
        "versions until here": steps,
        "weights are so many times as large": round(growth, 3),
        "limits learned anew": learned(judged.first),
        "right updates then": told(judged.right()),
    }


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="syncline-vllm-gate-") as directory:
        base = Path(directory) / "base"
        write_checkpoint("qwen3", base, dtype="bfloat16")
        steps = {"large": (Trainer, 0.02), "small": (Small, 0.01)}
        with plain_kernels(), engine(base, dtype="bfloat16") as llm:
            result = machine("vllm")
            for name, (kind, share) in steps.items():
                work = Path(directory) / name
                work.mkdir()
                result[f"{name} steps"] = measure(Judged(llm, kind(base, work), share))
    text = json.dumps(result, indent=2)
    print(text)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text + "\n")


if __name__ == "__main__":
    main()
