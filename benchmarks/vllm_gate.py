"""How far do trainer and engine differ by rounding alone? What the gate's margins are for.

Runs in the environment of `make vllm-env`: .venvs/vllm/bin/python benchmarks/vllm_gate.py [RESULT.json]

The demo's Gemma 3 270M (cut vocabulary) in BF16: transformers scores as the trainer, vLLM on this CPU with its default
kernels as the engine, both from one checkpoint, so every difference is rounding. Sets of probes of six seeds, once with
continuations drawn from the model and once with random ones. No clock runs: load of the machine does not matter.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path[:0] = [
    str(Path(__file__).resolve().parent.parent / part) for part in ("tests", "benchmarks")
]

from machine import machine  # noqa: E402

from syncline.demo.gemma import write_gemma  # noqa: E402
from syncline.gate import draw_probes  # noqa: E402
from syncline.gate.deviation import deviation  # noqa: E402
from syncline.scorers import TorchScorer, VllmOfflineScorer  # noqa: E402
from syncline.types import Probe, Scores  # noqa: E402
from vllm_engines import engine  # noqa: E402

SEEDS = range(6)
TOP = 20
FIGURES = ("max_difference", "mean_difference", "kl", "resumed_difference")


Sets = dict[str, list[tuple[Sequence[Probe], Sequence[Scores]]]]


def asked(trainer: TorchScorer) -> Sets:
    """Return the sets of probes with the trainer's scores."""
    found: Sets = {}
    for name, scorer in (("drawn from the model", trainer), ("random", None)):
        every = [draw_probes(trainer.vocabulary, scorer=scorer, seed=seed) for seed in SEEDS]
        found[name] = [(probes, trainer.score(probes, TOP)) for probes in every]
    return found


def measured(sets: Sets, rollout: VllmOfflineScorer) -> dict[str, Any]:
    """Return the least and the greatest of each figure, over the sets."""
    found: dict[str, Any] = {}
    for name, of_name in sets.items():
        deviations = [
            asdict(deviation(probes, scores, rollout.score(probes, TOP)))
            for probes, scores in of_name
        ]
        found[name] = {
            figure: [round(pick(one[figure] for one in deviations), 5) for pick in (min, max)]
            for figure in FIGURES
        }
    return found


def main() -> None:
    import torch
    import transformers

    with tempfile.TemporaryDirectory(prefix="syncline-gate-") as directory:
        path = Path(directory) / "model"
        path.mkdir()
        write_gemma(path, Path(directory), lambda _: None)
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        sets = asked(TorchScorer(model))
        with engine(path, dtype="bfloat16", is_eager=True) as llm:
            result = machine("vllm") | {"nats": measured(sets, VllmOfflineScorer(llm))}
    text = json.dumps(result, indent=2)
    print(text)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text + "\n")


if __name__ == "__main__":
    main()
