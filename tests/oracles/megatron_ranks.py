"""Run by torchrun in an environment with megatron-core: one rank of a tiny model on a CPU.

    megatron_ranks.py FOLDER CONFIG.json TP PP EP ETP MODE

Writes `rank{r}.json`: name, shape and Megatron's own description (`sharded_state_dict`) of every tensor. MODE
`save`: waits for `given{r}.npz`, takes the weights from it, and saves a distributed checkpoint. `load`: loads that
checkpoint, which was saved under another layout, and writes what the rank then holds to `loaded{r}.npz`.

Nothing of Syncline is imported: what this writes is the other opinion.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import on_cpu
import torch
import torch.distributed as dist

WAIT_S = 900
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def build(config: dict[str, Any], pp: int, ep: int, etp: int, tp: int) -> Any:
    """Return the rank's part of the model that a Hugging Face config describes."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    sizes = {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": config["num_attention_heads"],
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "activation_func": torch.nn.functional.silu,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
        "use_cpu_initialization": True,
        "pipeline_dtype": torch.float32,
        "qk_layernorm": config["model_type"].startswith("qwen3"),
        "num_query_groups": config["num_key_value_heads"],
        "kv_channels": config.get("head_dim"),
    }
    experts = next((config[key] for key in EXPERTS if key in config), 0)
    if experts:
        sizes |= {
            "num_moe_experts": experts,
            "moe_ffn_hidden_size": config.get("moe_intermediate_size", config["intermediate_size"]),
        }
    is_latent = "kv_lora_rank" in config
    if is_latent:
        dense = config["first_k_dense_replace"]
        sizes |= {
            "multi_latent_attention": True,
            "qk_layernorm": True,
            **{key: config[key] for key in ("q_lora_rank", "kv_lora_rank", "v_head_dim")},
            "qk_head_dim": config["qk_nope_head_dim"],
            "qk_pos_emb_head_dim": config["qk_rope_head_dim"],
            "moe_layer_freq": [int(i >= dense) for i in range(config["num_hidden_layers"])],
            "moe_shared_expert_intermediate_size": config["n_shared_experts"]
            * config["moe_intermediate_size"],
            "moe_router_enable_expert_bias": True,
            "moe_router_score_function": "sigmoid",
            "moe_grouped_gemm": True,
            "sequence_parallel": tp > 1,
        }
    made = (MLATransformerConfig if is_latent else TransformerConfig)(**sizes)
    # Latent attention is only built of Transformer Engine's modules; the others are taken without.
    block = get_gpt_decoder_block_spec(made, use_transformer_engine=is_latent)
    return GPTModel(
        config=made,
        transformer_layer_spec=block,
        vocab_size=config["vocab_size"],
        max_sequence_length=64,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=config["tie_word_embeddings"],
        position_embedding_type="rope",
    )


def tensors(model: Any) -> dict[str, torch.Tensor]:
    """Return what the rank holds, by the names that layouts use."""
    return {f"0/{name}": tensor for name, tensor in on_cpu.tensors(model).items()}


def described(state: Any, model: Any) -> dict[str, list[Any]]:
    """Return for each tensor that Megatron describes by itself: key, where it begins, which replica."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    memory = {tensor.data_ptr(): name for name, tensor in tensors(model).items()}
    return {
        memory[item.data.data_ptr()]: [item.key, list(item.global_offset), list(item.global_shape)]
        for item in nested_values(state)
        if isinstance(item, ShardedTensor) and item.data.data_ptr() in memory
    }


def main() -> None:
    """Be one rank."""
    folder, config = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    tp, pp, ep, etp = map(int, sys.argv[3:7])
    mode = sys.argv[7]
    faulthandler.dump_traceback_later(WAIT_S, exit=True)  # a rank that hangs says where
    on_cpu.use_cpu_instead_of_cuda()
    rank = on_cpu.begin(tp, pp, ep, etp)
    from megatron.core import dist_checkpointing, parallel_state

    model = build(config, pp, ep, etp, tp)
    groups = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": True,
    }
    held = tensors(model)
    state = model.sharded_state_dict(metadata=groups)
    about = {
        "tensors": {name: [str(t.dtype), list(t.shape)] for name, t in held.items()},
        "sharded": described(state, model),
    }
    (folder / f"rank{rank}.json.part").write_text(json.dumps(about))
    (folder / f"rank{rank}.json.part").rename(folder / f"rank{rank}.json")
    checkpoint = folder / "checkpoint"
    if mode == "save":
        given = _wait_for(folder / f"given{rank}.npz")
        for name, tensor in held.items():
            tensor.copy_(torch.from_numpy(given[name]).reshape(tensor.shape))
        if rank == 0:
            checkpoint.mkdir()
        dist.barrier()
        dist_checkpointing.save(model.sharded_state_dict(metadata=groups), str(checkpoint))
    else:
        for tensor in held.values():
            tensor.zero_()
        loaded = dist_checkpointing.load(model.sharded_state_dict(metadata=groups), str(checkpoint))
        model.load_state_dict(loaded, strict=False)
        values = {name: tensor.numpy() for name, tensor in tensors(model).items()}
        np.savez(folder / f"loaded{rank}.npz", **values)
    dist.barrier()
    dist.destroy_process_group()


def _wait_for(path: Path) -> Any:
    deadline_s = time.monotonic() + WAIT_S
    while not path.exists():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{path} did not appear")
        time.sleep(0.1)
    return np.load(path)


if __name__ == "__main__":
    main()
