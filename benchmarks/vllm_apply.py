"""How long a delta takes in a live vLLM: in place, by vLLM's own sparse path, and by loading everything.

Runs in the environment of `make vllm-env`: .venvs/vllm/bin/python benchmarks/vllm_apply.py [RESULT.json]

One process, one model of 267 M parameters in bfloat16 with random weights, 1 % of every tensor changed. Linear
layers compute with the very parameter (`plain_kernels` of the tests): vLLM's own sparse path cannot write
the packed weights of its default CPU kernels. Deltas are in memory before the clock starts; `full load` comes
in two forms, from tensors in memory and from a file in the page cache.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [
    str(Path(__file__).resolve().parent.parent / part) for part in ("tests", "benchmarks")
]

from machine import machine  # noqa: E402

from syncline import MemoryStore, Publisher  # noqa: E402
from syncline.sources import CheckpointSource  # noqa: E402
from syncline.vllm.copy import HostCopy  # noqa: E402
from syncline.vllm.placed import PlacedWeights  # noqa: E402
from syncline.vllm.placement import learn_worker  # noqa: E402
from syncline.vllm.ranks import OneWorker  # noqa: E402
from vllm_engines import engine, model_of, plain_kernels  # noqa: E402
from vllm_models import write_checkpoint  # noqa: E402

SIZES = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
SHARE = 0.01
ROUNDS = 7


def timed(do: Callable[[], Any]) -> float:
    started = time.perf_counter()
    do()
    return time.perf_counter() - started


def spread(seconds: list[float]) -> dict[str, float]:
    return {
        "median_s": round(statistics.median(seconds), 5),
        "lowest_s": round(min(seconds), 5),
        "highest_s": round(max(seconds), 5),
    }


def changed(weights: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return later weights, and by name the flat indices where they differ."""
    import torch

    rng = np.random.default_rng(1)
    later, places = {}, {}
    for name, tensor in weights.items():
        after = tensor.clone()
        flat = after.view(-1).view(torch.int16)
        count = max(1, round(flat.numel() * SHARE))
        where = torch.from_numpy(np.sort(rng.choice(flat.numel(), count, replace=False)))
        flat[where] ^= 1  # one unit in the last place, as most changes of a training step are
        later[name], places[name] = after, where
    return later, places


def patches(weights: dict[str, Any], places: dict[str, Any]) -> list[Any]:
    import torch
    from vllm.model_executor.model_loader.checkpoint_weight_patch import CheckpointWeightPatch

    return [
        CheckpointWeightPatch(
            name,
            tuple(tensor.shape),
            tensor.dtype,
            tensor.view(-1)[places[name]],
            places[name].to(torch.int32),
        )
        for name, tensor in weights.items()
    ]


def measure(model: Any, path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file
    from vllm.model_executor.model_loader.checkpoint_weight_patch import (
        load_checkpoint_weight_patches,
    )

    source = CheckpointSource(path)
    metas = source.metas()
    learning = [timed(lambda: learn_worker(model, metas.values())) for _ in range(ROUNDS)]
    starting = timed(lambda: PlacedWeights(model, source, OneWorker()))
    live = PlacedWeights(model, source, OneWorker())
    before = load_file(path / "model.safetensors")
    after, places = changed(before)
    store = MemoryStore()
    publisher = Publisher(store)
    publisher.publish({name: tensor.clone() for name, tensor in before.items()})
    copy = HostCopy(source)
    copy.follow(store, None)
    publisher.publish(after)
    held = copy.follow(store, None)
    forward, backward = patches(after, places), patches(before, places)
    found: dict[str, list[float]] = {}

    def note(name: str, do: Callable[[], Any]) -> None:
        found.setdefault(name, []).append(timed(do))

    def from_file() -> Iterator[tuple[str, Any]]:
        yield from load_file(path / "model.safetensors").items()

    for _ in range(ROUNDS):
        note("syncline prepare", lambda: live.prepare(copy))
        note("syncline write", lambda: live.write(copy))
        if live.fingerprint_in_full(copy) != held.manifest.fingerprint:
            raise RuntimeError("the live weights are not those of the version")
        note("syncline undo", lambda: live.undo(copy))
        note("vllm sparse", lambda: load_checkpoint_weight_patches(model, forward))
        if live.fingerprint_in_full(copy) != held.manifest.fingerprint:
            raise RuntimeError("vLLM's sparse path did not give the version's weights")
        load_checkpoint_weight_patches(model, backward)
        note("full load from memory", lambda: model.load_weights(before.items()))
        note("full load from file", lambda: model.load_weights(from_file()))
    whole = [a + b for a, b in zip(found["syncline prepare"], found["syncline write"], strict=True)]
    found["syncline prepare and write"] = whole
    reference = statistics.median(whole)
    return {
        "parameters": sum(meta.count for meta in metas.values()),
        "tensors": len(metas),
        "changed": sum(int(where.numel()) for where in places.values()),
        "rounds": ROUNDS,
        "learning": spread(learning),
        "start with checks_s": round(starting, 4),
        "seconds": {name: spread(seconds) for name, seconds in found.items()},
        "times the whole of ours (prepare and write)": {
            name: round(statistics.median(seconds) / reference, 2)
            for name, seconds in found.items()
        },
        "times our write alone (what generation waits for)": {
            name: round(statistics.median(seconds) / statistics.median(found["syncline write"]), 2)
            for name, seconds in found.items()
        },
    }


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="syncline-vllm-") as directory:
        path = Path(directory) / "model"
        write_checkpoint("qwen3", path, dtype="bfloat16", **SIZES)
        with plain_kernels(), engine(path, dtype="bfloat16", is_eager=True) as llm:
            result = {**machine("vllm"), **measure(model_of(llm), path)}
    text = json.dumps(result, indent=2)
    print(text)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text + "\n")


if __name__ == "__main__":
    main()
