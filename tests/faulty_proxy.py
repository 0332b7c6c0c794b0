"""A proxy between a client and an HTTP server that breaks chosen requests on their way, and keeps a list of all.

status    answer with this status, without asking the server
cut       close the connection, without asking the server
lost      let the server do it, then close the connection instead of answering
truncate  close the connection in the middle of the body
shorten   leave the second half of the body out, and say that it was never there
flip      change one bit in the middle of the body
missing   answer that there is no such object, as a service does where a write is not seen yet
"""

from __future__ import annotations

import http.client
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

_OWN_HEADERS = {"connection", "keep-alive", "transfer-encoding", "content-length"}
_MISSING = b"<Error><Code>NoSuchKey</Code><Message>not seen yet</Message></Error>"

Reply = tuple[int, dict[str, str], bytes, int | None]


@dataclass
class Fault:
    """What is done to the next `times` requests of a method whose path holds a text."""

    kind: str
    method: str = ""
    path: str = ""
    times: int = 1
    status: int = 500
    hits: int = field(default=0, init=False)

    def fits(self, method: str, path: str) -> bool:
        return self.hits < self.times and method.startswith(self.method) and self.path in path


class FaultyProxy:
    """The proxy, as a context manager, on a free loopback port."""

    def __init__(self, server_url: str) -> None:
        self.upstream = server_url.removeprefix("http://")
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str, str]] = []
        self.most_at_once = 0
        self.pause_s = 0.0
        self._at_once = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def add(self, kind: str, method: str = "", path: str = "", **more: Any) -> Fault:
        fault = Fault(kind, method, path, **more)
        with self._lock:
            self.faults.append(fault)
        return fault

    def count(self, method: str, path: str = "") -> int:
        with self._lock:
            return sum(seen == method and path in where for seen, where, _ in self.requests)

    def began(self, method: str, path: str, byte_range: str) -> Fault | None:
        with self._lock:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            self.requests.append((method, path, byte_range))
            for fault in self.faults:
                if fault.fits(method, path):
                    fault.hits += 1
                    return fault
        return None

    def ended(self) -> None:
        with self._lock:
            self._at_once -= 1


class _Handler(BaseHTTPRequestHandler):
    owner: FaultyProxy
    protocol_version = "HTTP/1.1"

    def handle_one_request(self) -> None:
        """Take one request of any method; a client that goes away is its own business."""
        try:
            self.raw_requestline = self.rfile.readline(65537)
            if not self.raw_requestline or not self.parse_request():
                self.close_connection = True
                return
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            byte_range = self.headers.get("Range", "")
            fault = self.owner.began(self.command, self.path, byte_range)
            try:
                if self.owner.pause_s:
                    time.sleep(self.owner.pause_s)
                reply = self._reply(body, fault)
            finally:
                self.owner.ended()  # before the client, who may ask again at once, has the answer
            if reply is None:
                self.close_connection = True
            else:
                self._send(*reply)
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    def _reply(self, body: bytes, fault: Fault | None) -> Reply | None:
        """Return what to send; None: close the connection instead."""
        kind = "" if fault is None else fault.kind
        if kind == "cut":
            return None
        if kind == "status":
            return fault.status, {}, b"<Error><Code>SlowDown</Code></Error>", None
        if kind == "missing":
            return 404, {}, _MISSING, None
        status, headers, content = self._forward(body)
        if kind == "lost":
            return None
        middle = len(content) // 2
        if kind == "flip":
            content = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        if kind == "shorten":
            content = content[:middle]
        return status, headers, content, middle if kind == "truncate" else None

    def _forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        upstream = http.client.HTTPConnection(self.owner.upstream, timeout=60)
        try:
            upstream.request(self.command, self.path, body, dict(self.headers))
            answer = upstream.getresponse()
            headers = dict(answer.getheaders())
            content = answer.read()
            if self.command == "HEAD":
                headers["X-Size"] = headers.get("Content-Length", "0")
            return answer.status, headers, content
        finally:
            upstream.close()

    def _send(
        self, status: int, headers: dict[str, str], content: bytes, cut_at: int | None
    ) -> None:
        self.send_response_only(status)
        size = headers.pop("X-Size", str(len(content)))
        for name, value in headers.items():
            if name.lower() not in _OWN_HEADERS:
                self.send_header(name, value)
        self.send_header("Content-Length", size)
        self.end_headers()
        self.wfile.write(content if cut_at is None else content[:cut_at])
        self.wfile.flush()
        if cut_at is not None:
            self.close_connection = True
