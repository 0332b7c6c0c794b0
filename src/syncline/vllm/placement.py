"""Where a vLLM worker's own loader puts the elements of a checkpoint, learned from it once.

Layers whose weights vLLM has packed since are learned in the form that the loader fills, which vLLM keeps
a description of; `packed` then says what became of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from syncline.engines.learned import Learned, learn
from syncline.engines.learned.memories import Memories, Memory
from syncline.errors import LayoutError
from syncline.types import TensorMeta
from syncline.vllm.packed import ExpertOrder, PackedLinear, packed_linears

_PLAIN = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod")


@dataclass(frozen=True)
class WorkerPlacement:
    """What one worker holds, and in which form.

    Attributes:
        learned: in the form that the loader fills.
        memories: the memories that can be read and written, by local name.
        orders: by local name, of those that were permuted since.
        packed: the layers that compute with a packed form, by the local name of their weight.
    """

    learned: Learned
    memories: Mapping[str, Memory]
    orders: Mapping[str, ExpertOrder]
    packed: tuple[tuple[str, PackedLinear], ...]


def learn_worker(model: Any, metas: Iterable[TensorMeta], *, rank: int = 0) -> WorkerPlacement:
    """Learn the placement of the worker that runs this model; its weights are not touched.

    Raises:
        LayoutError: a layer is quantised, or packed in a way that is not known here; its loader converts
            values, or replaces tensors. Says which tensor, and what to do.
        VerifyError: the loader wrote live memory; start the engine again.
    """
    _refuse_quantised(model)
    linears = packed_linears(model)
    experts = [
        (name, module) for name, module in model.named_modules() if _is_packed_experts(module)
    ]
    live = _tensors(model)
    as_loaded = {linear.module: ("weight",) for linear in linears if not linear.is_readable}
    as_loaded |= {module: ("w13_weight", "w2_weight") for _, module in experts}
    with _as_loaded(as_loaded):
        memories = Memories(_tensors(model))
        learned = learn(model.load_weights, metas, memories, rank=rank)
    converted = [(n, why) for n, why in learned.unmapped.items() if "loader converts" in why]
    if converted:
        name, why = converted[0]
        raise LayoutError(
            f"tensor {name!r}: {why}, and so {len(converted)} tensors: start vLLM with the checkpoint's own "
            "dtype, so that it can hold the trainer's bits",
            tensor=name,
        )
    orders = {
        f"{name}.{weight}": _order(module, weight)
        for name, module in experts
        for weight in ("w13_weight", "w2_weight")
    }
    kept = {memory.name: memory for memory in memories if not memory.is_meta}
    kept |= {name: Memory(name, live[name]) for name in orders}
    for name, order in orders.items():
        if kept[name].flat.numel() != order.packed_count:
            raise LayoutError(f"{name!r} has other elements than what it was packed from")
    packed = tuple((_local_name(linear, memories), linear) for linear in linears)
    return WorkerPlacement(learned, kept, orders, packed)


def _local_name(linear: PackedLinear, memories: Memories) -> str:
    """Return the local name of a layer's weight: tied ones share it."""
    memory = memories.of(linear.module.weight) if linear.is_readable else None
    return linear.name if memory is None else memory.name


def _refuse_quantised(model: Any) -> None:
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        kind = type(method).__name__
        if method is not None and kind not in _PLAIN and getattr(module, "_parameters", None):
            raise LayoutError(
                f"layer {name!r} is quantised ({kind}): what it holds is not what a checkpoint holds, and "
                "vLLM's own reload of such layers has been seen to corrupt them; serve full checkpoints"
            )


def _tensors(model: Any) -> dict[str, Any]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


@contextmanager
def _as_loaded(modules: Mapping[Any, tuple[str, ...]]) -> Iterator[None]:
    """Give parameters the form that their loaders fill, without memory, for a while."""
    kept = []
    try:
        for module, names in modules.items():
            for name in names:
                described = _described(module, name)
                kept.append((module, name, module._parameters[name]))  # noqa: SLF001
                _sanitize().restore_layer_refs(described, module)
                module._parameters[name] = described  # noqa: SLF001
        yield
    finally:
        for module, name, parameter in kept:
            # What vLLM keeps of a layer must not keep the layer.
            _sanitize().sanitize_layer_refs(module._parameters[name], module)  # noqa: SLF001
            module._parameters[name] = parameter  # noqa: SLF001 - `register_parameter` checks too much


def _sanitize() -> Any:
    from vllm.model_executor.model_loader.reload import sanitize  # noqa: PLC0415

    return sanitize


def _described(module: Any, name: str) -> Any:
    """Return vLLM's own description of a parameter before loading: on the meta device, its loader without a layer."""
    from vllm.model_executor.model_loader.reload.layerwise import (  # noqa: PLC0415
        get_layerwise_info,
    )

    described = get_layerwise_info(module).restore_metadata[0]
    if name not in described:
        raise LayoutError(f"vLLM does not say in which form {name!r} was loaded", tensor=name)
    return described[name]


def _is_packed_experts(module: Any) -> bool:
    """Tell whether stacked experts belong to a kernel of the CPU that may have packed them.

    Kernels that want another order and are not known here are found by the values of the checkpoint.
    """
    method = getattr(module, "quant_method", None)
    if type(method).__name__ != "UnquantizedFusedMoEMethod":
        return False
    kernel = getattr(method, "moe_kernel", None)
    experts = getattr(kernel, "fused_experts", None)
    return hasattr(experts, "isa") and not getattr(experts, "_use_zentorch", False)


def _order(module: Any, weight: str) -> ExpertOrder:
    import torch  # noqa: PLC0415
    from vllm import _custom_ops as ops  # noqa: PLC0415

    described = _described(module, weight)
    experts = module.quant_method.moe_kernel.fused_experts
    ours = tuple(described.shape)
    theirs = tuple(getattr(module, weight).shape)
    if ours != theirs:
        raise LayoutError(
            f"vLLM pads {weight} from {ours} to {theirs} before it packs it; choose a tensor-parallel size "
            "by which the experts divide into multiples of its kernel's width"
        )
    like = torch.empty(ours, dtype=described.dtype, device="meta")

    def pack(stack: Any) -> Any:
        return ops.cpu_prepack_moe_weight(stack.contiguous(), experts.isa)

    return ExpertOrder(pack, like)
