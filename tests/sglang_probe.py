"""Custom weight loaders for tests: they write no weights, and say what a rank holds, or what a fresh one would."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

DERIVED = "sglang_probe.derived"
FRESH = "sglang_probe.fresh"
REBALANCED = "sglang_probe.rebalanced"
PLACED = "sglang_probe.placed"
LOADERS = (DERIVED, FRESH, REBALANCED, PLACED)
_DERIVED = ("w_kc", "w_vc")


def derived(model: Any, _: object) -> None:
    """Note the digests of MLA's absorbed projections, by module."""
    import torch

    found = {}
    for prefix, module in model.named_modules():
        for name in _DERIVED:
            tensor = getattr(module, name, None)
            if tensor is not None:
                bits = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                found[f"{prefix}.{name}"] = hashlib.sha256(bits).hexdigest()
    _note(found)


def fresh(_model: Any, _: object) -> None:
    """Let SGLang load the checkpoint into another model, as it does when it starts, and note its checksums."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader.loader import get_model_loader
    from sglang.srt.runtime_context import get_server_args
    from sglang.srt.utils.weight_checker import WeightChecker

    config = ModelConfig.from_server_args(get_server_args())
    loader = get_model_loader(LoadConfig(), config)
    model = loader.load_model(model_config=config, device_config=DeviceConfig("cpu"))
    checker = WeightChecker(get_model=lambda: model)
    _note(checker.handle("checksum", role="target")["checksums"])


def rebalanced(model: Any, _: object) -> None:
    """Let SGLang balance its experts anew, as after load on other ones, and note where each of them is."""
    import torch
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.eplb import expert_location
    from sglang.srt.eplb.expert_location_updater import ExpertLocationUpdater
    from sglang.srt.runtime_context import get_parallel, get_server_args

    old = expert_location.get_global_expert_location_metadata()
    before = old.physical_to_logical_map.clone()
    config = ModelConfig.from_server_args(get_server_args())
    for seed in range(20):  # of which one moves something
        load = torch.rand(
            (1, old.num_layers, old.num_logical_experts),
            generator=torch.Generator().manual_seed(seed),
        )
        new = expert_location.ExpertLocationMetadata.init_by_eplb(config, (load * 1000).int())
        if not torch.equal(new.physical_to_logical_map, before):
            break
    updater = ExpertLocationUpdater()
    updater._first_execution = False  # a CPU has no cache to empty
    updater.update(
        model.routed_experts_weights_of_layer.value,
        new,
        update_layer_ids=list(range(old.num_layers)),
        nnodes=1,
        rank=int(get_parallel().tp_rank),
    )
    now = expert_location.get_global_expert_location_metadata().physical_to_logical_map
    _note({"before": str(before.tolist()), "now": str(now.tolist())})


def placed(model: Any, _: object) -> None:
    """Note what this rank's learned placement makes of a checkpoint."""
    from syncline.engines.checkpoint_files import CheckpointFiles
    from syncline.sglang.live import RankWeights

    checkpoint = CheckpointFiles(Path(os.environ["SYNCLINE_SGLANG_STAGING"]).with_name("model"))
    learned = RankWeights(model, checkpoint).learned
    assert not learned.unmapped
    _note(scattered(learned.layout, learned.placement))


def scattered(layout: Any, placement: Any) -> dict[str, str]:
    """Return by local tensor the digest of what a placement puts there of a checkpoint of random bits."""
    from math import prod

    import numpy as np

    from syncline.layouts import scatter
    from syncline.types import TensorMeta, unsigned

    def drawn(meta: TensorMeta) -> Any:
        seed = int(hashlib.sha256(meta.name.encode()).hexdigest()[:8], 16)
        return (
            np.random.default_rng(seed)
            .integers(0, 256, meta.nbytes, np.uint8)
            .view(unsigned(meta.unit_bytes))
        )

    shard = {
        local.name: np.zeros(
            prod(local.shape), unsigned(TensorMeta(local.name, local.dtype, ()).unit_bytes)
        )
        for local in placement.tensors
    }
    checkpoint = [(tensor.meta, drawn(tensor.meta)) for tensor in layout.catalog.values()]
    scatter(layout, checkpoint, {placement.rank: shard})
    return {
        name: hashlib.sha256(bits.tobytes()).hexdigest()
        for name, bits in shard.items()
        if bits.any()
    }


def read(staging: Path, ranks: int) -> list[dict[str, str]]:
    """Return what the ranks noted, and forget it."""
    found = []
    for rank in range(ranks):
        path = _path(staging, rank)
        found.append(json.loads(path.read_text()))
        path.unlink()
    return found


def _note(found: dict[str, str]) -> None:
    from sglang.srt.runtime_context import get_parallel

    path = _path(Path(os.environ["SYNCLINE_SGLANG_STAGING"]), int(get_parallel().tp_rank))
    path.write_text(json.dumps(found))


def _path(staging: Path, rank: int) -> Path:
    return staging / f"probe-{rank}.json"
