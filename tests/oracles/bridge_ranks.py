"""Run by torchrun: one rank of a tiny model that a bridge loads into megatron-core on a CPU.

    bridge_ranks.py BRIDGE CHECKPOINT OUT TP PP EP ETP VPP VOCAB_MULTIPLE

BRIDGE is `mbridge` or `megatron-bridge`; each needs an environment of its own. Writes `rank{r}.safetensors`, what the
rank holds under the names that Megatron gives, with the virtual stage before them; and `rank{r}.json`, where the
rank stands. Then the bridge exports what it loaded, and rank 0 writes the names of the tensors that come out
otherwise than they went in to `wrong.json`.

Nothing of Syncline is imported: what this writes is the other opinion.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import on_cpu
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, DeepseekV3Config

WAIT_S = 900

# Fused kernels, which a CPU has not, and other precisions.
OFF = (
    *("bf16", "fp16", "apply_rope_fusion", "bias_activation_fusion", "bias_dropout_fusion"),
    *("cross_entropy_loss_fusion", "gradient_accumulation_fusion", "masked_softmax_fusion"),
    *("moe_permute_fusion", "moe_router_fusion", "moe_shared_expert_overlap", "persist_layer_norm"),
)
F32 = {"params_dtype": torch.float32, "pipeline_dtype": torch.float32}
Exported = Iterable[tuple[str, torch.Tensor]]


def with_mbridge(
    checkpoint: Path, sizes: tuple[int, ...], vocab_multiple: int
) -> tuple[list[Any], Exported]:
    """Return the rank's virtual stages, and what mbridge makes of them again."""
    from mbridge import AutoBridge
    from mbridge.core.safetensor_io import SafeTensorIO
    from mbridge.models import deepseek_v3
    from megatron.core.transformer import MLATransformerConfig

    @functools.wraps(MLATransformerConfig)
    def renamed(**options: Any) -> Any:
        # mbridge 0.15.1 knows this option by the name that it had before megatron-core 0.16.
        options["original_max_position_embeddings"] = options.pop("max_position_embeddings")
        return MLATransformerConfig(**options)

    deepseek_v3.DeepseekV3Bridge.TransformerConfigClass = staticmethod(renamed)
    config = AutoConfig.from_pretrained(checkpoint)
    padding = {"make_vocab_size_divisible_by": vocab_multiple} if vocab_multiple else {}
    bridge = AutoBridge.from_config(config, dtype=torch.float32, **padding)
    # Its own reader of DeepSeek-V3 asks for the index of a checkpoint of several files.
    bridge._get_safetensor_io = lambda path: SafeTensorIO(bridge._get_actual_hf_path(path))
    known = [name for name in OFF if hasattr(MLATransformerConfig, name)]
    options = {**dict.fromkeys(known, False), **F32, "use_cpu_initialization": True}
    is_moe = any(getattr(config, name, 0) for name in ("num_local_experts", "n_routed_experts"))
    is_moe = is_moe or bool(getattr(config, "num_experts", 0))
    bridge.set_extra_args(**options, sequence_parallel=is_moe and sizes[0] > 1)
    models = bridge.get_model(weight_path=str(checkpoint), bf16=False, wrap_with_ddp=False)
    return models, bridge.export_weights(models)


class _OnCpu(ModuleType):
    """The module torch, but every device is the CPU."""

    def __getattr__(self, name: str) -> Any:
        return (lambda *_: torch.empty(0).device) if name == "device" else getattr(torch, name)


class KimiK2Config(DeepseekV3Config):
    """Kimi-K2 is DeepSeek-V3 under a name of its own."""

    model_type = "kimi_k2"


def with_megatron_bridge(
    checkpoint: Path, sizes: tuple[int, ...], vocab_multiple: int
) -> tuple[list[Any], Exported]:
    """Return the rank's virtual stages, and what megatron-bridge makes of them again."""
    from megatron.bridge import AutoBridge
    from megatron.bridge.models.minimax_m2 import minimax_m2_bridge
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.enums import AttnBackend

    # The one place that names a CUDA device by its number.
    minimax_m2_bridge.torch = _OnCpu("torch")
    AutoConfig.register("kimi_k2", KimiK2Config)  # its makers bring it with the checkpoint
    tp, pp, ep, etp, vpp = sizes
    bridge = AutoBridge.from_hf_pretrained(str(checkpoint), torch_dtype=torch.float32)
    provider = bridge.to_megatron_provider(load_weights=False)
    options = {
        **dict.fromkeys(OFF, False),
        **F32,
        "autocast_dtype": torch.float32,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
        "virtual_pipeline_model_parallel_size": vpp if vpp > 1 else None,
        "sequence_parallel": tp > 1,
        "use_cpu_initialization": True,
        "moe_token_dispatcher_type": "alltoall",
        "attention_backend": AttnBackend.unfused,
        "variable_seq_lengths": True,
    }
    for name, value in options.items():
        if hasattr(provider, name):
            setattr(provider, name, value)
    provider.finalize()
    models = provider.provide_distributed_model(
        wrap_with_ddp=False,
        use_cpu_initialization=True,
        bf16=False,
        fp16=False,
        mixed_precision_wrapper=None,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    bridge.load_hf_weights(models)
    return models, bridge.export_hf_weights(models, cpu=True, show_progress=False)


BRIDGES = {"mbridge": with_mbridge, "megatron-bridge": with_megatron_bridge}


def coordinates(rank: int) -> dict[str, int]:
    """Return where the rank stands, as megatron-core numbers it."""
    from megatron.core import parallel_state as state

    return {
        "rank": rank,
        "tp": state.get_tensor_model_parallel_rank(),
        "pp": state.get_pipeline_model_parallel_rank(),
        "ep": state.get_expert_model_parallel_rank(),
        "etp": state.get_expert_tensor_parallel_rank(),
        "dp": state.get_data_parallel_rank(),
        "edp": state.get_expert_data_parallel_rank(),
    }


def main() -> None:
    """Be one rank."""
    bridge, checkpoint, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    *sizes, vocab_multiple = map(int, sys.argv[4:10])
    faulthandler.dump_traceback_later(WAIT_S, exit=True)  # a rank that hangs says where
    on_cpu.use_cpu_instead_of_cuda()
    rank = on_cpu.begin(*sizes)
    models, exported = BRIDGES[bridge](checkpoint, tuple(sizes), vocab_multiple)
    held = {
        f"{stage}/{name}": tensor.contiguous().clone()
        for stage, model in enumerate(models)
        for name, tensor in on_cpu.tensors(model).items()
    }
    save_file(held, out / f"rank{rank}.safetensors")
    (out / f"rank{rank}.json").write_text(json.dumps({"coordinates": coordinates(rank)}))
    found = {name: tensor.detach().clone() for name, tensor in exported}
    if rank == 0:
        given = load_file(checkpoint / "model.safetensors")
        wrong = [
            name
            for name in sorted(given.keys() | found.keys())
            if name not in given or name not in found or not torch.equal(given[name], found[name])
        ]
        (out / "wrong.json").write_text(json.dumps(wrong))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
