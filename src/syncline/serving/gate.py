"""ASGI middleware that an engine host puts before its generate route: HTTP 409 for weights it has not.

It needs no framework. A request whose JSON body has `weight_version` is held to it until its answer has
ended; every other request passes untouched, as do uploads (`multipart/...`), which cannot have the field.
JSON in UTF-16 or UTF-32 is held to it too.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

from syncline.errors import FormatError
from syncline.format import strict_json
from syncline.hotload import Refusal, WeightVersion
from syncline.hotload.weight_version import FIELD, REFUSED_STATUS
from syncline.serving.admission import Admission

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_ASK_AGAIN_S = 0.01
_OBJECT = re.compile(rb"[ \t\r\n]*\{")


class WeightVersionGate:
    """Answers 409 where a request's `weight_version` cannot be met, and lets the others through.

    Args:
        app: the ASGI application behind it.
        admission: `Replica.admission` of the engine that `app` generates with.
        paths: routes to guard; None: all of them.
        limit_bytes: longest body of a guarded request; a longer one is answered 413.
        patience_s: how long a pinned request waits while a commit is on its way.

    With FastAPI or Starlette: `app.add_middleware(WeightVersionGate, admission=replica.admission)`.
    A pinned request is inside from before its first byte is generated until its last is sent, and no
    commit of a version that it does not accept happens meanwhile.
    """

    def __init__(
        self,
        app: App,
        *,
        admission: Admission,
        paths: Collection[str] | None = None,
        limit_bytes: int = 64 << 20,
        patience_s: float = 30.0,
    ) -> None:
        self._app = app
        self._admission = admission
        self._paths = paths
        self._limit_bytes = limit_bytes
        self._patience_s = patience_s

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one connection; see the ASGI specification."""
        if scope["type"] != "http" or not self._is_guarded(scope):
            await self._app(scope, receive, send)
            return
        body, is_whole = await _read_body(receive, self._limit_bytes)
        if len(body) > self._limit_bytes:
            message = f"the body is longer than {self._limit_bytes} bytes"
            await answer(send, 413, error("RequestTooLarge", message))
            return
        if not is_whole:  # the client has gone; the application sees so after what there is
            await self._app(scope, _replay(body, receive, more_body=True), send)
            return
        try:
            wanted = wanted_version(body)
        except FormatError as fault:
            await answer(send, 400, error("InvalidWeightVersion", str(fault)))
            return
        replay = _replay(body, receive)
        if wanted.is_any:
            await self._app(scope, replay, send)
            return
        refusal = await self._enter(wanted)
        if refusal is not None:
            await answer(send, REFUSED_STATUS, refusal.as_dict())
            return
        try:
            await self._app(scope, replay, send)
        finally:
            self._admission.leave(wanted)

    def _is_guarded(self, scope: Message) -> bool:
        path: str = scope["path"]
        is_ours = self._paths is None or path in self._paths
        return is_ours and scope["method"] == "POST" and not _is_multipart(scope)

    async def _enter(self, wanted: WeightVersion) -> Refusal | None:
        """Enter the gate, waiting while a commit is on its way; return why not."""
        until_s = time.monotonic() + self._patience_s
        while True:
            entered = self._admission.try_enter(wanted)
            if entered is True:
                return None
            if isinstance(entered, Refusal):
                return entered
            if time.monotonic() > until_s:
                return Refusal("WeightVersionNotReady", wanted.lowest, self._admission.served)
            await asyncio.sleep(_ASK_AGAIN_S)


def wanted_version(body: bytes) -> WeightVersion:
    """Return which versions a request's JSON body accepts; any, if it says nothing.

    Raises:
        FormatError: the field is not legal, or the body may have it and is not strict JSON.

    Example:
        >>> wanted_version(b'{"text": "hi", "weight_version": {"exact_version": 7}}')
        WeightVersion(exact=7, minimum=None)
    """
    encoding = json.detect_encoding(body)
    if encoding != "utf-8":  # hosts that read JSON with Python's own module read these too
        body = body.decode(encoding, "replace").encode("utf-8", "replace")
    # Nothing but an object has the field, and none without its name or an escape that could spell it.
    if not _OBJECT.match(body) or (FIELD.encode() not in body and b"\\u" not in body):
        return WeightVersion()
    document = strict_json.parse(body, "request", limit_bytes=len(body))
    value = document.get(FIELD) if isinstance(document, dict) else None
    return WeightVersion() if value is None else WeightVersion.parse(value, f"request: {FIELD}")


def error(kind: str, message: str, **more: object) -> dict[str, Any]:
    """Return the body of an error's answer."""
    return {"error": {"type": kind, "message": message, **more}}


async def answer(send: Send, status: int, document: object, **headers: str) -> None:
    """Send one JSON answer."""
    body = strict_json.dump(document)
    lines = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    lines += [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": body})


async def _read_body(receive: Receive, limit_bytes: int) -> tuple[bytes, bool]:
    """Return the body, or somewhat more than `limit_bytes` of it, and False if the client has gone midway."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return bytes(body), False
        body += message.get("body", b"")
        if len(body) > limit_bytes or not message.get("more_body", False):
            return bytes(body), True


def _is_multipart(scope: Message) -> bool:
    return any(
        name == b"content-type" and value.lower().startswith(b"multipart/")
        for name, value in scope["headers"]
    )


def _replay(body: bytes, receive: Receive, *, more_body: bool = False) -> Receive:
    """Return a `receive` that hands the body over once more, then what comes after it."""
    is_sent = False

    async def replayed() -> Message:
        nonlocal is_sent
        if is_sent:
            return await receive()
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": more_body}

    return replayed
