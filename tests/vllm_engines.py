"""Real vLLM engines in this process, and what is asked of them.

Plain mode is a test double for kernels, as on a GPU: linear layers compute with the very parameter, and
experts with a torch loop. Loaders, names, shards and everything else are vLLM's own.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


PLAIN = "SYNCLINE_TESTS_PLAIN_KERNELS"


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Linear layers and experts that compute with their parameters as they were loaded.

    Workers in processes of their own are spawned, so that they patch themselves: see `patch_worker`.
    """
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {PLAIN: "1"}))
        for patch in _plain():
            stack.enter_context(patch)
        yield


def patch_worker() -> None:
    """In a process that is a worker and nothing else: compute plainly from now on, if the test says so."""
    if PLAIN in os.environ and multiprocessing.parent_process() is not None:
        for patch in _plain():
            patch.start()


def _plain() -> list[Any]:
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    experts = cpu_moe.CPUUnquantizedExperts
    return [
        mock.patch.object(ops, "_supports_onednn", new=False),
        mock.patch.object(experts, "process_weights_after_loading"),
        mock.patch.object(experts, "apply", _experts_in_torch),
    ]


def _experts_in_torch(
    self: Any,
    output: Any,
    hidden_states: Any,
    w1: Any,
    w2: Any,
    topk_weights: Any,
    topk_ids: Any,
    *_: Any,
    **__: Any,
) -> None:
    import torch

    # Every expert sees every token, and scales what it is not asked for by 0: no branch depends on values, so
    # that this can be compiled.
    result = torch.zeros_like(hidden_states)
    for expert in range(w1.shape[0]):
        scale = (topk_weights * (topk_ids == expert)).sum(1, keepdim=True).to(result.dtype)
        gate, up = (hidden_states @ w1[expert].t()).chunk(2, dim=-1)
        result += ((torch.nn.functional.silu(gate) * up) @ w2[expert].t()) * scale
    output.copy_(result)


@contextmanager
def engine(
    path: Path, *, dtype: str = "float32", is_eager: bool = True, tp: int = 1, **options: Any
) -> Iterator[Any]:
    """A vLLM over a checkpoint, in this process if `tp` is 1."""
    with mock.patch.dict(
        os.environ, ENVIRONMENT | ({"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if tp > 1 else {})
    ):
        from vllm import LLM
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        llm = LLM(
            str(path),
            dtype=dtype,
            enforce_eager=is_eager,
            max_model_len=512,
            max_num_seqs=8,
            seed=0,
            tensor_parallel_size=tp,
            disable_log_stats=True,
            worker_extension_cls="vllm_tested_worker.TestedWorker",
            **options,
        )
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()
            # Its groups, and so its ports, last longer in this process.
            cleanup_dist_env_and_memory()


def model_of(llm: Any) -> Any:
    """The module that an engine in this process runs."""
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    return executor.driver_worker.worker.model_runner.get_model()


def greedy(llm: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    from vllm import SamplingParams

    options = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(asked, options, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def greedy_of_transformers(path: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    """What transformers makes of the same checkpoint, in the same dtype."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    found = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            for _ in range(count):
                chosen = model(ids).logits[0, -1].argmax()
                ids = torch.cat([ids, chosen.view(1, 1)], dim=1)
            found.append(ids[0, len(prompt) :].tolist())
    return found
