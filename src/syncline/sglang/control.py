"""One running SGLang server, told over its own HTTP routes what to do; nothing is ever asked twice."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from syncline.errors import EndpointError, FormatError
from syncline.format import strict_json
from syncline.hotload.http import Endpoint
from syncline.hotload.token import Token
from syncline.sglang import answers
from syncline.sglang.answers import LIMIT_BYTES, Checksums, Server
from syncline.sglang.versions import Rules, rules_of

PauseMode = Literal["retract", "in_place", "abort"]

PULL = "/pull_weights"
"""A route of patched servers; no release has it."""

READY = "/ready"
"""It answers 503 while generation is held; newer releases have it."""

_NOT_FOUND, _NOT_READY = 404, 503

_LONGEST_S = 24 * 3600.0


class SglangHttp:
    """The routes of one server that Syncline uses, each with a deadline.

    Every call returns when the server has done it, and raises after `timeout_s` seconds. A call that fails
    is not repeated: whoever asked knows what may be repeated.

    Args:
        url: such as `http://127.0.0.1:30000`.
        token: the server's `--admin-api-key` or `--api-key`; None: none.

    Raises:
        ConfigError: the URL cannot be used.

    All methods raise:
        EndpointError: the server refused; the message has its reason.
        PeerLostError, TransportTimeoutError: it could not be reached, or did not answer in time.
    """

    def __init__(self, url: str, token: Token | None = None) -> None:
        self._endpoint = Endpoint(url.rstrip("/"), {}, attempt_timeout_s=_LONGEST_S)
        self._secret = {} if token is None else {"Authorization": token.header()}

    @property
    def url(self) -> str:
        """Where the server listens."""
        return self._endpoint.url

    def server(self, timeout_s: float) -> Server:
        """Return what the server says of itself.

        Raises:
            FormatError: the answer is not one of SGLang's.
        """
        about = self._ask("GET", "/server_info", None, timeout_s)
        return answers.server(about, self._ask("GET", "/model_info", None, timeout_s))

    def rules(self, version: str, timeout_s: float) -> Rules:
        """Return how this server wants to be updated, by version and routes; see `versions.rules_of`."""
        return rules_of(version, self._routes(timeout_s))

    def has(self, route: str, timeout_s: float) -> bool:
        """Tell whether the server has a route."""
        return route in self._routes(timeout_s)

    def pull(self, local: str, source: str, version: int, timeout_s: float) -> None:
        """Let every host bring its local checkpoint to a version of a store in the slime layout."""
        body = {
            "local_checkpoint_dir": local,
            "source_dir": source,
            "target_version": version,
        }
        self._ask("POST", PULL, body, timeout_s)

    def label(self, timeout_s: float) -> str:
        """Return the weight version that answers carry."""
        found = answers.document(
            self._ask("GET", "/model_info", None, timeout_s), "/model_info"
        ).get("weight_version")
        if not isinstance(found, str):
            raise FormatError(f"/model_info.weight_version must be a string, found {found!r:.80}")
        return found

    def set_label(self, label: str, timeout_s: float) -> None:
        """Make answers carry this weight version from now on; no request is aborted."""
        # Not said, the server aborts all requests.
        body = {"new_version": label, "abort_all_requests": False}
        self._do("/update_weight_version", body, timeout_s)

    def pause(self, mode: PauseMode, timeout_s: float) -> None:
        """Hold generation: `retract` what runs into the queue, freeze it `in_place`, or `abort` it."""
        self._tell("/pause_generation", {"mode": mode}, timeout_s)

    def resume(self, timeout_s: float) -> None:
        """Go on generating; harmless if it was not held."""
        self._tell("/continue_generation", {}, timeout_s)

    def is_paused(self, timeout_s: float) -> bool | None:
        """Tell whether generation is held; None where the server cannot tell, since it has no route `/ready`."""
        try:
            self._ask("GET", READY, None, timeout_s)
        except EndpointError as error:
            if error.status not in (_NOT_FOUND, _NOT_READY):
                raise
            return None if error.status == _NOT_FOUND else True
        return False

    def begin(self, timeout_s: float) -> None:
        """Open the session in which tensors are taken."""
        self._do("/begin_weight_update", {}, timeout_s)

    def end(self, timeout_s: float) -> None:
        """Close it."""
        self._do("/end_weight_update", {}, timeout_s)

    def flush(self, timeout_s: float) -> None:
        """Forget every cached prefix."""
        self._tell("/flush_cache", {}, timeout_s)

    def checksums(self, timeout_s: float) -> Checksums:
        """Return SGLang's checksums of what every rank holds. Cost: it reads every weight."""
        return answers.checksums(
            self._ask("POST", "/weights_checker", {"action": "checksum"}, timeout_s)
        )

    def load_directory(self, path: str, timeout_s: float) -> None:
        """Load the tensors of a checkpoint directory: all of them, or those that are in it.

        The server takes shapes on trust and dies of wrong ones; the caller has checked them.
        """
        self._do("/update_weights_from_disk", {"model_path": path, "flush_cache": False}, timeout_s)

    def load_tensors(
        self, payloads: Sequence[str], load_format: str | None, timeout_s: float
    ) -> None:
        """Hand tensors over: one payload in base64 for each rank.

        Args:
            load_format: `flattened_bucket`, or the import path of a loader in `Server.loaders`; anything
                else kills the server.
        """
        body = {
            "serialized_named_tensors": list(payloads),
            "load_format": load_format,
            "flush_cache": False,
        }
        self._do("/update_weights_from_tensor", body, timeout_s)

    def join_group(self, body: Mapping[str, Any], timeout_s: float) -> None:
        """Make the ranks join a process group; returns when all of its members have."""
        self._do("/init_weights_update_group", body, timeout_s)

    def leave_group(self, name: str, timeout_s: float) -> None:
        """Make the ranks leave it."""
        self._do("/destroy_weights_update_group", {"group_name": name}, timeout_s)

    def receive_tensors(self, body: Mapping[str, Any], timeout_s: float) -> None:
        """Make the ranks take part in a broadcast; returns when it is over."""
        self._do("/update_weights_from_distributed", {**body, "flush_cache": False}, timeout_s)

    def _routes(self, timeout_s: float) -> dict[str, Any]:
        schema = answers.document(
            self._ask("GET", "/openapi.json", None, timeout_s), "/openapi.json"
        )
        return strict_json.members(schema.get("paths"), "/openapi.json.paths")

    def _do(self, path: str, body: Mapping[str, Any], timeout_s: float) -> None:
        """Ask for something that the server answers with `success`."""
        answer = answers.document(self._ask("POST", path, body, timeout_s), path)
        if answer.get("success") is not True:
            raise EndpointError(
                f"{self.url}{path}: expected success, found {answer!r:.300}", status=200
            )

    def _tell(self, path: str, body: Mapping[str, Any], timeout_s: float) -> None:
        """Ask for something that the server answers with a sentence, or with what it did."""
        raw = self._ask("POST", path, body, timeout_s)
        try:
            answers.check_not_denied(raw, path)
        except FormatError as error:
            raise EndpointError(f"{self.url}{error}", status=200) from error

    def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float
    ) -> bytes:
        return self._endpoint.request_once(
            method,
            path,
            None if body is None else strict_json.dump(dict(body)),
            self._secret,
            limit_bytes=LIMIT_BYTES,
            deadline_s=time.monotonic() + timeout_s,
        )
