"""One question to an engine's server, as JSON, answered before a deadline."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from syncline.errors import FormatError
from syncline.hotload import Token
from syncline.hotload.http import Endpoint
from syncline.scorers.answers import refuse

TIMEOUT_S = 120.0
_LIMIT_BYTES = 64 << 20


class JsonDoor:
    """A route of a server that takes and gives JSON.

    Args:
        url: of the route.
        timeout_s: longest that an answer may take, repetitions included.
        token: goes with every request; None: none.
    """

    def __init__(self, url: str, *, timeout_s: float, token: Token | None = None) -> None:
        self._endpoint = Endpoint(url, {}, attempt_timeout_s=timeout_s)
        self._timeout_s = timeout_s
        self._secret = {} if token is None else {"Authorization": token.header()}
        self.url = url

    def ask(self, question: Mapping[str, Any]) -> Any:
        """Return what the server answers. NaN and infinities in it are kept: they are what a model computed.

        Raises:
            FormatError: the answer is not JSON, or has a key twice in one object.
            TransportError: it refused, could not be reached, or did not answer in time.
        """
        raw = self._endpoint.request(
            "POST",
            json.dumps(question).encode(),
            self._secret,
            limit_bytes=_LIMIT_BYTES,
            deadline_s=time.monotonic() + self._timeout_s,
        )
        try:
            return json.loads(raw, object_pairs_hook=self._unique)
        except (ValueError, RecursionError) as error:
            if isinstance(error, FormatError):
                raise
            raise FormatError(f"{self.url}: the answer is not JSON: {error}") from None

    def member(self, value: Any, *path: str | int) -> Any:
        """Return what lies at a path of keys and indices in an answer.

        Raises:
            FormatError: there is nothing; says what was there in its place.
        """
        for step in path:
            try:
                value = value[step]
            except (KeyError, IndexError, TypeError):
                refuse(self.url, f"a member {step!r} of {list(path)}", f"{value!r:.120}")
        return value

    def items(self, value: Any, *path: str | int) -> list[Any]:
        """Return the list at a path; see `member`."""
        found = self.member(value, *path)
        if not isinstance(found, list):
            refuse(self.url, f"a list at {list(path)}", f"{found!r:.120}")
        return found

    def _unique(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise FormatError(f"{self.url}: the answer has a key twice in one object")
        return found


def logprob(value: Any, where: str) -> float:
    """Return a log-probability as a server writes it; null, which some write for NaN, is NaN.

    Raises:
        FormatError: it is no number.
    """
    if value is None:
        return float("nan")
    if isinstance(value, bool) or not isinstance(value, int | float):
        refuse(where, "a log-probability", f"{value!r:.80}")
    try:
        number = float(value)
    except OverflowError:
        refuse(where, "a log-probability", f"{value!r:.80}")
    return float("-inf") if number <= CLAMPED else number


CLAMPED = -9999.0
"""What vLLM and OpenAI's own API write for minus infinity, which JSON does not have."""


def token_id(value: Any, where: str) -> int:
    """Return a token id.

    Raises:
        FormatError: it is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
        refuse(where, "a token id", f"{value!r:.80}")
    return value
