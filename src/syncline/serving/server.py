"""Run the hot-load API on an address: uvicorn, its replicas, and a clean end."""

from __future__ import annotations

import ipaddress
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import FrameType
from typing import TYPE_CHECKING

from syncline.errors import ConfigError, TransportUnavailableError
from syncline.hotload import Token
from syncline.serving.replica import Replica

if TYPE_CHECKING:
    from fastapi import FastAPI

GRACE_S = 10
_MOST_CONNECTIONS = 256


def hot_load_app(
    replicas: Replica | Sequence[Replica], *, token: str | Token | None = None
) -> FastAPI:
    """Return the API as an ASGI application, to be mounted into a host's own server.

    Whoever runs it starts and closes the replicas: `with replica: ...` around the server.

    Args:
        replicas: engines that take the same versions from one store.
        token: bearer token that every request must carry; None: whoever reaches the server may.

    Raises:
        ConfigError: no replica, two of one name, or a token that no header can carry.
        TransportUnavailableError: FastAPI is not installed.
    """
    try:
        from syncline.serving.app import build  # noqa: PLC0415 - needs an extra
    except ImportError as error:
        raise _missing() from error
    listed = [replicas] if isinstance(replicas, Replica) else list(replicas)
    return build(listed, Token(token) if isinstance(token, str) else token)


def serve(
    replicas: Replica | Sequence[Replica],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | Token | None = None,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serve the API until SIGTERM or SIGINT; start the replicas before, and close them after.

    Args:
        host, port: where to listen; port 0 takes a free one.
        token: see `hot_load_app`; needed where `host` is not a loopback address.
        ready: called with the server's URL as soon as it can be reached.

    On SIGTERM no new connection is accepted, running requests have 10 s to end, a pull that has not
    reached its engine is given up, and the call returns. On SIGINT the same, then `KeyboardInterrupt`.
    Call it from the main thread.

    Raises:
        ConfigError: not a loopback address and no token; nothing is started.
        TransportUnavailableError: uvicorn or FastAPI is not installed.
        OSError: the address cannot be listened on.
    """
    try:
        import uvicorn  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise _missing() from error
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"host {host}: expected a token, since other machines can reach this address; pass one "
            "(--token-env NAME), or listen on 127.0.0.1"
        )
    listed = [replicas] if isinstance(replicas, Replica) else list(replicas)
    config = uvicorn.Config(
        hot_load_app(listed, token=token),
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=_MOST_CONNECTIONS,
        timeout_graceful_shutdown=GRACE_S,
    )
    server = uvicorn.Server(config)

    def stop(_number: int, _frame: FrameType | None) -> None:
        server.should_exit = True

    with ExitStack() as stack:
        listener = stack.enter_context(_listen(host, port))
        # Until uvicorn has its own handler, and after it, when uvicorn raises the signal once more.
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, stop))
        for replica in listed:
            stack.enter_context(replica)
        if ready is not None:
            ready(_url(listener))
        server.run(sockets=[listener])


def is_loopback(host: str) -> bool:
    """Tell whether an address can be reached from this machine alone.

    Example:
        >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
        (True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_MOST_CONNECTIONS)


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _missing() -> TransportUnavailableError:
    return TransportUnavailableError(
        "the hot-load server needs FastAPI and uvicorn: pip install 'syncline[serve]'"
    )
