"""How long does a sync pause a vLLM server, against what its workers take to apply it?

`vllm serve` on this machine's CPU with random weights of about 270 M parameters in BF16, one worker, and a
version with 1 % of every tensor changed, round by round. Staging runs beside generation, so it is no part of the
pause. Also shown: the same pause with nothing to apply in it, which is what vLLM's routes cost. Run it in the environment of
`make vllm-env`, with Syncline's entry point installed or not. Prints JSON.
"""

from __future__ import annotations

import json
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from machine import machine

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
ROUNDS = 5
DENSITY = 0.01


def write_model(target: Path) -> None:
    """Write a Qwen3 of about 270 M parameters, and the demo's tokenizer."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    from syncline.demo.tiny import make_tokenizer

    config = Qwen3Config(
        vocab_size=32768,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=14,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(target)
    make_tokenizer().save_pretrained(target)


def changed(weights: dict[str, torch.Tensor], seed: int) -> int:
    """Change a share of every tensor by one unit in the last place; return how many elements that is."""
    generator = torch.Generator().manual_seed(seed)
    count = 0
    for tensor in weights.values():
        flat = tensor.view(torch.int16).view(-1)
        chosen = torch.randperm(flat.numel(), generator=generator)[: round(flat.numel() * DENSITY)]
        flat[chosen] ^= 1
        count += chosen.numel()
    return count


def empty_pause_s(control: object) -> float:
    """Return what the routes of a pause cost with nothing done in it."""
    started_s = time.perf_counter()
    control.pause("keep", 60)
    control.call("syncline_status", timeout_s=60)
    control.reset_caches(60)
    control.set_label(control.label(60), 60)
    control.call("syncline_status", timeout_s=60)
    control.resume(60)
    return time.perf_counter() - started_s


def main() -> None:
    """Measure and print."""
    from safetensors.torch import load_file

    import syncline
    from syncline.vllm.commit import CommitOptions, bring
    from syncline.vllm.control import HttpControl
    from vllm_serving import Served

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server is stopped, too
    with tempfile.TemporaryDirectory() as work:
        directory = Path(work)
        write_model(directory / "model")
        weights = load_file(directory / "model" / "model.safetensors")
        store = directory / "run"
        publisher = syncline.Publisher(syncline.open_store(store), base=directory / "model")
        publisher.publish(weights)
        served = Served(directory / "model", directory, dtype="bfloat16")
        served.start()
        try:
            control = HttpControl(served.url)
            bring(control, str(store), 1, CommitOptions())
            rounds = []
            for seed in range(ROUNDS):
                count = changed(weights, seed)
                version = publisher.publish(weights).version
                done = bring(control, str(store), version, CommitOptions())
                rounds.append((done, empty_pause_s(control), count))
                print(
                    done,
                    f"pause/apply {done.pause_s / done.apply_s:.2f}",
                    file=sys.stderr,
                    flush=True,
                )
        finally:
            served.stop()
    taken = {
        name: [getattr(done, name) for done, _, _ in rounds]
        for name in ("stage_s", "pause_s", "apply_s")
    }
    ratios = [done.pause_s / done.apply_s for done, _, _ in rounds]
    result = {
        "machine": machine("vllm"),
        "parameters": sum(tensor.numel() for tensor in weights.values()),
        "changed": rounds[-1][2],
        **{name: spread(values) for name, values in taken.items()},
        "empty_pause_s": spread([empty for _, empty, _ in rounds]),
        "pause_by_apply": spread(ratios),
    }
    print(json.dumps(result, indent=1))


def spread(values: list[float]) -> dict[str, float]:
    """Return median, least and greatest."""
    return {
        "median": round(statistics.median(values), 4),
        "least": round(min(values), 4),
        "greatest": round(max(values), 4),
    }


if __name__ == "__main__":
    main()
