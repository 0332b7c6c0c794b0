"""A real S3 server process for tests: moto's own server, with conditional writes made atomic.

moto checks `If-Match` and `If-None-Match` and then writes, without keeping other requests out; the services that it
stands for do. So requests that carry a condition run one at a time here. Nothing else of moto is changed.

Run as a program it prints its port and serves until it is ended or its standard input closes: for benchmarks also on
another address than loopback, inside a network namespace, and with a pause before each answer that stands for a long way.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

KEYS = {"AWS_ACCESS_KEY_ID": "test-key", "AWS_SECRET_ACCESS_KEY": "test-secret-of-no-account"}
CONDITIONS = ("HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH")


class S3Server:
    """The server, as a context manager; it ends with this process, however that ends.

    Args:
        ignore_conditions: take no notice of conditions, as some services that speak S3 do.
        namespace, host: network namespace and address to serve in.
        pause_ms: how long each answer is held back.
    """

    def __init__(
        self,
        *,
        ignore_conditions: bool = False,
        namespace: str | None = None,
        host: str = "127.0.0.1",
        pause_ms: int = 0,
    ) -> None:
        inside = [] if namespace is None else ["ip", "netns", "exec", namespace]
        self._command = [*inside, sys.executable, str(Path(__file__))]
        self._command += ["--host", host, "--pause-ms", str(pause_ms)]
        self._command += ["--ignore-conditions"] if ignore_conditions else []
        self._host = host

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **KEYS},
            text=True,
        )
        line = self._process.stdout.readline()
        if not line.strip().isdigit():
            raise RuntimeError(f"the S3 server did not start: it printed {line!r}")
        self.port = int(line)
        self.url = f"http://{self._host}:{self.port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            pipe.close()

    def make_bucket(self, name: str) -> None:
        """Make an empty bucket, by a plain unsigned request, which moto takes."""
        request = urllib.request.Request(f"{self.url}/{name}", b"", method="PUT")
        with urllib.request.urlopen(request, timeout=30):
            pass

    def uploads(self, bucket: str) -> int:
        """Return how many multipart uploads were begun and neither completed nor given up."""
        with urllib.request.urlopen(f"{self.url}/{bucket}?uploads", timeout=30) as answer:
            return answer.read().count(b"<Upload>")


def s3_service(endpoint: str, prefix: str, bucket: str = "bucket") -> Any:
    """Return an obstore store at the endpoint, as `open_store` configures it, with short pauses."""
    import obstore.store

    return obstore.store.S3Store(
        bucket,
        prefix=prefix,
        endpoint=endpoint,
        access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
        secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
        region="us-east-1",
        copy_if_not_exists="multipart",
        client_options={"allow_http": True},
        retry_config={
            "max_retries": 3,
            "retry_timeout": timedelta(seconds=20),
            "backoff": {"init_backoff": timedelta(milliseconds=10)},
        },
    )


def environment(endpoint: str) -> dict[str, str]:
    """Return what the environment must say for S3 URLs to mean the server at this endpoint."""
    return {
        **KEYS,
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
    }


def conditional(
    app: Callable[..., Iterable[bytes]], *, ignore: bool, pause_s: float
) -> Callable[..., Any]:
    """Run requests that carry a condition one at a time, or drop the conditions."""
    alone = threading.Lock()

    def call(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        time.sleep(pause_s)
        writes = environ["REQUEST_METHOD"] in ("PUT", "POST")
        if not writes or not any(name in environ for name in CONDITIONS):
            return app(environ, start_response)
        if ignore:
            for name in CONDITIONS:
                environ.pop(name, None)
            return app(environ, start_response)
        with alone:
            return app(environ, start_response)

    return call


def serve(options: argparse.Namespace) -> None:
    """Serve on a free port, which is printed, until standard input closes."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"  # connections are kept, as by the real services

        def log(self, *_: object) -> None:
            pass

    app = conditional(
        DomainDispatcherApplication(create_backend_app),
        ignore=options.ignore_conditions,
        pause_s=options.pause_ms / 1000,
    )
    server = make_server(options.host, 0, app, threaded=True, request_handler=Quiet)
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--pause-ms", type=int, default=0)
    parser.add_argument("--ignore-conditions", action="store_true")
    serve(parser.parse_args())
