"""How much, and what, changes between two checkpoints of the demo's RL loop?

Runs the loop of `make demo` once for every learning rate, writes the checkpoints that are 1, 2, 4, 8 and 16
optimizer steps apart to --out (from the start, and again after as many steps as the widest pair: first
syncs are denser), and prints density by kind of tensor and by exponent, steps in ulps, sign flips and
gaps. The model is Gemma 3 270M as in the demo, a directory, or the tiny model; weights derived from
Gemma are subject to the Gemma Terms of Use and have no place in the repository.

python benchmarks/make_pairs.py --out /somewhere/large [--json result.json]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from machine import machine
from pair_statistics import PairStatistics, statistics

from syncline import CheckpointSource
from syncline.demo.base import write_base
from syncline.demo.config import DemoConfig
from syncline.demo.engine import TransformersEngine
from syncline.demo.identity import live_tensors
from syncline.demo.loop import Loop
from syncline.types import Bits

RATES = (3e-7, 1e-6, 1e-5)
APART = (1, 2, 4, 8, 16)
PAIRS = "pairs.json"


def make(config: DemoConfig, apart: Sequence[int], out: Path, *, is_warm: bool) -> dict[str, Any]:
    """Train as `config` says and write the checkpoints to `out`; return the pairs and the rewards.

    The engine runs in this process. What is written is what it holds after each sync.

    Args:
        is_warm: masters start anywhere in the rounding cell of their weight, not on the weight.
    """
    from safetensors.torch import save_file

    warm = max(apart)
    wanted = {0, warm, *apart, *(warm + steps for steps in apart)}
    rewards = []
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=out) as scratch:
        base, store = Path(scratch) / "base", str(Path(scratch) / "store")
        written = write_base(config, base, _say)
        engine = TransformersEngine(base, store)
        loop = Loop(config, base, store, engine)
        if is_warm:
            loop.trainer.spread_masters(config.seed)
        for number in range(max(wanted) + 1):
            if number:
                step = loop.step(number, _ignore)
                rewards.append(step.reward)
                _say(f"lr {config.rate:g} step {number}: reward {step.reward:.3f}, "
                     f"{step.density:.3%} changed, {step.step_s:.1f} s")  # fmt: skip
            if number in wanted:
                directory = out / step_name(number)
                directory.mkdir()
                save_file(live_tensors(engine.model), directory / "model.safetensors")
    pairs = [
        {
            "old": step_name(start),
            "new": step_name(start + steps),
            "steps_apart": steps,
            "is_first": start == 0,
            "is_warm": is_warm,
            "rate": config.rate,
        }
        for start in (0, warm)
        for steps in apart
    ]
    head = {"model": written.model, "rate": config.rate, "is_warm": is_warm}
    return head | {"rewards": rewards, "pairs": pairs}


def step_name(number: int) -> str:
    """Return the directory of the checkpoint after so many steps."""
    return f"step-{number:03}"


def tensors_of(old: Path, new: Path) -> Iterator[tuple[str, Bits, Bits]]:
    """Yield name, bits before and bits after of every tensor of two checkpoints."""
    after = CheckpointSource(new)
    for meta, bits in CheckpointSource(old).tensors():
        yield meta.name, bits, after.bits(meta.name)


def describe(pair: dict[str, Any], found: PairStatistics) -> str:
    """Return the lines that are printed about one pair."""
    when = ("from the start" if pair["is_first"] else "later") + ", warm" * pair["is_warm"]
    total = max(found.changed, 1)
    steps = ", ".join(f"{size} {count / total:.2%}" for size, count in sorted(found.steps.items()))
    kinds = ", ".join(
        f"{kind} {moved / count:.2%}" for kind, (count, moved) in sorted(found.by_kind.items())
    )
    exponents = ", ".join(
        f"{exponent} {moved / count:.3%}"
        for exponent, (count, moved) in sorted(found.by_exponent.items())
        if count >= 1000
    )
    return (
        f"lr {pair['rate']:g}, {pair['steps_apart']} steps apart, {when}: {found.density:.3%} of "
        f"{found.elements:,} changed\n  by kind: {kinds}\n  by exponent: {exponents}\n"
        f"  ulps: {steps}; sign flips {found.sign_flips:,}, low byte only "
        f"{found.low_byte_only / total:.2%}, high byte only {found.high_byte_only:,}\n"
        f"  gaps above 255 {found.gaps_above[255] / total:.2%}, above 65,535 "
        f"{found.gaps_above[65_535]:,}, largest {found.largest_gap:,}"
    )


def _say(text: str) -> None:
    print(text, flush=True)


def _ignore(_: str) -> None:
    """Keep quiet about the phases of a step."""


def main() -> None:
    """Make the pairs and print what changed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, required=True, help="new directory, not in a repository"
    )
    parser.add_argument("--model", type=Path, help="checkpoint directory in place of Gemma 3 270M")
    parser.add_argument("--tiny", action="store_true", help="the tiny model")
    parser.add_argument(
        "--warm",
        action="store_true",
        help="let FP32 masters start anywhere in their rounding cell, as after a long run",
    )
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--apart", type=int, nargs="+", default=APART)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="of torch; default: torch's own choice")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    measured_on = machine()
    if arguments.threads is not None:
        import torch

        torch.set_num_threads(arguments.threads)
    runs, figures = [], []
    for rate in arguments.rates:
        config = DemoConfig(
            model=arguments.model, tiny=arguments.tiny, learning_rate=rate, seed=arguments.seed
        )
        directory = arguments.out / f"lr-{rate:g}"
        run = make(config, arguments.apart, directory, is_warm=arguments.warm)
        (directory / PAIRS).write_text(json.dumps(run, indent=1))
        runs.append({key: run[key] for key in run if key != "pairs"})
        for pair in run["pairs"]:
            found = statistics(tensors_of(directory / pair["old"], directory / pair["new"]))
            print(describe(pair, found), flush=True)
            figures.append(pair | found.as_json())
    if arguments.json is not None:
        result = {**measured_on, "seed": arguments.seed, "runs": runs, "pairs": figures}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
