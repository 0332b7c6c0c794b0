"""A server of another project as a process of its own, for the demo: started, waited for, asked, ended."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from syncline.demo.rollout import log_tail
from syncline.errors import ConfigError, PeerLostError, TransportTimeoutError
from syncline.hotload.http import Endpoint

START_S = 600.0
STEP_S = 300.0
LENGTH = 1024
"""Tokens of a sequence that a server is started for, if the model takes so many."""

_LIMIT_BYTES = 64 << 20
_LOOK_S = 0.5


class ServerProcess:
    """A server on a free port of the loopback interface; it loads while its caller goes on.

    Args:
        name: what messages call it; in small letters it is its package, and ends the name of its make target.
        command: given the port: what starts it.
        environment: what it has beside this process's own.
        log: file that takes everything that it prints.
        health: route that it answers once it is up.

    Attributes:
        url: where it listens.

    Raises:
        ConfigError: it is not installed beside this Python.
    Every method raises:
        PeerLostError: the server ended; the message ends with the last lines of its log.
        TransportTimeoutError: it did not start, or answer, in time.
    """

    def __init__(
        self,
        name: str,
        command: Callable[[int], Sequence[str]],
        environment: Mapping[str, str],
        log: Path,
        *,
        health: str,
    ) -> None:
        if importlib.util.find_spec(name.lower()) is None:
            raise ConfigError(
                f"the demo with {name} needs it beside {sys.executable}, found none; "
                f"run: make demo-{name.lower()}"
            )
        self._name, self._log, self._health = name, log, health
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                command(port),
                env={**os.environ, **environment},
                stdout=out,
                stderr=out,
                # It starts processes of its own; all of them are ended together.
                start_new_session=True,
            )
        self._endpoint = Endpoint(self.url, {}, attempt_timeout_s=STEP_S)
        self._is_up = False

    def wait_until_up(self) -> None:
        """Return when the server answers; at once, if it has before."""
        until_s = time.monotonic() + START_S
        while not self._is_up:
            with suppress(PeerLostError, TransportTimeoutError):
                self._request("GET", self._health, None, 5.0)
                self._is_up = True
            if self._process.poll() is not None:
                raise PeerLostError(
                    f"{self._name} (process {self._process.pid}) ended with status "
                    f"{self._process.returncode}; {log_tail(self._log)}"
                )
            if time.monotonic() > until_s:
                raise TransportTimeoutError(
                    f"{self._name} did not start within {START_S:.0f} s; {log_tail(self._log)}"
                )
            if not self._is_up:
                time.sleep(_LOOK_S)

    def ask(self, path: str, body: Mapping[str, Any]) -> Any:
        """Post JSON, and return the JSON that comes back; waits until the server is up."""
        self.wait_until_up()
        try:
            return json.loads(self._request("POST", path, json.dumps(body).encode(), STEP_S))
        except PeerLostError as error:
            raise PeerLostError(f"{error}; {log_tail(self._log)}") from error

    def close(self) -> None:
        """End the server and all its processes, and wait until they are gone."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(10)

    def _request(self, method: str, path: str, body: bytes | None, timeout_s: float) -> bytes:
        return self._endpoint.request_once(
            method,
            path,
            body,
            {},
            limit_bytes=_LIMIT_BYTES,
            deadline_s=time.monotonic() + timeout_s,
        )


def length_of(base: Path) -> int:
    """Return the length of sequences to start a server for, which `base` can take."""
    config = json.loads((base / "config.json").read_text())
    return min(LENGTH, int(config.get("max_position_embeddings", LENGTH)))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
