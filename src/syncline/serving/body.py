"""Bodies as FastAPI gets them: bounded in size and time, and strict JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute

from syncline.errors import FormatError
from syncline.format import strict_json

LIMIT_BYTES = 1 << 16
TIME_LIMIT_S = 10.0


class _StrictRequest(Request):
    async def body(self) -> bytes:
        if not hasattr(self, "_strict_body"):
            body = bytearray()
            try:
                async with asyncio.timeout(TIME_LIMIT_S):
                    async for piece in self.stream():
                        body += piece
                        if len(body) > LIMIT_BYTES:
                            raise HTTPException(413, f"at most {LIMIT_BYTES} bytes are allowed")
            except TimeoutError:
                raise HTTPException(408, f"the body did not end in {TIME_LIMIT_S:g} s") from None
            self._strict_body = bytes(body)
        return self._strict_body

    async def json(self) -> Any:
        try:
            return strict_json.parse(await self.body(), "request", limit_bytes=LIMIT_BYTES)
        except FormatError as error:
            raise HTTPException(400, str(error)) from error


class StrictRoute(APIRoute):
    """A route whose handlers get their bodies so."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler that FastAPI calls; see its page on custom routes."""
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return handle_strictly
