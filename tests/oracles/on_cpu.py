"""Let megatron-core run on a CPU over Gloo: its calls of CUDA do nothing, Transformer Engine is a stand-in.

Import this before megatron.
"""

from __future__ import annotations

import contextlib
import typing
from typing import Any

import te_standin
import torch
import torch.distributed as dist
import typing_extensions


class _Nothing:
    """A stream or an event of a device that is not there."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self

    def __enter__(self) -> typing.Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def use_cpu_instead_of_cuda() -> None:
    """Put a CPU where megatron-core expects a GPU. Before the first import of megatron."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.device_count = lambda: 1
    for name in ("synchronize", "empty_cache", "set_device"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    for name in ("Stream", "Event", "current_stream", "stream"):
        setattr(torch.cuda, name, _Nothing)
    torch.nn.Module.cuda = lambda self, *_, **__: self
    torch.Tensor.cuda = lambda self, *_, **__: self
    # megatron-core 0.19 asks for Python 3.12, and of its library uses only this.
    typing.override = typing_extensions.override
    dist.scatter = _contiguous(dist.scatter)
    te_standin.install()


def _contiguous(scatter: Any) -> Any:
    """Gloo copies memory as it lies: views that are not contiguous would arrive scrambled."""

    def wrapped(tensor: Any, pieces: Any = None, *args: Any, **more: Any) -> Any:
        given = None if pieces is None else [piece.contiguous() for piece in pieces]
        return scatter(tensor, given, *args, **more)

    return wrapped


def begin(tp: int, pp: int, ep: int, etp: int, vpp: int = 1) -> int:
    """Join the group of all ranks with these sizes; return the rank."""
    dist.init_process_group("gloo")
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    random.CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )
    return dist.get_rank()


def tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return what a model holds: parameters, and the one kind of buffer that is exported."""
    found = {name: parameter.data for name, parameter in model.named_parameters()}
    biases = {name: b for name, b in model.named_buffers() if name.endswith("expert_bias")}
    return {**found, **biases}
