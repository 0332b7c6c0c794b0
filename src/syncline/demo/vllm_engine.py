"""A real vLLM as the demo's rollout engine: a server process that follows the store by itself.

The trainer speaks with it over HTTP alone: prompts and completions by the OpenAI-compatible route, and the word
that there is a new version. Its workers fetch the weights from the store.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from syncline.demo.models import StopTokens, load_tokenizer
from syncline.demo.rollout import RolloutEngine, RolloutRequest, Synced, grouped
from syncline.demo.server_process import STEP_S, ServerProcess, length_of
from syncline.stores import open_store
from syncline.vllm.control import HttpControl
from syncline.vllm.server import VllmServer

WORKER = "syncline.demo.vllm_worker.DemoWorker"


class VllmEngine(RolloutEngine):
    """A `vllm serve` process of its own; see `ServerProcess` for what every method raises.

    Args:
        base: checkpoint directory to serve; the store's first version.
        store: path or URL of the store to follow.
        log: file that takes everything that vLLM prints.
    """

    def __init__(self, base: Path, store: str, log: Path) -> None:
        self._stops = StopTokens(load_tokenizer(base))
        environment = {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        self._process = ServerProcess(
            "vLLM", lambda port: _command(base, port), environment, log, health="/health"
        )
        self._control = HttpControl(self._process.url)
        self._server = VllmServer(self._control, open_store(store), _for_workers(store))

    def sync(self) -> Synced:
        """See `RolloutEngine.sync`; `verify` is what the pause takes beside the change of the weights."""
        self._process.wait_until_up()
        done = self._server.sync(None)
        pause = {"apply": done.apply_s, "verify": done.pause_s - done.apply_s}
        return Synced(done.version, {"fetch": done.stage_s, **pause})

    def rollout(self, request: RolloutRequest) -> list[list[list[int]]]:
        """See `RolloutEngine.rollout`."""
        answer = self._process.ask(
            "/v1/completions",
            {
                "prompt": [list(prompt) for prompt in request.prompts],
                "n": request.samples,
                "max_tokens": request.max_new_tokens,
                "stop_token_ids": self._stops(request.stop),
                "seed": request.seed,
                # All of these are said, since a checkpoint may bring other defaults along.
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": 0,
                "min_p": 0.0,
                "return_token_ids": True,
            },
        )
        return grouped("vLLM", request, [choice["token_ids"] for choice in answer["choices"]])

    def digests(self) -> dict[str, str]:
        """See `RolloutEngine.digests`; read in the worker, see `vllm_worker`."""
        [found] = self._control.call("demo_digests", timeout_s=STEP_S)
        self.unsigned_zeros = frozenset(found["through"])
        return dict(found["digests"])

    def close(self) -> None:
        """End the server and all its processes, and wait until they are gone."""
        self._process.close()


def start_vllm(base: Path, store: str, log: Path) -> RolloutEngine:
    """Start a vLLM on a checkpoint and a store; see `syncline.demo.session.StartEngine`."""
    return VllmEngine(base, store, log)


def _command(base: Path, port: int) -> Sequence[str]:
    return [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(base)),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "bfloat16", "--max-model-len", str(length_of(base)), "--enforce-eager"),
        *("--generation-config", "vllm", "--disable-uvicorn-access-log"),
        *("--weight-transfer-config", json.dumps({"backend": "syncline"})),
        *("--worker-extension-cls", WORKER),
    ]


def _for_workers(store: str) -> str:
    return store if "://" in store else str(Path(store).absolute())
