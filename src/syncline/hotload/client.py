"""The client: tell a deployment which version to load, and wait until enough of it has."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from syncline.errors import CommitError, ConfigError, TransportTimeoutError
from syncline.format import strict_json
from syncline.hotload import identity as identities
from syncline.hotload import status
from syncline.hotload.dialect import ROLLOUT, Dialect
from syncline.hotload.http import Endpoint
from syncline.hotload.status import ReplicaStatus
from syncline.hotload.token import Token

PATH = "/hot_load/v1/models/hot_load"

Reset = bool | Literal["new_session"]

_NAMED_REPLICAS = 5


@dataclass(frozen=True, slots=True)
class Loaded:
    """A deployment that took a version.

    Attributes:
        identity: what it serves now.
        ready, replicas: how many replicas have it, of how many.
        seconds: how long that took.
    """

    identity: str
    ready: int
    replicas: int
    seconds: float


class HotLoadClient:
    """Tells one deployment, over HTTP, which version in its store to load.

    Everything it sends may be sent twice, so it repeats what a broken connection, a time-out or a 5xx
    answer lost, until a deadline. The token is never logged or shown, and no redirect is followed.

    Args:
        url: of the server, such as `https://api.example.com`; the API's path is added if it is not there.
        token, token_env: bearer token, or the environment variable that holds it; at most one of them.
        model, deployment: identifiers that a shared gateway routes by.
        dialect: what the server calls headers and checksums: `ROLLOUT`, `FIREWORKS`, or your own.
        headers: further headers for every request.
        attempt_timeout_s: longest that one attempt may take.

    Raises:
        ConfigError: an argument cannot be used.

    Example:
        >>> client = HotLoadClient("http://127.0.0.1:8081", token="s3cret")
        >>> client
        HotLoadClient('http://127.0.0.1:8081/hot_load/v1/models/hot_load', dialect='rollout')
        >>> client.session_headers("rollout-17")
        {'x-session-affinity': 'rollout-17'}
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | Token | None = None,
        token_env: str | None = None,
        model: str | None = None,
        deployment: str | None = None,
        dialect: Dialect = ROLLOUT,
        headers: Mapping[str, str] | None = None,
        attempt_timeout_s: float = 30.0,
    ) -> None:
        if token is not None and token_env is not None:
            raise ConfigError("token and token_env: expected at most one of them, found both")
        if token_env is not None:
            token = Token.from_env(token_env)
        self._token = Token(token) if isinstance(token, str) else token
        self._dialect = dialect
        shown = dict(headers) if headers is not None else {}
        for name, value in ((dialect.model_header, model), (dialect.deployment_header, deployment)):
            if value is not None:
                shown[name] = value
        self._endpoint = Endpoint(_full_url(url), shown, attempt_timeout_s=attempt_timeout_s)

    @property
    def url(self) -> str:
        """Where requests go."""
        return self._endpoint.url

    def __repr__(self) -> str:
        return f"HotLoadClient({self.url!r}, dialect={self._dialect.name!r})"

    def tell(
        self,
        identity: str,
        *,
        previous: str | None = None,
        compression_format: str = "zstd",
        checksum_format: str = "xxh3-128",
        reset_prompt_cache: Reset | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        """Tell the deployment to load a version; return when it has taken the order, not when it is done.

        Args:
            identity: name of the version's directory in the deployment's store.
            previous: for a delta, the identity that it is made on; None for a full version. After a
                resume the first delta is made on the original base.
            compression_format, checksum_format: of a delta, sent with `previous` alone; the dialect
                spells the checksum as the server does.
            reset_prompt_cache: True, False or `"new_session"`, sent as it is; None: not sent, the server
                does what it does by default.
            timeout_s: how long to go on trying.

        Raises:
            EndpointError: the deployment refused (`status` 401, 404, 409, ...), or failed to the end.
            PeerLostError, TransportTimeoutError: it could not be reached, or did not answer, to the end.
            ConfigError: an identity is not one path segment.
        """
        body: dict[str, Any] = {"identity": identities.check(identity, "identity")}
        if previous is not None:
            body["incremental_snapshot_metadata"] = {
                "previous_snapshot_identity": identities.check(previous, "previous"),
                "compression_format": compression_format,
                "checksum_format": self._dialect.checksum(checksum_format),
            }
        if reset_prompt_cache is not None:
            if reset_prompt_cache not in (True, False, "new_session"):
                raise ConfigError(
                    "reset_prompt_cache must be True, False, 'new_session' or None, found "
                    f"{reset_prompt_cache!r:.80}"
                )
            body["reset_prompt_cache"] = reset_prompt_cache
        self._request("POST", strict_json.dump(body), _deadline(timeout_s))

    def status(self, *, timeout_s: float = 60.0) -> tuple[ReplicaStatus, ...]:
        """Return what each replica says of itself.

        Raises:
            FormatError: the answer is not one of this API.
            EndpointError, PeerLostError, TransportTimeoutError: as for `tell`.
        """
        return self._status(_deadline(timeout_s))

    def wait(
        self,
        identity: str,
        *,
        ready_fraction: float = 1.0,
        min_replicas: int = 1,
        poll_s: float = 1.0,
        timeout_s: float = 600.0,
    ) -> Loaded:
        """Return when `ready_fraction` of the replicas are ready at `identity`.

        Args:
            ready_fraction: above 0, at most 1.
            min_replicas: fewer replicas than this in an answer are not enough, whatever they say.
            poll_s: pause between two questions.

        Raises:
            CommitError: so many replicas report an error that the fraction cannot be reached.
            TransportTimeoutError: not in `timeout_s`; says what the others wait for.
            FormatError, EndpointError, PeerLostError: as for `status`.
        """
        identities.check(identity, "identity")
        if not 0 < ready_fraction <= 1:
            raise ConfigError(
                f"ready_fraction must be above 0 and at most 1, found {ready_fraction}"
            )
        started_s = time.monotonic()
        deadline_s = _deadline(timeout_s)
        late = None
        while True:
            try:
                replicas = self._status(deadline_s)
            except TransportTimeoutError as error:
                if late is None:
                    raise
                raise late from error  # what the last answer said tells more than that none came now
            ready, count = status.ready_at(replicas, identity), len(replicas)
            if count >= max(1, min_replicas) and ready >= ready_fraction * count:
                return Loaded(identity, ready, count, time.monotonic() - started_s)
            failed = sum(r.stage == "error" for r in replicas)
            if count >= max(1, min_replicas) and count - failed < ready_fraction * count:
                raise CommitError(
                    f"{self.url}: {failed} of {count} replicas could not load {identity}: "
                    f"{_reasons(replicas, identity)}; they serve what they served before"
                )
            late = TransportTimeoutError(
                f"{self.url}: after {timeout_s:g} s {ready} of {count} replicas are ready at "
                f"{identity}, expected {ready_fraction:.0%} of at least {min_replicas}: "
                f"{_reasons(replicas, identity)}"
            )
            if time.monotonic() + poll_s >= deadline_s:
                raise late
            time.sleep(poll_s)

    @staticmethod
    def session_headers(session: str) -> dict[str, str]:
        """Return the header that keeps a rollout's requests on one replica, and on its prompt cache.

        Raises:
            ConfigError: `session` is empty, or has characters that a header cannot carry.
        """
        if not session or not all("!" <= character <= "~" for character in session):
            raise ConfigError(
                f"session must be printable ASCII without blanks, found {session!r:.80}"
            )
        return {"x-session-affinity": session}

    def _status(self, deadline_s: float) -> tuple[ReplicaStatus, ...]:
        return status.parse(self._request("GET", None, deadline_s), f"GET {self.url}")

    def _request(self, method: str, body: bytes | None, deadline_s: float) -> bytes:
        secret = {} if self._token is None else {"Authorization": self._token.header()}
        return self._endpoint.request(
            method, body, secret, limit_bytes=status.LIMIT_BYTES, deadline_s=deadline_s
        )


def _full_url(url: str) -> str:
    stripped = url.rstrip("/")
    return stripped if stripped.endswith(PATH) else stripped + PATH


def _deadline(timeout_s: float) -> float:
    if not timeout_s > 0:
        raise ConfigError(f"timeout_s must be above 0, found {timeout_s}")
    return time.monotonic() + timeout_s


def _reasons(replicas: Sequence[ReplicaStatus], identity: str) -> str:
    """Say of the first few replicas that are not there yet what they serve and why."""
    waiting = [r for r in replicas if not (r.readiness and r.identity == identity)]
    parts = [
        f"{'a replica' if r.name is None else r.name} serves {r.identity}"
        + ("" if r.reason is None else f" ({r.reason:.200})")
        for r in waiting[:_NAMED_REPLICAS]
    ]
    if len(waiting) > _NAMED_REPLICAS:
        parts.append(f"and {len(waiting) - _NAMED_REPLICAS} more")
    return "; ".join(parts) if parts else "no replica answered"
