"""One HTTP endpoint, asked until it answers or a deadline passes.

Every request of the API may be repeated, so a broken connection, a time-out and a server's own failure are
tried again, each time after a longer pause. Redirects are not followed: a token goes to nobody else.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import closing
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from syncline.errors import (
    ConfigError,
    EndpointError,
    PeerLostError,
    TransportError,
    TransportTimeoutError,
    TransportUnavailableError,
)

if TYPE_CHECKING:
    import urllib3

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
_WORTH_REPEATING = frozenset({408, 425, 429, 500, 502, 503, 504})
_PIECE_BYTES = 1 << 16
_SHOWN_BYTES = 300


class Endpoint:
    """A URL with the headers that go with every request to it; may be used by several threads.

    Args:
        url: `http://` or `https://`, without user or password.
        attempt_timeout_s: longest that one attempt may take.

    Raises:
        ConfigError: the URL or a header cannot be used.
        TransportUnavailableError: urllib3 is not installed.
    """

    def __init__(self, url: str, headers: Mapping[str, str], *, attempt_timeout_s: float) -> None:
        try:
            import urllib3  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise TransportUnavailableError(
                "the hot-load client needs urllib3: pip install 'syncline[serve]'"
            ) from error
        check_url(url)
        if not attempt_timeout_s > 0:
            raise ConfigError(f"attempt_timeout_s must be above 0, found {attempt_timeout_s}")
        for name, value in headers.items():
            if not value or not all(" " <= character <= "~" for character in value):
                raise ConfigError(f"header {name}: expected printable ASCII, found {value!r:.80}")
        self.url = url
        self._headers = {"Accept-Encoding": "identity", **headers}
        self._attempt_timeout_s = attempt_timeout_s
        self._pool = urllib3.PoolManager(num_pools=1, retries=False)

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

    def close(self) -> None:
        """Close the connections that are kept for the next request."""
        self._pool.clear()

    def _attempt(
        self,
        method: str,
        url: str,
        body: bytes | None,
        headers: Mapping[str, str],
        limit_bytes: int,
        deadline_s: float,
    ) -> bytes:
        import urllib3  # noqa: PLC0415 - an extra

        until_s = min(deadline_s, time.monotonic() + self._attempt_timeout_s)
        left_s = max(until_s - time.monotonic(), 0.001)
        what = f"{method} {url}"
        try:
            response = self._pool.request(
                method,
                url,
                body=body,
                headers=headers,
                timeout=urllib3.Timeout(total=left_s),
                redirect=False,
                preload_content=False,
                decode_content=False,
            )
            with closing(response):
                answer = _read(response, limit_bytes, until_s, what)
                if 200 <= response.status < 300:
                    response.release_conn()
                    return answer
        except TransportError:
            raise  # some of ours are OSErrors too
        except urllib3.exceptions.NewConnectionError as error:  # to urllib3 a kind of time-out
            raise PeerLostError(f"{what}: {_cause(error)}") from error
        except urllib3.exceptions.TimeoutError as error:
            raise TransportTimeoutError(f"{what}: no answer in {left_s:.3g} s") from error
        except urllib3.exceptions.SSLError as error:
            raise TransportError(f"{what}: TLS failed: {_cause(error)}") from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise PeerLostError(f"{what}: {_cause(error)}") from error
        raise _refusal(what, response, answer)


class _RetryLaterError(EndpointError):
    """The endpoint cannot serve the request now."""

    def __init__(self, message: str, *, status: int, after_s: float) -> None:
        super().__init__(message, status=status)
        self.after_s = after_s


def check_url(url: str) -> None:
    """Check that a URL is one that may be shown and sent a token to.

    Raises:
        ConfigError: no `http` or `https`, no host, or a user or password in it.
    """
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
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


def _read(response: urllib3.BaseHTTPResponse, limit_bytes: int, until_s: float, what: str) -> bytes:
    """Read the whole body, though it drips in, up to a size and a time."""
    answer = bytearray()
    while piece := response.read1(_PIECE_BYTES):
        answer += piece
        if len(answer) > limit_bytes:
            raise TransportError(f"{what}: the answer is longer than {limit_bytes} bytes")
        if time.monotonic() > until_s:
            raise TransportTimeoutError(f"{what}: the answer did not end in time")
    return bytes(answer)


def _refusal(what: str, response: urllib3.BaseHTTPResponse, answer: bytes) -> EndpointError:
    status = response.status
    shown = " ".join(answer[:_SHOWN_BYTES].decode("utf-8", "replace").split())
    message = f"{what}: expected 2xx, found {status}" + (f": {shown!r}" if shown else "")
    if status not in _WORTH_REPEATING:
        return EndpointError(message, status=status)
    return _RetryLaterError(
        message, status=status, after_s=_seconds(response.headers.get("Retry-After"))
    )


def _seconds(retry_after: str | None) -> float:
    """Return a pause that the endpoint asks for in seconds; 0 for none, or for a date."""
    try:
        after_s = 0.0 if retry_after is None else float(retry_after)
    except ValueError:
        return 0.0
    return after_s if math.isfinite(after_s) and after_s > 0 else 0.0


def _cause(error: BaseException) -> str:
    """Return what went wrong, without the addresses of objects in urllib3's messages."""
    cause = error.__cause__ if error.__cause__ is not None else error
    return f"{type(cause).__name__}: {cause}"
