"""A worker extension that compares what a live worker holds with a model that vLLM loads afresh."""

from __future__ import annotations

import copy
import hashlib
from typing import Any

from syncline.errors import LayoutError
from syncline.vllm.extension import SynclineWorker, session_of
from vllm_engines import patch_worker

patch_worker()


class TestedWorker(SynclineWorker):
    """Answers with plain values, like what it extends."""

    __test__ = False

    def tested_state(self, path: str) -> dict[str, Any]:
        """Load the checkpoint at `path` into a second model, as a fresh engine does; say what differs.

        Parameters and buffers are compared as bits; of layers that are packed, what they compute of the
        unit matrix: each element of the weight. `shares`: the fingerprint of what this worker holds, as
        kept in step and as read anew.
        """
        fresh = fresh_model(self.vllm_config, path)
        live = self.model_runner.get_model()
        session = session_of(self)
        held, weights = session._copy, session.weights
        return {
            "differences": [*different_tensors(live, fresh), *different_layers(live, fresh)],
            "shares": [weights.fingerprint(held).hex(), weights.fingerprint_in_full(held).hex()],
        }

    def tested_hashes(self) -> dict[str, str]:
        """Return a hash of every parameter and buffer, and of what every packed layer computes."""
        return hashes(self.model_runner.get_model())

    def tested_break(self, rank: str) -> None:
        """Let the next write fail on one worker, when its last bit is in."""
        if self.rank == int(rank):
            session = session_of(self)
            change = session.weights._shares.change

            def failing(*_: Any, **__: Any) -> None:
                session.weights._shares.change = change
                raise LayoutError("injected")

            session.weights._shares.change = failing

    def tested_flip(self, rank: str, name: str) -> None:
        """Flip a bit of every key weight that one worker has in this attention, as something else would."""
        import torch

        if self.rank == int(rank):
            attention = dict(self.model_runner.get_model().named_modules())[name]
            bits = attention.qkv_proj.weight.data.view(
                {2: torch.int16, 4: torch.int32}[attention.qkv_proj.weight.element_size()]
            )
            bits[attention.q_size : attention.q_size + attention.kv_size] ^= 1

    def tested_kept(self) -> list[str]:
        """Return the parameters whose description, which vLLM keeps for reloads, would keep their layer alive."""
        from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

        return [
            name
            for layer, info in LAYERWISE_INFO.items()
            for name, described in info.restore_metadata[0].items()
            if any(getattr(value, "__self__", None) is layer for value in vars(described).values())
        ]

    def tested_placement(self) -> dict[str, Any]:
        """Return what was learned here, in plain values."""
        weights = session_of(self).weights
        placement, permuted = weights._forms._placement, weights._live.permuted
        learned = placement.learned
        return {
            "unmapped": dict(learned.unmapped),
            "absent": list(learned.absent),
            "packed": [*permuted, *(local for local, _ in placement.packed)],
            "tensors": {
                t.name: [t.dtype, list(t.shape), t.padding] for t in learned.placement.tensors
            },
            "blocks": [
                [
                    b.name,
                    list(b.start),
                    list(b.shape),
                    b.local,
                    b.offset,
                    list(b.strides),
                    b.is_alias,
                ]
                for b in learned.placement.blocks
            ],
            "grids": {name: list(t.grid) for name, t in learned.layout.catalog.items()},
        }


def fresh_model(vllm_config: Any, path: str) -> Any:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model_loader

    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    config.model_config = copy.copy(vllm_config.model_config)
    config.model_config.model = path
    with set_current_vllm_config(config):
        loader = get_model_loader(config.load_config)
        return loader.load_model(vllm_config=config, model_config=config.model_config)


def different_tensors(live: Any, fresh: Any) -> list[str]:
    """Names of parameters and buffers that differ, or that only one of them has."""
    ours, theirs = tensors_of(live), tensors_of(fresh)
    return [
        *(ours.keys() ^ theirs.keys()),
        *(name for name in ours.keys() & theirs.keys() if bits(ours[name]) != bits(theirs[name])),
    ]


def different_layers(live: Any, fresh: Any) -> list[str]:
    """Names of layers that compute something else of the unit matrix."""
    others = dict(fresh.named_modules())
    return [
        f"{name} computes"
        for name, layer in packed_layers(live)
        if bits(computed(layer)) != bits(computed(others[name]))
    ]


def packed_layers(model: Any) -> list[tuple[str, Any]]:
    return [(name, layer) for name, layer in model.named_modules() if hasattr(layer, "cpu_linear")]


def computed(layer: Any) -> Any:
    """What a layer makes of the unit matrix: each element of its weight."""
    import torch

    width = getattr(layer, "embedding_dim", None)
    if width is None:
        width = getattr(layer, "input_size_per_partition", layer.input_size)
    with torch.inference_mode():
        return layer.cpu_linear(torch.eye(width, dtype=layer.weight.dtype), layer.weight, None)


def hashes(model: Any) -> dict[str, str]:
    found = {name: digest(tensor) for name, tensor in tensors_of(model).items()}
    return found | {
        f"{name} computes": digest(computed(layer)) for name, layer in packed_layers(model)
    }


def digest(tensor: Any) -> str:
    return hashlib.sha256(bits(tensor)).hexdigest()


def tensors_of(model: Any) -> dict[str, Any]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def bits(tensor: Any) -> bytes:
    import torch

    plain = tensor.data.contiguous().view(-1)
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""
