"""One HTTP endpoint, asked until it answers or a deadline passes.

Every request of the API may be repeated, so a broken connection, a time-out and a server's own failure are
tried again, each time after a longer pause. Redirects are not followed: a token goes to nobody else.
"""

from __future__ import annotations

import math
import ssl
import time
from collections.abc import Mapping
from urllib.parse import SplitResult, urlsplit

from syncline.errors import (
    ConfigError,
    EndpointError,
    PeerLostError,
    TransportError,
    TransportTimeoutError,
)
from syncline.hotload.exchange import Answer, TcpAddress, exchange

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
_WORTH_REPEATING = frozenset({408, 425, 429, 500, 502, 503, 504})
_SHOWN_BYTES = 300


class Endpoint:
    """A URL with the headers that go with every request to it; may be used by several threads.

    Args:
        url: `http://` or `https://`, without user or password.
        attempt_timeout_s: longest that one attempt may take.

    Raises:
        ConfigError: the URL or a header cannot be used.
    """

    def __init__(self, url: str, headers: Mapping[str, str], *, attempt_timeout_s: float) -> None:
        parts = check_url(url)
        if not attempt_timeout_s > 0:
            raise ConfigError(f"attempt_timeout_s must be above 0, found {attempt_timeout_s}")
        for name, value in headers.items():
            if not value or not all(" " <= character <= "~" for character in value):
                raise ConfigError(f"header {name}: expected printable ASCII, found {value!r:.80}")
        self.url = url
        self._origin = f"{parts.scheme}://{parts.netloc}"
        self._address = _address(parts)
        self._headers = {"Host": parts.netloc, "Accept-Encoding": "identity", **headers}
        self._attempt_timeout_s = attempt_timeout_s

    def request(
        self,
        method: str,
        body: bytes | None,
        secret_headers: Mapping[str, str],
        *,
        limit_bytes: int,
        deadline_s: float,
    ) -> bytes:
        """Return the body of a 2xx answer.

        Args:
            body: JSON text; None for none.
            secret_headers: sent with the others, and kept nowhere.
            limit_bytes: longest answer that is read.
            deadline_s: on the clock of `time.monotonic`; nothing is tried after it.

        Raises:
            EndpointError: it refused (at once), or answered that it cannot (until the deadline).
            PeerLostError: it could not be reached, or cut the connection, until the deadline.
            TransportTimeoutError: it did not answer in time.
            TransportError: the answer is too long, or TLS failed.
        """
        headers = {**self._headers, **secret_headers}
        if body is not None:
            headers["Content-Type"] = "application/json"
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return self._attempt(method, self.url, body, headers, limit_bytes, deadline_s)
            except (PeerLostError, TransportTimeoutError) as error:
                failure: TransportError = error
            except _RetryLaterError as error:
                failure = error
                pause_s = max(pause_s, error.after_s)
            if time.monotonic() + pause_s >= deadline_s:
                raise failure
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def request_once(
        self,
        method: str,
        path: str,
        body: bytes | None,
        secret_headers: Mapping[str, str],
        *,
        limit_bytes: int,
        deadline_s: float,
    ) -> bytes:
        """Return the body of a 2xx answer to one attempt, for what must not be done twice; see `request`.

        Args:
            path: what follows the URL, with a query.
        """
        headers = {**self._headers, **secret_headers}
        if body is not None:
            headers["Content-Type"] = "application/json"
        return self._attempt(method, self.url + path, body, headers, limit_bytes, deadline_s)

    def _attempt(
        self,
        method: str,
        url: str,
        body: bytes | None,
        headers: Mapping[str, str],
        limit_bytes: int,
        deadline_s: float,
    ) -> bytes:
        target = url.removeprefix(self._origin)
        answer = exchange(
            self._address,
            f"{method} {url}",
            method,
            target if target.startswith("/") else f"/{target}",
            body,
            headers,
            limit_bytes=limit_bytes,
            deadline_s=min(deadline_s, time.monotonic() + self._attempt_timeout_s),
        )
        if 200 <= answer.status < 300:
            return answer.body
        raise _refusal(f"{method} {url}", answer)


class _RetryLaterError(EndpointError):
    """The endpoint cannot serve the request now."""

    def __init__(self, message: str, *, status: int, after_s: float) -> None:
        super().__init__(message, status=status)
        self.after_s = after_s


def check_url(url: str) -> SplitResult:
    """Return the parts of a URL that may be shown and sent a token to.

    Raises:
        ConfigError: no `http` or `https`, no host that a name can have, or a user or password in it.
    """
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        str(parts.hostname).encode("idna")
    except ValueError:
        is_url = False
    # The URL is not repeated: it may hold a password.
    if not is_url or any(not "!" <= character <= "~" for character in url):
        raise ConfigError(
            "url: expected http://HOST[:PORT][/PATH] or https://..., found another form"
        )
    if parts.username is not None or parts.query or parts.fragment:
        raise ConfigError(
            f"url: expected no user, password, query or fragment in the URL of {parts.hostname}; a token "
            "goes into `token` or `token_env`"
        )
    return parts


def _address(parts: SplitResult) -> TcpAddress:
    is_encrypted = parts.scheme == "https"
    default = 443 if is_encrypted else 80
    return TcpAddress(
        str(parts.hostname),
        default if parts.port is None else parts.port,
        ssl.create_default_context() if is_encrypted else None,
    )


def _refusal(what: str, answer: Answer) -> EndpointError:
    shown = " ".join(answer.body[:_SHOWN_BYTES].decode("utf-8", "replace").split())
    message = f"{what}: expected 2xx, found {answer.status}" + (f": {shown!r}" if shown else "")
    if answer.status not in _WORTH_REPEATING:
        return EndpointError(message, status=answer.status)
    return _RetryLaterError(message, status=answer.status, after_s=_seconds(answer.retry_after))


def _seconds(retry_after: str | None) -> float:
    """Return a pause that the endpoint asks for in seconds; 0 for none, or for a date."""
    try:
        after_s = 0.0 if retry_after is None else float(retry_after)
    except ValueError:
        return 0.0
    return after_s if math.isfinite(after_s) and after_s > 0 else 0.0
