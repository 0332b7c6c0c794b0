"""A real SGLang server on the CPU, of the environment that `make sglang-env` makes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

START_S = 300.0
SOURCE = Path(__file__).resolve().parents[1] / "src"


class SglangServer:
    """Starts `sglang.launch_server` and ends it, with all its processes, in `close`."""

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        tp: int = 1,
        arguments: Sequence[str] = (),
        path: Sequence[Path] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        command = [sys.executable, "-m", "sglang.launch_server"]
        command += [*arguments_of(model, self.port, tp), *arguments]
        own = {**environment_of(tp), "PYTHONPATH": os.pathsep.join(map(str, (SOURCE, *path)))}
        kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**kept, **own, **(environment or {})},
                start_new_session=True,
            )

    def wait(self) -> SglangServer:
        """Return when the server answers."""
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended: {self.log.read_text()[-3000:]}")
            try:
                with urllib.request.urlopen(f"{self.url}/model_info", timeout=5):
                    return self
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        raise RuntimeError(f"no answer in {START_S} s: {self.log.read_text()[-3000:]}")

    def kill(self) -> None:
        """End it as a crash would, with all its processes."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self._process.wait()

    close = kill


def arguments_of(model: Path, port: int, tp: int) -> list[str]:
    """Return the arguments of a server on a CPU."""
    return [
        *("--model-path", str(model), "--host", "127.0.0.1", "--port", str(port)),
        *("--device", "cpu", "--attention-backend", "torch_native"),
        *("--sampling-backend", "pytorch", "--disable-overlap-schedule"),
        *("--disable-cuda-graph", "--mem-fraction-static", "0.5"),
        *("--max-total-tokens", "2048", "--max-running-requests", "4", "--tp", str(tp)),
        *("--skip-server-warmup", "--skip-tokenizer-init"),
    ]


def environment_of(tp: int) -> dict[str, str]:
    """Return what such a server needs in its environment."""
    own = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if tp > 1:
        own["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(rank) for rank in range(tp))
    return own


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
