"""SGLang's own model classes in this process, without a server: `sglang_in_process.py MODEL DIRECTORY [ARGUMENT...]`.

Changes are put in as a rank puts them in, and compared with a model that SGLang loads anew; so is what an order takes back.
"""

from __future__ import annotations

import json
import os
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

import sglang_probe
import sglang_tiny as tiny
import syncline
from sglang_real import arguments_of, environment_of
from syncline.engines import CheckpointDir
from syncline.layouts import EngineMesh, engine_layout
from syncline.sglang import staged, worker
from syncline.sglang.live import RankWeights
from syncline.sglang.mirror import Mirror
from syncline.sglang.proved import prints
from syncline.sglang.staged import Act, Answer, Order

DELTAS = 10


class InProcess:
    """One rank of a model, its trainer, and what a follower keeps beside it."""

    def __init__(self, name: str, root: Path, arguments: Sequence[str]) -> None:
        self.config = tiny.MODELS[name]
        self.base = tiny.write(root / "base", self.config, seed=1)
        self.weights = load_file(self.base / "model.safetensors")
        self.store = syncline.open_store(str(root / "run"))
        self.publisher = syncline.Publisher(self.store, base=self.base)
        self.checkpoint = CheckpointDir(root / "model")
        self.staging = root / "staging"
        self.mirror = Mirror(self.checkpoint, self.staging)
        self.receiver = syncline.Receiver(self.store, self.mirror)
        self.rng = np.random.default_rng(7)
        self.publish()
        self.receiver.sync()
        self.settle()
        self._start([*arguments_of(root / "model", port=0, tp=1), *arguments])
        self.model = self.loaded()

    def settle(self) -> None:
        held = self.mirror.held()
        assert held is not None
        self.settled = held
        self.mirror.settle(held)

    def publish(self) -> None:
        self.publisher.publish(self.weights)

    def train(self) -> None:
        for tensor in self.weights.values():
            flat = tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()]).view(-1)
            at = self.rng.choice(flat.numel(), 1 + flat.numel() // 50, replace=False)
            flat[at] ^= int(self.rng.integers(1, 32))
        self.publish()
        self.receiver.sync()

    def order(self, act: Act) -> Answer:
        """Let the rank do what a follower would order."""
        pending = tuple(self.mirror.pending or ())
        held = self.mirror.held()
        assert held is not None
        old, new = prints(self.settled), prints(held)
        pairs = {name: (old[name], new[name]) for name in old}
        order = Order(uuid.uuid4().hex, act, str(self.checkpoint.path), pending, pairs)
        staged.write_order(self.staging, order)
        answer = worker.obey(self.model, self.staging, 0)
        assert answer.error is None, answer.error
        return answer

    def loaded(self) -> Any:
        """Return the checkpoint as SGLang loads it when it starts."""
        from sglang.srt.configs.device_config import DeviceConfig
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.model_loader.loader import get_model_loader

        loader = get_model_loader(LoadConfig(), self._model_config)
        return loader.load_model(model_config=self._model_config, device_config=DeviceConfig("cpu"))

    def check(self) -> None:
        assert held(self.model) == held(self.loaded())

    def _start(self, arguments: list[str]) -> None:
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.distributed.bootstrap import init_layer_runtime, init_parallel_runtime
        from sglang.srt.eplb import expert_location
        from sglang.srt.runtime_context import SpawnRanks, publish
        from sglang.srt.server_args import prepare_server_args

        given = prepare_server_args(arguments)
        publish(given, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
        init_parallel_runtime(server_args=given, device="cpu", dist_port=_free_port())
        self._model_config = ModelConfig.from_server_args(given)
        init_layer_runtime(model_config=self._model_config)
        expert_location.set_global_expert_location_metadata(
            expert_location.compute_initial_expert_location_metadata(
                model_config=self._model_config, moe_ep_rank=0
            )
        )


def held(model: Any) -> dict[str, bytes]:
    """Return the bits of every parameter, and of what the model derives from them."""
    found = dict(model.named_parameters())
    for prefix, module in model.named_modules():
        for name in ("w_kc", "w_vc"):
            if getattr(module, name, None) is not None:
                found[f"{prefix}.{name}"] = getattr(module, name)
    return {
        name: tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in found.items()
    }


def main(name: str, root: Path, arguments: Sequence[str]) -> None:
    """Run all checks; `arguments` are more of the server's."""
    os.environ.update(environment_of(1), SYNCLINE_SGLANG_STAGING=str(root / "staging"))
    rank = InProcess(name, root, arguments)
    checkpoint = worker.CheckpointFiles(rank.checkpoint.path)
    learned = RankWeights(rank.model, checkpoint).learned
    assert not learned.unmapped, learned.unmapped
    if not arguments:  # of redundant experts the tables know nothing
        table = engine_layout(
            rank.config, EngineMesh(), checkpoint=checkpoint.metas().values(), engine="sglang"
        )
        ours = sglang_probe.scattered(learned.layout, learned.placement)
        assert ours == sglang_probe.scattered(table, table.placements[0])
    for number in range(DELTAS):
        if name == "qwen3_moe":
            sglang_probe.rebalanced(rank.model, [])
            [noted] = sglang_probe.read(rank.staging, 1)
            assert noted["before"] != noted["now"]
        before = held(rank.model)
        rank.train()
        assert not rank.order("check").dense
        assert held(rank.model) == before
        assert rank.order("apply").written > 0
        rank.check()
        if number == 0:
            rank.order("undo")
            assert held(rank.model) == before
            rank.order("apply")
        rank.settle()
    derived = sum(".w_" in name for name in held(rank.model))
    sys.stdout.write(json.dumps({"derived": derived}) + "\n")


def _free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
