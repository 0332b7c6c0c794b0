"""How one vLLM is told to pause, to call its workers' methods, to forget its caches, and to go on."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any, Literal, Protocol
from urllib.parse import urlencode

from syncline.errors import EndpointError, FormatError
from syncline.format import strict_json
from syncline.hotload import Token
from syncline.hotload.http import Endpoint

PauseMode = Literal["keep", "wait", "abort"]
Answers = list[Mapping[str, Any]]

_LIMIT_BYTES = 8 << 20


class Control(Protocol):
    """One running vLLM; every call returns when it is done, or raises after `timeout_s`."""

    def call(self, method: str, *arguments: str, timeout_s: float) -> Answers:
        """Return what each worker's method of this name answers; see `extension.SynclineWorker`.

        Raises:
            TransportError: the vLLM cannot be reached, has no such method, or does not answer in time.
        """

    def engines(self, timeout_s: float) -> int:
        """Return how many engines generate, of which `call` returns the answers of the first alone."""

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        """Hold generation, and clear the caches: `keep`, `wait` for or `abort` what runs."""

    def resume(self, timeout_s: float) -> None:
        """Go on generating; harmless if it was not paused."""

    def paused(self, timeout_s: float) -> bool:
        """Tell whether generation is held."""

    def reset_caches(self, timeout_s: float) -> None:
        """Make the prefix cache, the multimodal and the encoder cache forget what older weights computed.

        Raises:
            EndpointError: some of it is still there.
        """

    def label(self, timeout_s: float) -> str:
        """Return the weight version that outputs carry."""

    def set_label(self, label: str, timeout_s: float) -> None:
        """Make outputs from now on carry this weight version."""


class HttpControl:
    """A `vllm serve` with `VLLM_SERVER_DEV_MODE=1`, through its own routes.

    Args:
        url: of the server, such as `http://127.0.0.1:8000`.
        token: bearer token that goes with every request; None: none.

    Raises:
        ConfigError: the URL cannot be used.
    """

    def __init__(self, url: str, token: Token | None = None) -> None:
        self._endpoint = Endpoint(url.rstrip("/"), {}, attempt_timeout_s=24 * 3600.0)
        self._secret = {} if token is None else {"Authorization": token.header()}

    def call(self, method: str, *arguments: str, timeout_s: float) -> Answers:
        """See `Control.call`: `POST /collective_rpc`."""
        # vLLM's own time limit would leave answers behind that later calls take for theirs.
        body = {"method": method, "args": list(arguments)}
        answer = self._ask("POST", "/collective_rpc", body, timeout_s)
        results = answer.get("results")
        if not isinstance(results, list) or not all(isinstance(one, dict) for one in results):
            raise FormatError(
                f"{method}: expected an answer of each worker, found {answer!r:.200}; start vLLM with "
                '--weight-transfer-config \'{"backend": "syncline"}\''
            )
        return results

    def engines(self, timeout_s: float) -> int:
        """See `Control.engines`: `GET /server_info`."""
        answer = self._ask("GET", "/server_info", None, timeout_s, {"config_format": "json"})
        config = answer.get("vllm_config")
        parallel = config.get("parallel_config") if isinstance(config, dict) else None
        given = parallel if isinstance(parallel, dict) else {}
        size, is_alone = given.get("data_parallel_size"), given.get("data_parallel_external_lb")
        if type(size) is not int or not isinstance(is_alone, bool):
            raise FormatError(
                f"{self._endpoint.url}/server_info: expected vllm_config.parallel_config with data_parallel_size and "
                f"data_parallel_external_lb, found {parallel!r:.200}"
            )
        return 1 if is_alone else size

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        """See `Control.pause`: `POST /pause`."""
        query = {"mode": mode, "clear_cache": "true"}
        answer = self._ask("POST", "/pause", None, timeout_s, query)
        self._check("/pause", answer, {"status": "paused"})

    def resume(self, timeout_s: float) -> None:
        """See `Control.resume`: `POST /resume`."""
        answer = self._ask("POST", "/resume", None, timeout_s)
        self._check("/resume", answer, {"status": "resumed"})

    def paused(self, timeout_s: float) -> bool:
        """See `Control.paused`: `GET /is_paused`."""
        found = self._ask("GET", "/is_paused", None, timeout_s).get("is_paused")
        if not isinstance(found, bool):
            raise FormatError(
                f"{self._endpoint.url}/is_paused: expected true or false, found {found!r:.80}"
            )
        return found

    def reset_caches(self, timeout_s: float) -> None:
        """See `Control.reset_caches`: three routes."""
        everything = {"reset_running_requests": "true", "reset_external": "true"}
        answer = self._ask("POST", "/reset_prefix_cache", None, timeout_s, everything)
        meaning = ": blocks of the prefix cache are still held"
        self._check("/reset_prefix_cache", answer, {"success": True}, meaning)
        self._ask("POST", "/reset_mm_cache", None, timeout_s)
        self._ask("POST", "/reset_encoder_cache", None, timeout_s)

    def label(self, timeout_s: float) -> str:
        """See `Control.label`: `GET /weight_info`."""
        found = self._ask("GET", "/weight_info", None, timeout_s).get("weight_version")
        if not isinstance(found, str):
            raise FormatError(
                f"{self._endpoint.url}/weight_info: expected a string, found {found!r:.80}"
            )
        return found

    def set_label(self, label: str, timeout_s: float) -> None:
        """See `Control.set_label`: `POST /update_weight_version`."""
        answer = self._ask("POST", "/update_weight_version", {"new_version": label}, timeout_s)
        self._check("/update_weight_version", answer, {"success": True})

    def _check(
        self, path: str, answer: Mapping[str, Any], expected: Mapping[str, Any], meaning: str = ""
    ) -> None:
        """Check that an answer says that it was done: one without it may come from something in between."""
        if any(answer.get(key) != value for key, value in expected.items()):
            raise EndpointError(
                f"{self._endpoint.url}{path}: expected {expected}, found {answer!r:.200}{meaning}",
                status=200,
            )

    def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        timeout_s: float,
        query: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        raw = self._endpoint.request_once(
            method,
            path if query is None else f"{path}?{urlencode(query)}",
            None if body is None else json.dumps(body).encode(),
            self._secret,
            limit_bytes=_LIMIT_BYTES,
            deadline_s=time.monotonic() + timeout_s,
        )
        if not raw:
            return {}
        where = f"{self._endpoint.url}{path}"
        return strict_json.members(strict_json.parse(raw, where, limit_bytes=_LIMIT_BYTES), where)


class OfflineControl:
    """A `vllm.LLM` in this process, between two calls of `generate`: nothing runs, so nothing is paused.

    Args:
        llm: made with `weight_transfer_config={"backend": "syncline"}`.

    Nothing is given up after `timeout_s`: a call in one process cannot be.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def call(self, method: str, *arguments: str, timeout_s: float) -> Answers:
        """See `Control.call`."""
        answers: Answers = self._llm.collective_rpc(method, args=arguments)
        return answers

    def engines(self, timeout_s: float) -> int:
        """See `Control.engines`."""
        return int(self._llm.llm_engine.vllm_config.parallel_config.data_parallel_size)

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        """Do nothing."""

    def resume(self, timeout_s: float) -> None:
        """Do nothing."""

    def paused(self, timeout_s: float) -> bool:
        """Return False."""
        return False

    def reset_caches(self, timeout_s: float) -> None:
        """See `Control.reset_caches`."""
        if not self._llm.reset_prefix_cache(reset_connector=True):
            raise EndpointError("the prefix cache of this LLM could not be reset", status=200)
        self._llm.llm_engine.reset_mm_cache()
        self._llm.llm_engine.reset_encoder_cache()

    def label(self, timeout_s: float) -> str:
        """See `Control.label`."""
        return str(self._llm.get_weight_version())

    def set_label(self, label: str, timeout_s: float) -> None:
        """See `Control.set_label`."""
        self._llm.update_weight_version(label)
