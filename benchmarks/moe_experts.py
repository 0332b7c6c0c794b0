"""How sparse are the changes of a mixture of experts: router, experts by how often they are used, attention?

A Qwen3-MoE of 2 million weights is made from random numbers, taught sums with its load-balancing loss, and then
trained by the demo's RL loop at a small rate, from masters anywhere in their rounding cell. Counted is what changes
from one sync to the next, once syncs are 1 and once 8 steps apart, after a warm-up; and what `tight` makes of it when
experts are stored as in the model (all of a layer in one tensor) and as in a checkpoint (three tensors an expert).

python benchmarks/moe_experts.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import machine
from pair_statistics import kind_of
from payload import Listed, encode
from rival_layouts import exponent_bound_bytes
from rl import Rl
from torch import Tensor

from syncline import TensorMeta
from syncline.demo.config import DemoConfig
from syncline.demo.models import transformers
from syncline.demo.tiny import make_tokenizer, teach
from syncline.types import Bits

EXPERTS, CHOSEN, LAYERS = 16, 2, 4
HIDDEN, EXPERT_WIDTH = 128, 96
EXPERT_ELEMENTS = 3 * HIDDEN * EXPERT_WIDTH
WARM_UP_STEPS = 16
QUARTERS = 4

Weights = dict[str, Tensor]


def write_model(target: Path, seed: int) -> None:
    """Write a BF16 Qwen3-MoE that has been taught sums, with its tokenizer."""
    tokenizer = make_tokenizer()
    config = transformers().Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        moe_intermediate_size=EXPERT_WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        norm_topk_prob=True,
        router_aux_loss_coef=0.1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(seed)
    model = transformers().AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.config.output_router_logits = True
    teach(model, tokenizer)
    model.config.output_router_logits = False
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)


class RoutingCount:
    """Counts which experts the tokens of training batches go to, filling left out.

    Attributes:
        tokens: (layers, experts) since `clear`.
    """

    def __init__(self, model: Any) -> None:
        self.tokens = torch.zeros(LAYERS, EXPERTS, dtype=torch.int64)
        self._is_token = torch.zeros(0, dtype=torch.bool)
        model.register_forward_pre_hook(self._see_batch, with_kwargs=True)
        for layer in range(LAYERS):
            gate = model.get_submodule(f"model.layers.{layer}.mlp.gate")
            gate.register_forward_hook(self._counting(layer))

    def clear(self) -> Tensor:
        """Return the counts and begin again."""
        counts, self.tokens = self.tokens, torch.zeros_like(self.tokens)
        return counts

    def _see_batch(self, _module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        self._is_token = kwargs["attention_mask"].reshape(-1).bool()

    def _counting(self, layer: int) -> Any:
        def count(_module: Any, _args: Any, out: tuple[Tensor, Tensor, Tensor]) -> None:
            chosen = out[2][self._is_token].reshape(-1)
            self.tokens[layer] += torch.bincount(chosen, minlength=EXPERTS)

        return count


def copied(rl: Rl) -> Weights:
    """Return a copy of the trainer's weights by name."""
    return {name: tensor.clone() for name, tensor in rl.trainer.weights()}


def changed(old: Tensor, new: Tensor) -> Tensor:
    """Return where bits differ."""
    return old.view(torch.int16) != new.view(torch.int16)


class Window:
    """What is counted of syncs that are so many steps apart."""

    def __init__(self, apart: int) -> None:
        self.apart = apart
        self.kinds: dict[str, list[int]] = {}
        self.experts: list[tuple[int, float]] = []
        self.untouched = self.expert_tensors = 0

    def add(self, old: Weights, new: Weights, tokens: Tensor) -> None:
        """Count one sync, before which so many tokens were routed to each expert of each layer."""
        moved = torch.zeros(LAYERS, EXPERTS)
        for name, before in old.items():
            is_changed = changed(before, new[name])
            entry = self.kinds.setdefault(kind_of(name), [0, 0])
            entry[0] += before.numel()
            entry[1] += int(is_changed.sum())
            if kind_of(name) == "expert":
                by_expert = is_changed.flatten(1).sum(1)
                moved[int(name.split(".")[2])] += by_expert
                self.untouched += int((by_expert == 0).sum())
                self.expert_tensors += EXPERTS
        shares = (moved / EXPERT_ELEMENTS).flatten().tolist()
        self.experts += zip(tokens.flatten().tolist(), shares, strict=True)

    def as_json(self) -> dict[str, Any]:
        """Return densities by kind, and of experts by quarters of how often they were used."""
        ranked = sorted(self.experts)
        used = [one for one in ranked if one[0]]
        quarters = np.array_split(np.array(used), QUARTERS)
        return {
            "steps_apart": self.apart,
            "by_kind": {kind: moved / count for kind, (count, moved) in self.kinds.items()},
            "experts_never_used": len(ranked) - len(used),
            "experts_counted": len(ranked),
            "density_never_used": float(np.mean([d for t, d in ranked if not t] or [0.0])),
            "quarters": [
                {
                    "tokens": float(quarter[:, 0].mean()),
                    "density": float(quarter[:, 1].mean()),
                }
                for quarter in quarters
            ],
            "rank_correlation": rank_correlation([t for t, _ in used], [d for _, d in used]),
            "untouched_expert_tensors": self.untouched / self.expert_tensors,
        }


def rank_correlation(first: list[float], second: list[float]) -> float:
    """Return Spearman's coefficient, equal values in the order they come."""
    ranks = [np.argsort(np.argsort(np.array(side), kind="stable")) for side in (first, second)]
    return float(np.corrcoef(ranks)[0, 1])


def as_stored(weights: Weights, *, is_split: bool) -> Iterator[tuple[TensorMeta, Bits]]:
    """Yield metas and bits: experts as the model holds them, or three tensors each."""
    for name, tensor in weights.items():
        pieces = {name: tensor}
        if is_split and kind_of(name) == "expert":
            prefix, _, which = name.rpartition(".")
            pieces = {}
            for expert, both in enumerate(tensor):
                if which == "gate_up_proj":
                    gate, up = both.chunk(2)
                    pieces[f"{prefix}.{expert}.gate_proj.weight"] = gate
                    pieces[f"{prefix}.{expert}.up_proj.weight"] = up
                else:
                    pieces[f"{prefix}.{expert}.down_proj.weight"] = both
        for label, piece in pieces.items():
            bits = piece.contiguous().view(torch.int16).numpy().view(np.uint16).reshape(-1)
            yield TensorMeta(label, "BF16", tuple(piece.shape)), bits


def payloads(old: Weights, new: Weights) -> dict[str, dict[str, float]]:
    """Return what a version costs with experts stored either way."""
    found = {}
    for label, is_split in (("one tensor a layer", False), ("three tensors an expert", True)):
        before, after = (list(as_stored(side, is_split=is_split)) for side in (old, new))
        objects = encode("tight", Listed(before), Listed(after))
        moved = [
            (a, b) for (_, a), (_, b) in zip(before, after, strict=True) if not np.array_equal(a, b)
        ]
        count = sum(int(np.count_nonzero(a != b)) for a, b in moved)
        found[label] = {
            "tensors": len(before),
            "changed_tensors": len(moved),
            "changed": count,
            "bytes": sum(objects.values()),
            "bytes_per_change": sum(objects.values()) / count,
            "bound_per_change": exponent_bound_bytes(moved) / count,
        }
    return found


def run(config: DemoConfig, base: Path, apart: tuple[int, int]) -> dict[str, Any]:
    """Train and count; return what was found."""
    with tempfile.TemporaryDirectory() as scratch:
        rl = Rl(config, base, Path(scratch))
    model = rl.trainer._model  # noqa: SLF001
    routing = RoutingCount(model)
    windows = {steps: Window(steps) for steps in apart}
    last: dict[int, Weights] = {}
    tokens = {steps: torch.zeros(LAYERS, EXPERTS, dtype=torch.int64) for steps in apart}
    rewards, begun_s, sizes = [], time.perf_counter(), {}
    for number in range(1, config.steps + 1):
        rewards.append(rl.step(number))
        weights, counts = copied(rl), routing.clear()
        rl.serve(rl.weights())
        for steps, window in windows.items():
            tokens[steps] += counts
            if number < WARM_UP_STEPS or (number - WARM_UP_STEPS) % steps:
                continue
            if steps in last:
                window.add(last[steps], weights, tokens[steps])
                if number + steps > config.steps:
                    sizes[f"{steps} apart"] = payloads(last[steps], weights)
            last[steps] = weights
            tokens[steps] = torch.zeros_like(tokens[steps])
    return {
        "seed": config.seed,
        "rate": config.rate,
        "steps": config.steps,
        "elements": sum(tensor.numel() for tensor in weights.values()),
        "rewards": rewards,
        "windows": [window.as_json() for window in windows.values()],
        "payloads": sizes,
        "seconds": time.perf_counter() - begun_s,
    }


def rows(found: dict[str, Any]) -> str:
    """Return what is printed about one run."""
    lines = [
        (
            f"lr {found['rate']:g}, seed {found['seed']}, {found['elements']:,} weights, reward "
            f"{np.mean(found['rewards'][:8]):.2f} -> {np.mean(found['rewards'][-8:]):.2f}, "
            f"{found['seconds']:.0f} s"
        )
    ]
    for one in found["windows"]:
        kinds = ", ".join(f"{kind} {share:.3%}" for kind, share in sorted(one["by_kind"].items()))
        quarters = ", ".join(
            f"{quarter['tokens']:.0f} tokens {quarter['density']:.3%}"
            for quarter in one["quarters"]
        )
        lines += [
            f"  {one['steps_apart']} apart: {kinds}",
            (
                f"    experts never used {one['experts_never_used']} of {one['experts_counted']} "
                f"({one['density_never_used']:.3%}); by quarters of use: {quarters}; rank correlation "
                f"{one['rank_correlation']:.2f}; expert tensors untouched "
                f"{one['untouched_expert_tensors']:.2%}"
            ),
        ]
    for label, by_layout in found["payloads"].items():
        for layout, size in by_layout.items():
            lines.append(
                f"  {label}, {layout}: {size['tensors']} tensors, {size['changed']:,} changes, "
                f"{size['bytes_per_change']:.3f} B/change (bound {size['bound_per_change']:.3f})"
            )
    return "\n".join(lines)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--apart", type=int, nargs=2, default=(1, 8))
    parser.add_argument("--rates", type=float, nargs="+", default=(1e-6, 1e-5))
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1))
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    measured_on = machine()
    runs = []
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as directory:
            base = Path(directory)
            write_model(base, seed)
            for rate in arguments.rates:
                config = DemoConfig(
                    model=base, steps=arguments.steps, learning_rate=rate, seed=seed
                )
                runs.append(run(config, base, tuple(arguments.apart)))
                print(rows(runs[-1]), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**measured_on, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
