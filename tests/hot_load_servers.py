"""Servers for tests: the real one on uvicorn in a thread, and a scripted one that speaks Fireworks."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import uvicorn

from syncline import MemoryEngine, MemoryStore, Publisher
from syncline.abc import Engine
from syncline.hotload.client import PATH
from syncline.serving import Replica, hot_load_app
from syncline.serving.puller import EnginePuller

PATIENCE_S = 30.0


def eventually(is_so: Callable[[], bool], what: str) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not is_so():
        if time.monotonic() > until_s:
            raise AssertionError(f"not in {PATIENCE_S} s: {what}")
        time.sleep(0.005)


@contextmanager
def running(app: Any) -> Iterator[str]:
    """Run an ASGI application on uvicorn, on a free port, and yield its URL."""
    config = uvicorn.Config(
        app, port=0, log_config=None, lifespan="off", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        eventually(lambda: server.started, "uvicorn has started")
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


class Run:
    """A run in a store, its publisher, and weights of which one element changes with every version."""

    def __init__(self, store: Any = None, **options: Any) -> None:
        self.store = MemoryStore() if store is None else store
        self.publisher = Publisher(self.store, **options)
        self.weights = {"w": np.zeros(400, np.float32), "b": np.ones(7, np.float16)}
        self.published: list[bytes] = []

    def publish(self, *, full: bool = False) -> int:
        self.weights["w"][len(self.published)] += 1
        report = self.publisher.publish(self.weights, full=full)
        self.published.append(self.weights["w"].tobytes())
        return report.version

    def is_in(self, engine: Any, version: int) -> bool:
        """Is this version in the engine, bit for bit?"""
        return engine.view("w").tobytes() == self.published[version - 1]


def engine_of(replica: Replica) -> Engine:
    """Return the engine in this process that a replica keeps on its version."""
    puller = replica._engine
    assert isinstance(puller, EnginePuller)
    return puller._engine


@contextmanager
def served(run: Run, *, token: str | None = None, **options: Any) -> Iterator[tuple[str, Replica]]:
    """Serve a memory engine that has caught up with the run; yield URL and replica."""
    with ExitStack() as stack:
        replica = stack.enter_context(Replica(run.store, MemoryEngine(), **options))
        url = stack.enter_context(running(hot_load_app(replica, token=token)))
        eventually(lambda: replica.status().readiness, "the replica has caught up")
        yield url, replica


@dataclass
class Scripted:
    """A deployment that answers what the test tells it to, and keeps what it was asked.

    Attributes:
        replies: (status, headers, body) for the next requests, in order; then it works as Fireworks does:
            every replica takes what was posted.
        cut: so many of the next connections are closed without an answer.
        drip_s: pause between two bytes of an answer.
    """

    replicas: int = 2
    replies: list[tuple[int, dict[str, str], bytes]] = field(default_factory=list)
    cut: int = 0
    drip_s: float = 0.0
    silent_s: float = 0.0
    asked: list[tuple[str, str, dict[str, str], Any]] = field(default_factory=list)
    identity: str | None = None

    def answer(self) -> bytes:
        one = {
            "current_snapshot_identity": self.identity,
            "readiness": True,
            "loading_state": {"stage": "done"},
            "something_new": 1,
        }
        return json.dumps({"replicas": [one] * self.replicas}).encode()


@contextmanager
def scripted(script: Scripted) -> Iterator[str]:
    """Run a scripted deployment and yield its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: object) -> None:
            pass

        def serve(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            body = json.loads(self.rfile.read(length)) if length else None
            script.asked.append((self.command, self.path, dict(self.headers), body))
            if script.cut:
                script.cut -= 1
                self.close_connection = True
                return
            time.sleep(script.silent_s)
            status, headers, answer = 200, {}, b'{"status": "ok"}'
            if script.replies:
                status, headers, answer = script.replies.pop(0)
            elif self.path != PATH:
                status, answer = 404, b"{}"
            elif self.command == "POST":
                script.identity = body["identity"]
            else:
                answer = script.answer()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(answer)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            pieces = (
                [answer] if not script.drip_s else [answer[i : i + 1] for i in range(len(answer))]
            )
            for piece in pieces:
                self.wfile.write(piece)
                time.sleep(script.drip_s)

        do_GET = do_POST = serve  # noqa: N815

        def handle(self) -> None:
            try:
                super().handle()
            except OSError:
                return  # the client has left, which is what some tests are about

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    )
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
