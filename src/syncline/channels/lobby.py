"""Where engines join a trainer: a Unix socket or a TCP port, a greeting, and a channel to each that was let in.

The greeting is two strict JSON messages each way. Who listens on more than this machine asks for a token, which is
proved and never sent. Every connection has the length of its messages bounded before it is let in.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import stat
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from syncline import config
from syncline.channels.sockets import MAX_FRAME_BYTES, SocketChannel
from syncline.endpoints import answer_each, own
from syncline.errors import (
    ConfigError,
    FormatError,
    PeerLostError,
    SynclineError,
    TransportTimeoutError,
)
from syncline.format import names, strict_json
from syncline.types import check_seconds

_FORMAT = "syncline-live"
_GREETING_BYTES = 4096
_GREETING_S = 10.0
_NONCE_HEX = 64
_MAX_UNIX_BYTES = 104
_RETRY_S = 0.05
_LEAVING_S = 1.0
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_BACKLOG = 64


class Lobby:
    """Listens for engines and keeps a channel to each that joined.

    Args:
        address: path of a Unix socket, which only this user may connect to, or `host:port` (port 0: any
            free one; see `address`).
        transport: what both sides must call the transport.
        timeout_s: how long a send to an engine may take.
        token_env: environment variable with a token that engines must know, too; needed for every host
            but this one.

    Raises:
        ConfigError: the address is in use, too long or illegal, or needs a token.
    """

    def __init__(
        self, address: str, transport: str, timeout_s: float, token_env: str | None = None
    ) -> None:
        self._transport = transport
        self._timeout_s = check_seconds("timeout_s", timeout_s)
        self._token = _token(address, token_env)
        self._socket = own(_listen(address))
        self._path = None if ":" in address else Path(address)
        self._inode = None if self._path is None else self._path.stat().st_ino
        self.address = address if self._path is not None else _bound(self._socket)
        self._changed = threading.Condition()
        self._members: dict[str, SocketChannel] = {}
        self._is_closed = False
        threading.Thread(
            target=answer_each,
            args=(self._socket, self._greet, "syncline-greeting"),
            name="syncline-lobby",
            daemon=True,
        ).start()

    def members(self) -> Mapping[str, SocketChannel]:
        """Return the engines that joined and are there, in the order of joining."""
        with self._changed:
            for name, channel in list(self._members.items()):
                if channel.is_lost or channel.is_closed:
                    channel.abort()
                    del self._members[name]
            return dict(self._members)

    def wait(self, count: int, timeout_s: float) -> None:
        """Return when at least `count` engines have joined.

        Raises:
            TransportTimeoutError: fewer did; names them.
        """
        deadline_s = time.monotonic() + check_seconds("timeout_s", timeout_s)
        while len(found := self.members()) < count:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TransportTimeoutError(
                    f"expected {count} engines at {self.address} in {timeout_s} s, found {len(found)}: "
                    f"{', '.join(found) if found else 'none'}"
                )
            with self._changed:
                self._changed.wait(min(left_s, 1.0))

    def _wait_for(self, name: str) -> None:
        """Wait a moment for a name to be free: an engine that left and joins again may come before its leaving."""
        deadline_s = time.monotonic() + _LEAVING_S
        while name in self.members() and time.monotonic() < deadline_s:
            time.sleep(_RETRY_S)

    def close(self) -> None:
        """Let every engine go and free the address; harmless when called again."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            members, self._members = self._members, {}
        if self._path is not None and self._socket.fileno() >= 0:  # else a fork's parent has it
            with suppress(OSError):  # gone, or another's by now
                if self._path.stat().st_ino == self._inode:
                    self._path.unlink()
        with suppress(OSError):  # wakes who accepts
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for channel in members.values():
            channel.abort()

    def _greet(self, connected: socket.socket) -> None:
        """Let an engine in, or tell it why not; whoever does not speak the protocol is cut off."""
        channel = SocketChannel(
            connected, "an engine", timeout_s=_GREETING_S, limit_bytes=_GREETING_BYTES
        )
        try:
            self._let_in(channel, connected)
        except ConfigError as error:
            with suppress(SynclineError):
                channel.send(strict_json.dump({"refused": str(error)}))
            channel.close()
        except SynclineError:
            channel.abort()

    def _let_in(self, channel: SocketChannel, connected: socket.socket) -> None:
        _check_same_user(connected)
        nonce = secrets.token_hex(_NONCE_HEX // 2)
        hello = {
            "format": _FORMAT,
            "format_version": names.FORMAT_VERSION,
            "transport": self._transport,
            "nonce": nonce,
            "token": self._token is not None,
        }
        channel.send(strict_json.dump(hello))
        raw = channel.receive(_GREETING_S)
        fields = strict_json.document(
            raw,
            "an engine's greeting",
            _FORMAT,
            ("format", "format_version", "transport", "name", "proof"),
            limit_bytes=_GREETING_BYTES,
        )
        name = names.check_identity(fields["name"], "an engine's name")
        if not hmac.compare_digest(fields.hexadecimal("proof", 64), _proof(self._token, nonce)):
            raise ConfigError("the token is not the trainer's")
        if fields.text("transport") != self._transport:
            raise ConfigError(
                f"the trainer's transport is {self._transport}, found {fields['transport']!r:.80}"
            )
        channel.peer = f"engine {name!r}"
        channel.limit_bytes = MAX_FRAME_BYTES
        channel.timeout_s = self._timeout_s
        self._wait_for(name)
        with self._changed:
            if name in self._members:
                raise ConfigError(
                    f"an engine called {name!r} is here already; give this one a name"
                )
            if self._is_closed:
                raise PeerLostError("the trainer has closed")
            channel.send(strict_json.dump({"refused": None}))
            self._members[name] = channel
            self._changed.notify_all()


def join(
    address: str, transport: str, name: str, timeout_s: float, token_env: str | None = None
) -> SocketChannel:
    """Connect an engine to the trainer that listens at an address, as soon as there is one.

    Raises:
        TransportTimeoutError: nobody listened there, or answered, in time.
        ConfigError: the trainer refused, or is another kind of program; says why.
    """
    token = _token(address, token_env)
    deadline_s = time.monotonic() + check_seconds("timeout_s", timeout_s)
    _check_name(name)
    while True:
        try:
            return _joined(_connect(address, deadline_s), transport, name, token, timeout_s)
        except PermissionError as error:
            raise ConfigError(
                f"{address}: only processes of the trainer's user may join: {error.strerror}"
            ) from error
        except (OSError, PeerLostError) as error:
            if time.monotonic() > deadline_s:
                raise TransportTimeoutError(
                    f"no trainer answered at {address} in {timeout_s} s: {error}; start it first, or "
                    "check the address"
                ) from error
            time.sleep(_RETRY_S)


def _check_name(name: str) -> None:
    """Refuse here a name that the trainer would refuse."""
    try:
        names.check_identity(name, "name")
    except FormatError as error:
        raise ConfigError(f"{error}; give this engine another one") from error


def default_name() -> str:
    """Return what an engine is called that was given no name: its machine and process."""
    return f"{socket.gethostname()}-{os.getpid()}"


def _joined(
    connected: socket.socket, transport: str, name: str, token: bytes | None, timeout_s: float
) -> SocketChannel:
    channel = SocketChannel(connected, "the trainer", timeout_s=timeout_s)
    try:
        _introduce(channel, transport, name, token, min(timeout_s, _GREETING_S))
    except FormatError as error:
        channel.abort()
        raise ConfigError(f"what listens there is no trainer of this release: {error}") from error
    except BaseException:
        channel.abort()
        raise
    return channel


def _introduce(
    channel: SocketChannel, transport: str, name: str, token: bytes | None, wait_s: float
) -> None:
    """Go through the engine's side of the greeting."""
    hello = strict_json.document(
        channel.receive(wait_s),
        "the trainer's greeting",
        _FORMAT,
        ("format", "format_version", "transport", "nonce", "token"),
        limit_bytes=_GREETING_BYTES,
    )
    if hello["token"] is not (token is not None):
        raise ConfigError(
            "the trainer wants a token: pass token_env"
            if hello["token"]
            else "the trainer knows no token, and this engine does"
        )
    answer = {
        "format": _FORMAT,
        "format_version": names.FORMAT_VERSION,
        "transport": transport,
        "name": name,
        "proof": _proof(token, hello.hexadecimal("nonce", _NONCE_HEX)),
    }
    channel.send(strict_json.dump(answer))
    where = "the trainer's answer"
    value = strict_json.parse(channel.receive(wait_s), where, limit_bytes=_GREETING_BYTES)
    fields = strict_json.Fields(value, where, ("refused",))
    if fields["refused"] is not None:
        raise ConfigError(f"the trainer refused engine {name!r}: {fields.text('refused')}")


def _proof(token: bytes | None, nonce: str) -> str:
    key = b"" if token is None else token
    return hmac.new(key, nonce.encode(), hashlib.sha256).hexdigest()


def _token(address: str, token_env: str | None) -> bytes | None:
    if token_env is not None:
        return config.secret(token_env).encode()
    if ":" in address and _split(address)[0] not in _LOOPBACK:
        raise ConfigError(
            f"{address}: expected a token_env, since other machines can reach this address; set a token "
            "in an environment variable on both sides"
        )
    return None


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) >= 1 << 16:
        raise ConfigError(f"address: expected a path or host:port, found {address!r}")
    return host.strip("[]"), int(port)


def _listen(address: str) -> socket.socket:
    try:
        if ":" in address:
            host, port = _split(address)
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, port), family=family, backlog=_BACKLOG)
        return _listen_unix(address)
    except OSError as error:
        raise ConfigError(f"{address} cannot be listened on: {error.strerror}") from error


def _listen_unix(path: str) -> socket.socket:
    if len(os.fsencode(path)) >= _MAX_UNIX_BYTES:
        raise ConfigError(
            f"{path}: the path of a Unix socket may have {_MAX_UNIX_BYTES - 1} bytes; choose a shorter one"
        )
    _remove_stale(path)
    listening = socket.socket(socket.AF_UNIX)
    try:
        listening.bind(path)
        Path(path).chmod(stat.S_IRUSR | stat.S_IWUSR)
        listening.listen(_BACKLOG)
    except BaseException:
        listening.close()
        raise
    return listening


def _remove_stale(path: str) -> None:
    """Remove the socket of a trainer that is gone; nothing else."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ConfigError(f"{path} exists and is no socket; nothing was touched")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink()
            return
    raise ConfigError(f"{path}: another trainer listens there; give every trainer its own path")


def _connect(address: str, deadline_s: float) -> socket.socket:
    left_s = max(_RETRY_S, deadline_s - time.monotonic())
    if ":" in address:
        return socket.create_connection(_split(address), timeout=left_s)
    connected = socket.socket(socket.AF_UNIX)
    try:
        connected.settimeout(left_s)
        connected.connect(address)
    except BaseException:
        connected.close()
        raise
    return connected


def _check_same_user(connected: socket.socket) -> None:
    """Check that whoever connected over a Unix socket is this user; the path's mode says so, too."""
    if connected.family != socket.AF_UNIX or not hasattr(socket, "SO_PEERCRED"):
        return
    raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", raw)
    if user not in (os.getuid(), 0):
        raise ConfigError("another user's process may not join")


def _bound(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
