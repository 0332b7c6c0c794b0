"""A real SGLang as the demo's rollout engine: a server process that is kept on the store, changed in place.

The trainer speaks with it over HTTP alone. What keeps it on the store runs here, as it would beside any server: it
pulls a version into a checkpoint directory, then lets the server's rank write the changes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from syncline.demo.models import StopTokens, load_tokenizer
from syncline.demo.rollout import RolloutEngine, RolloutRequest, Synced, grouped
from syncline.demo.server_process import STEP_S, ServerProcess, length_of
from syncline.demo.sglang_worker import LOADER as DIGESTS
from syncline.demo.sglang_worker import read_digests
from syncline.engines import CheckpointDir
from syncline.errors import BaseVersionError
from syncline.sglang.change import LOADER, NOTHING
from syncline.sglang.control import SglangHttp
from syncline.sglang.server import SglangServer
from syncline.stores import open_store

TOKENS = 16384
"""Tokens of all sequences together that the server keeps keys and values of."""


class SglangEngine(RolloutEngine):
    """A `sglang.launch_server` process of its own; see `ServerProcess` for what every method raises.

    Args:
        base: checkpoint directory to serve; the store's first version.
        store: path or URL of the store to follow.
        log: file that takes everything that SGLang prints; the checkpoint that goes ahead of the server lies beside it.
    """

    def __init__(self, base: Path, store: str, log: Path) -> None:
        self._stops = StopTokens(load_tokenizer(base))
        self._staging = log.absolute().with_name("staging")
        environment = {
            "SYNCLINE_SGLANG_STAGING": str(self._staging),
            "SGLANG_USE_CPU_ENGINE": "1",
            "HF_HUB_OFFLINE": "1",
        }
        self._process = ServerProcess(
            "SGLang", lambda port: _command(base, port), environment, log, health="/model_info"
        )
        self._control = SglangHttp(self._process.url)
        self._server = SglangServer(
            self._control,
            open_store(store),
            CheckpointDir(log.with_name("checkpoint")),
            self._staging,
        )

    def sync(self) -> Synced:
        """See `RolloutEngine.sync`; `verify` is what the pause takes beside the change of the weights."""
        self._process.wait_until_up()
        done = self._server.sync()
        held = self._server.held()
        if held is None:
            raise BaseVersionError(
                "SGLang holds no version of the store after it was brought to one"
            )
        if done is None:
            return Synced(held.version, {})
        fetch_s = self._server.figures()["syncline_stage_seconds"]
        return Synced(
            held.version,
            {"fetch": fetch_s, "apply": done.send_s, "verify": done.pause_s - done.send_s},
        )

    def rollout(self, request: RolloutRequest) -> list[list[list[int]]]:
        """See `RolloutEngine.rollout`; on a CPU, SGLang heeds no seed of a request."""
        answers = self._process.ask(
            "/generate",
            {
                "input_ids": [list(prompt) for prompt in request.prompts],
                "sampling_params": {
                    "n": request.samples,
                    "max_new_tokens": request.max_new_tokens,
                    "stop_token_ids": self._stops(request.stop),
                    # All of these are said, since a checkpoint may bring other defaults along.
                    "temperature": 1.0,
                    "top_p": 1.0,
                    "top_k": -1,
                    "min_p": 0.0,
                },
            },
        )
        return grouped("SGLang", request, [answer["output_ids"] for answer in answers])

    def digests(self) -> dict[str, str]:
        """See `RolloutEngine.digests`; read in the rank, see `sglang_worker`."""
        self._control.begin(STEP_S)
        self._control.load_tensors([NOTHING], DIGESTS, STEP_S)
        self._control.end(STEP_S)
        return read_digests(self._staging)

    def close(self) -> None:
        """End the server and all its processes, and wait until they are gone."""
        self._server.close()
        self._process.close()


def start_sglang(base: Path, store: str, log: Path) -> RolloutEngine:
    """Start an SGLang on a checkpoint and a store; see `syncline.demo.session.StartEngine`."""
    return SglangEngine(base, store, log)


def _command(base: Path, port: int) -> Sequence[str]:
    return [
        *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(base)),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--device", "cpu"),
        *("--context-length", str(length_of(base)), "--max-total-tokens", str(TOKENS)),
        *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
        *("--disable-overlap-schedule", "--disable-cuda-graph", "--mem-fraction-static", "0.5"),
        *("--skip-server-warmup", "--skip-tokenizer-init"),
        *("--custom-weight-loader", LOADER, DIGESTS),
    ]
