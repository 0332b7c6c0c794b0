"""Run by tests: start an engine on a checkpoint; print what each worker holds, and what it generates."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "tests" / "vllm")]

from test_live_weights import PROMPTS, TOKENS  # noqa: E402

from vllm_engines import engine, greedy, plain_kernels  # noqa: E402


def main(path: str, dtype: str, kernels: str, graph: str, tp: str) -> None:
    with (
        plain_kernels() if kernels == "plain" else nullcontext(),
        engine(Path(path), dtype=dtype, is_eager=graph == "eager", tp=int(tp)) as llm,
    ):
        tokens = greedy(llm, PROMPTS, TOKENS)
        hashes = llm.collective_rpc("tested_hashes")
    json.dump({"tokens": tokens, "hashes": hashes}, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
