"""ASGI middleware that lets nobody in without the token, before a byte of the body is read."""

from __future__ import annotations

from syncline.hotload import Token
from syncline.serving.gate import App, Message, Receive, Send, answer, error

OPEN_PATHS = ("/openapi.json", "/docs")


class BearerGuard:
    """Answers 401 to every request without the bearer token, but for the API's own description."""

    def __init__(self, app: App, *, token: Token) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one connection; see the ASGI specification."""
        if scope["type"] == "http" and not self._may_enter(scope):
            message = "a bearer token is needed: Authorization: Bearer TOKEN"
            await answer(send, 401, error("Unauthorized", message), www_authenticate="Bearer")
            return
        await self._app(scope, receive, send)

    def _may_enter(self, scope: Message) -> bool:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path in OPEN_PATHS and scope["method"] in ("GET", "HEAD"):
            return True
        sent = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(sent) == 1 and self._token.is_in(sent[0].decode("latin-1"))
