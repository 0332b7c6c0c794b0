"""Is an additive or a lossy delta ever worth it? Drift over 1,000 steps, and what it does to logits and reward.

The demo's tiny model learns sums by RL, from masters anywhere in their rounding cell. In the first runs the
engine that generates is exact, and every other scheme follows beside it; in the others the engine that
generates is the scheme's own, so that the trainer learns from what drifted weights write. Logits and rewards
are those of all 81 sums, by probability, without sampling.

python benchmarks/lossy_deltas.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lossy_schemes import SCHEMES, Step, ulps
from machine import machine
from rl import Judge, Rl
from torch import Tensor

from syncline.demo.config import DemoConfig
from syncline.demo.tiny import write_tiny

EXACT = next(iter(SCHEMES))


def run(
    base: Path, config: DemoConfig, leader: str, followers: list[str], every: int
) -> dict[str, Any]:
    """Train for `config.steps` steps with `leader`'s weights in the engine; return what was found.

    Args:
        followers: the schemes to follow, the leader among them.
        every: steps from one judgement to the next.
    """
    with tempfile.TemporaryDirectory() as scratch:
        rl = Rl(config, base, Path(scratch))
    judge = Judge(base)
    start, before, master_before = rl.weights(), rl.weights(), rl.masters()
    held = dict.fromkeys(followers, before)
    sent = dict.fromkeys(followers, 0)
    rewards, judged, changed = [], [], 0
    begun_s = time.perf_counter()
    for number in range(1, config.steps + 1):
        rewards.append(rl.step(number))
        after, master_after = rl.weights(), rl.masters()
        changed += int((after.view(torch.int16) != before.view(torch.int16)).sum())
        for name in followers:
            step = Step(held[name], before, after, master_before, master_after)
            held[name], size_bytes = SCHEMES[name](step)
            sent[name] += size_bytes
        rl.serve(held[leader])
        before, master_before = after, master_after
        if number % every == 0:
            found = {name: judgement(judge, start, after, held[name]) for name in followers}
            judged.append({"step": number, "schemes": found})
    return {
        "leader": leader,
        "seed": config.seed,
        "rate": config.rate,
        "steps": config.steps,
        "elements": start.numel(),
        "density": changed / config.steps / start.numel(),
        "seconds": time.perf_counter() - begun_s,
        "reward_at_start": judge.reward(judge.logits(start)),
        "reward_of_last_100_steps": statistics.fmean(rewards[-100:]),
        "sent_bytes": sent,
        "judged": judged,
    }


def judgement(judge: Judge, start: Tensor, exact: Tensor, held: Tensor) -> dict[str, float]:
    """Return how far `held` is from `exact`, in bits, in weights, in logits and in reward."""
    distances = ulps(exact, held)
    moved = (exact.float() - start.float()).norm()
    logits, drifted = judge.logits(exact), judge.logits(held)
    divergence, largest = judge.divergence(logits, drifted)
    return {
        "differing": float((exact.view(torch.int16) != held.view(torch.int16)).float().mean()),
        "largest_ulps": int(distances.max()),
        "drift": float((exact.float() - held.float()).norm() / moved),
        "kl": divergence,
        "largest_logit": largest,
        "reward": judge.reward(drifted),
        "exact_reward": judge.reward(logits),
    }


def rows(found: dict[str, Any]) -> str:
    """Return what is printed about one run."""
    last = found["judged"][-1]["schemes"]
    lines = [
        (
            f"lr {found['rate']:g}, seed {found['seed']}, generating: {found['leader']}; "
            f"{found['density']:.3%} of {found['elements']:,} change a step; expected reward "
            f"{found['reward_at_start']:.3f} at the start; {found['seconds']:.0f} s"
        )
    ]
    for name, one in last.items():
        lines.append(
            f"  {name:36} {found['sent_bytes'][name] / found['steps']:9.0f} B a step, "
            f"{one['differing']:8.3%} differ, at most {one['largest_ulps']} ulps, drift "
            f"{one['drift']:.4f}, KL {one['kl']:.2e}, logits {one['largest_logit']:.4f}, reward "
            f"{one['reward']:.4f} (exact {one['exact_reward']:.4f})"
        )
    return "\n".join(lines)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=50, help="steps between judgements")
    parser.add_argument("--rates", type=float, nargs="+", default=(1e-6, 1e-5))
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2))
    parser.add_argument(
        "--closed-loop",
        nargs="+",
        choices=SCHEMES,
        metavar="SCHEME",
        help="let these schemes' engines generate, one run each",
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    measured_on = machine()
    runs = []
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as directory:
            write_tiny(Path(directory), seed)
            for rate in arguments.rates:
                config = DemoConfig(tiny=True, steps=arguments.steps, learning_rate=rate, seed=seed)
                plans = [(EXACT, list(SCHEMES))]
                if arguments.closed_loop is not None:
                    plans = [(name, [name]) for name in arguments.closed_loop]
                for leader, followers in plans:
                    found = run(Path(directory), config, leader, followers, arguments.every)
                    print(rows(found), flush=True)
                    runs.append(found)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**measured_on, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
