"""A real vLLM as the demo's rollout engine: a server process that follows the store by itself.

The trainer speaks with it over HTTP alone: prompts and completions by the OpenAI-compatible route, and the word
that there is a new version. Its workers fetch the weights from the store.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from syncline.demo.models import StopTokens, load_tokenizer
from syncline.demo.rollout import RolloutEngine, RolloutRequest, Synced, log_tail
from syncline.errors import ConfigError, FormatError, PeerLostError, TransportTimeoutError
from syncline.hotload.http import Endpoint
from syncline.stores import open_store
from syncline.vllm.control import HttpControl
from syncline.vllm.server import VllmServer

START_S = 600.0
STEP_S = 300.0
LENGTH = 1024
"""Tokens of a sequence that the server is started for, if the model takes so many."""

WORKER = "syncline.demo.vllm_worker.DemoWorker"
_LIMIT_BYTES = 64 << 20
_LOOK_S = 0.5


class VllmEngine(RolloutEngine):
    """A `vllm serve` process of its own, on a free port of the loopback interface.

    It starts at once and loads while the trainer does; the first `sync` waits for it.

    Args:
        base: checkpoint directory to serve; the store's first version.
        store: path or URL of the store to follow.
        log: file that takes everything that vLLM prints.

    Raises:
        ConfigError: vLLM is not installed beside this Python.
        PeerLostError: the server ended; the message ends with the last lines of its log.
        TransportTimeoutError: it did not start, or answer, in time.
    """

    def __init__(self, base: Path, store: str, log: Path) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise ConfigError(
                f"the demo with vLLM needs vLLM beside {sys.executable}, found none; run: make demo-vllm"
            )
        self._log = log
        self._stops = StopTokens(load_tokenizer(base))
        port = _free_port()
        self._url = f"http://127.0.0.1:{port}"
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                _command(base, port),
                env={**os.environ, **_environment()},
                stdout=out,
                stderr=out,
                # vLLM starts processes of its own; all of them are ended together.
                start_new_session=True,
            )
        self._endpoint = Endpoint(self._url, {}, attempt_timeout_s=STEP_S)
        self._control = HttpControl(self._url)
        self._server = VllmServer(self._control, open_store(store), _for_workers(store))
        self._is_up = False

    def sync(self) -> Synced:
        """See `RolloutEngine.sync`; `verify` is what the pause takes beside the change of the weights."""
        self._wait_until_up()
        done = self._server.sync(None)
        pause = {"apply": done.apply_s, "verify": done.pause_s - done.apply_s}
        return Synced(done.version, {"fetch": done.stage_s, **pause})

    def rollout(self, request: RolloutRequest) -> list[list[list[int]]]:
        """See `RolloutEngine.rollout`."""
        self._wait_until_up()
        answer = self._ask(
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
        completions = [choice["token_ids"] for choice in answer["choices"]]
        expected = len(request.prompts) * request.samples
        if len(completions) != expected or not all(completions):
            raise FormatError(
                f"vLLM: expected {expected} completions, none of them empty, found {len(completions)}"
            )
        return [
            completions[at : at + request.samples] for at in range(0, expected, request.samples)
        ]

    def digests(self) -> dict[str, str]:
        """See `RolloutEngine.digests`; read in the worker, see `vllm_worker`."""
        [found] = self._control.call("demo_digests", timeout_s=STEP_S)
        self.unsigned_zeros = frozenset(found["through"])
        return dict(found["digests"])

    def close(self) -> None:
        """End the server and all its processes, and wait until they are gone."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(10)

    def _wait_until_up(self) -> None:
        until_s = time.monotonic() + START_S
        while not self._is_up:
            with suppress(PeerLostError, TransportTimeoutError):
                self._request("GET", "/health", None, 5.0)
                self._is_up = True
            if self._process.poll() is not None:
                raise PeerLostError(
                    f"vLLM (process {self._process.pid}) ended with status {self._process.returncode}; "
                    f"{log_tail(self._log)}"
                )
            if time.monotonic() > until_s:
                raise TransportTimeoutError(
                    f"vLLM did not start within {START_S:.0f} s; {log_tail(self._log)}"
                )
            if not self._is_up:
                time.sleep(_LOOK_S)

    def _ask(self, path: str, body: Mapping[str, Any]) -> Any:
        try:
            return json.loads(self._request("POST", path, json.dumps(body).encode(), STEP_S))
        except PeerLostError as error:
            raise PeerLostError(f"{error}; {log_tail(self._log)}") from error

    def _request(self, method: str, path: str, body: bytes | None, timeout_s: float) -> bytes:
        return self._endpoint.request_once(
            method,
            path,
            body,
            {},
            limit_bytes=_LIMIT_BYTES,
            deadline_s=time.monotonic() + timeout_s,
        )


def start_vllm(base: Path, store: str, log: Path) -> RolloutEngine:
    """Start a vLLM on a checkpoint and a store; see `syncline.demo.session.StartEngine`."""
    return VllmEngine(base, store, log)


def _command(base: Path, port: int) -> Sequence[str]:
    config = json.loads((base / "config.json").read_text())
    length = min(LENGTH, int(config.get("max_position_embeddings", LENGTH)))
    return [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(base)),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "bfloat16", "--max-model-len", str(length), "--enforce-eager"),
        *("--generation-config", "vllm", "--disable-uvicorn-access-log"),
        *("--weight-transfer-config", json.dumps({"backend": "syncline"})),
        *("--worker-extension-cls", WORKER),
    ]


def _environment() -> Mapping[str, str]:
    """Return what the server's environment has beside this process's own."""
    return {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _for_workers(store: str) -> str:
    return store if "://" in store else str(Path(store).absolute())


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
