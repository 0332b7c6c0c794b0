"""How long does an update pause an SGLang server, in place and by SGLang's own routes for whole tensors?

`sglang.launch_server` on this machine's CPU with random weights of about 270 M parameters in BF16, one rank. Every round
changes 1 % of every tensor and takes that in place; then as much again from memory in flattened buckets
(`/update_weights_from_tensor`), and as much again from a directory of the changed tensors (`/update_weights_from_disk`).
After each the whole checkpoint is loaded, which must change nothing. Fetching, decoding and staging run beside generation and
are no part of the pause; SGLang's checksums are a part of it. Also shown, in the same rounds: the pause with nothing in it, which
is what SGLang's routes and checksums cost, and how long this machine copies the bytes that the dense routes move. Run it in
the environment of `make sglang-env`: `sglang_sync.py [RESULT.json]`.
"""

from __future__ import annotations

import json
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import machine

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
ROUNDS = 5
DENSITY = 0.01
ROUTES = ("in_place", "memory", "disk")
CONFIG: dict[str, Any] = {
    "vocab_size": 32768,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 14,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
}


def change(weights: dict[str, torch.Tensor], rng: np.random.Generator) -> None:
    """Change a share of every tensor by one unit in the last place."""
    for tensor in weights.values():
        flat = tensor.view(torch.int16).view(-1).numpy()
        chosen = rng.choice(flat.size, max(1, round(flat.size * DENSITY)), replace=False)
        flat[chosen] ^= 1


def empty_pause_s(control: Any) -> float:
    """Return what the routes of a pause cost with nothing done in it."""
    label = control.label(60)
    started_s = time.perf_counter()
    control.pause("retract", 60)
    control.begin(60)
    control.end(60)
    control.flush(60)
    control.checksums(60)
    control.set_label(label, 60)
    control.resume(60)
    return time.perf_counter() - started_s


def copy_s(nbytes: int) -> float:
    """Return how long it takes to copy so many bytes, in memory that was used before."""
    source = np.ones(nbytes, np.uint8)
    target = np.full(nbytes, 2, np.uint8)
    started_s = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - started_s


def spread(values: list[float]) -> dict[str, float]:
    """Return median, least and greatest."""
    return {
        "median": round(statistics.median(values), 4),
        "least": round(min(values), 4),
        "greatest": round(max(values), 4),
    }


def update(pair: Any, route: str) -> dict[str, float]:
    """Take one version by a route; return its seconds, and those of a load of the whole that changes nothing."""
    follower = pair.another(route=route)
    follower.sync()  # knows the server by its checksums
    change(pair.weights, pair.rng)
    version = pair.publisher.publish(pair.weights).version
    done = follower.sync()
    if done is None or pair.control.label(60) != str(version):
        raise RuntimeError(f"{route}: the server is not at version {version}")
    started_s = time.perf_counter()
    pair.control.load_directory(str(pair.root / "model"), 600)
    whole_s = time.perf_counter() - started_s
    if pair.control.checksums(600) != done.checksums:
        raise RuntimeError(f"{route}: not what SGLang loads")
    return {
        f"{route}.pause_s": done.pause_s,
        f"{route}.send_s": done.send_s,
        f"{route}.stage_s": follower.figures()["syncline_stage_seconds"],
        "whole.send_s": whole_s,
    }


def main() -> None:
    """Measure and print."""
    import sglang_tiny as tiny
    from sglang_pair import Pair

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server is stopped, too
    rounds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as work:
        pair = Pair(Path(work), {**tiny.QWEN3, **CONFIG})
        try:
            nbytes = sum(t.numel() * t.element_size() for t in pair.weights.values())
            pair.follower.sync()
            for _ in range(ROUNDS):
                taken: dict[str, float] = {}
                for route in ROUTES:
                    taken |= update(pair, route)
                taken["empty_pause_s"] = empty_pause_s(pair.control)
                taken["copy_of_all_bytes_s"] = copy_s(nbytes)
                for route in (*ROUTES[1:], "whole"):
                    taken[f"{route} by in_place, send"] = (
                        taken[f"{route}.send_s"] / taken["in_place.send_s"]
                    )
                for route in ROUTES[1:]:
                    taken[f"{route} by in_place, pause"] = (
                        taken[f"{route}.pause_s"] / taken["in_place.pause_s"]
                    )
                rounds.append(taken)
                print({k: round(v, 3) for k, v in taken.items()}, file=sys.stderr, flush=True)
        finally:
            pair.close()
    result = {
        "machine": machine("sglang"),
        "parameters": sum(t.numel() for t in pair.weights.values()),
        "bytes": nbytes,
        "density": DENSITY,
        "rounds": ROUNDS,
        **{name: spread([taken[name] for taken in rounds]) for name in rounds[0]},
    }
    text = json.dumps(result, indent=1)
    print(text)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text + "\n")


if __name__ == "__main__":
    main()
