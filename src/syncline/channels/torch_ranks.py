"""Channels between the ranks of `torch.distributed`: announced in a key-value store, moved by Gloo.

A wait in Gloo that times out closes every connection of its group. So a message is announced in a
store of torch's, where a wait can end and begin again, and Gloo moves only what is there to be moved.
Short messages travel in the announcement itself.
"""

from __future__ import annotations

import socket
from collections import deque
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from syncline.abc import Buffer, Channel
from syncline.errors import (
    ConfigError,
    PeerLostError,
    TransportTimeoutError,
    TransportUnavailableError,
)

_INLINE_BYTES = 1 << 16
_INLINE, _MOVED, _CLOSED = b"i", b"m", b"c"
_LEAST_WAIT_S = 0.001
_ADDRESS_BYTES = 256


class TorchChannel(Channel):
    """One rank's end of its channel to another; made for all of them by `torch_rank_channels`.

    Args:
        store: torch's key-value store that both ranks see.
        group: a Gloo process group that both are in.
        rank, peer: this rank and the other, in the group.
        timeout_s: the longest that an announced message may take to arrive.
    """

    def __init__(self, store: Any, group: Any, rank: int, peer: int, timeout_s: float) -> None:
        self._store = store
        self._group = group
        self._peer = peer
        self._timeout_s = timeout_s
        self._there, self._back = f"{rank}>{peer}", f"{peer}>{rank}"
        self._sent = self._received = 0
        self._pending: deque[tuple[str, Any, Any]] = deque()
        self._is_closed = self._has_peer_closed = False

    def send(self, message: Buffer, *, timeout_s: float | None = None) -> None:
        """Hand one message over; see `Channel.send`. Cost: one copy; does not wait for the other side.

        Raises:
            PeerLostError: the other side has closed, or the ranks' store is gone.
            ConfigError: this side has closed.
        """
        if self._is_closed:
            raise ConfigError("send: this side of the channel was closed")
        if self._has_peer_closed or self._is_announced(f"{self._back}/closed"):
            raise PeerLostError("send: the other side of the channel has closed")
        self._forget_what_arrived()
        raw = bytes(message)
        key = f"{self._there}/{self._sent}"
        if len(raw) <= _INLINE_BYTES:
            self._announce(key, _INLINE + raw)
        else:
            torch = import_module("torch")
            tensor = torch.from_numpy(np.frombuffer(bytearray(raw), np.uint8))
            work = self._group.send([tensor], self._peer, 0)
            self._pending.append((key, tensor, work))
            self._announce(key, _MOVED + len(raw).to_bytes(8, "little"))
        self._sent += 1

    def receive(self, timeout_s: float) -> bytes:
        """Return the next message; see `Channel.receive`.

        Raises:
            PeerLostError: the other side, or the ranks' store, is gone.
        """
        if self._has_peer_closed:
            raise PeerLostError("receive: the other side has closed and nothing is left")
        key = f"{self._back}/{self._received}"
        announced = self._wait(key, timeout_s)
        kind, rest = announced[:1], announced[1:]
        if kind == _CLOSED:
            self._has_peer_closed = True
            raise PeerLostError("receive: the other side has closed and nothing is left")
        raw = rest if kind == _INLINE else self._moved(int.from_bytes(rest, "little"))
        self._received += 1
        self._store.delete_key(key)
        return raw

    def close(self) -> None:
        """Tell the other side that nothing more comes; harmless when called again."""
        if not self._is_closed:
            self._is_closed = True
            with suppress(PeerLostError):  # the store is gone, and with it who could hear this
                self._announce(f"{self._there}/{self._sent}", _CLOSED)
                self._announce(f"{self._there}/closed", _CLOSED)

    def _moved(self, size_bytes: int) -> bytes:
        torch = import_module("torch")
        tensor = torch.empty(size_bytes, dtype=torch.uint8)
        try:
            self._group.recv([tensor], self._peer, 0).wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise PeerLostError(f"the connection broke while a message came: {error}") from error
        raw: bytes = tensor.numpy().tobytes()
        return raw

    def _wait(self, key: str, timeout_s: float) -> bytes:
        try:
            self._store.wait([key], timedelta(seconds=max(timeout_s, _LEAST_WAIT_S)))
            return bytes(self._store.get(key))
        except RuntimeError as error:
            # torch has one class for a store that is gone and for a key that did not come.
            if not self._is_reachable():
                raise PeerLostError("the rank that keeps the ranks' store is gone") from error
            raise TransportTimeoutError(
                f"receive: no message came in {timeout_s} s; the other side is slow or stuck"
            ) from error

    def _is_reachable(self) -> bool:
        try:
            self._store.check(["any"])
        except RuntimeError:
            return False
        return True

    def _is_announced(self, key: str) -> bool:
        try:
            return bool(self._store.check([key]))
        except RuntimeError as error:
            raise PeerLostError("the rank that keeps the ranks' store is gone") from error

    def _announce(self, key: str, value: bytes) -> None:
        try:
            self._store.set(key, value)
        except RuntimeError as error:
            raise PeerLostError("the rank that keeps the ranks' store is gone") from error

    def _forget_what_arrived(self) -> None:
        """Free the memory of messages that the other side has taken: it removes their announcement."""
        while self._pending and not self._is_announced(self._pending[0][0]):
            self._pending.popleft()


def torch_rank_channels(timeout_s: float) -> tuple[int, dict[int, Channel]]:
    """Return this process's rank in the default group, and a channel to every other one.

    Raises:
        TransportUnavailableError: torch is not installed, or was built without `torch.distributed`.
        ConfigError: `torch.distributed` has not been initialised.

    Collective: yes.
    """
    if find_spec("torch") is None:
        raise TransportUnavailableError("torch is not installed; pip install syncline[torch]")
    dist = import_module("torch.distributed")
    if not dist.is_available():
        raise TransportUnavailableError("this torch was built without torch.distributed")
    if not dist.is_initialized():
        raise ConfigError("call torch.distributed.init_process_group before Ranks.torch()")
    rank, size = dist.get_rank(), dist.get_world_size()
    wait = timedelta(seconds=timeout_s)
    group = dist.new_group(backend="gloo", timeout=wait)
    store = _store(dist, group, rank, size, wait)
    channels: dict[int, Channel] = {
        peer: TorchChannel(store, group, rank, peer, timeout_s)
        for peer in range(size)
        if peer != rank
    }
    return rank, channels


def _store(dist: Any, group: Any, rank: int, size: int, wait: timedelta) -> Any:
    """Return a key-value store that rank 0 keeps on a free port; the group carries its address."""
    torch = import_module("torch")
    address = torch.zeros(_ADDRESS_BYTES, dtype=torch.uint8)
    store = None
    if rank == 0:
        host = socket.gethostname() if size > 1 else "127.0.0.1"
        store = _open_store(dist, host, 0, size, wait, is_master=True)
        raw = f"{host}:{store.port}\n".encode().ljust(_ADDRESS_BYTES, b"\0")
        address = torch.from_numpy(np.frombuffer(bytearray(raw), np.uint8))
    dist.broadcast(address, 0, group=group)
    if store is None:
        text = address.numpy().tobytes().decode().partition("\n")[0]
        host, _, port = text.rpartition(":")
        store = _open_store(dist, host, int(port), size, wait, is_master=False)
    return store


def _open_store(
    dist: Any, host: str, port: int, size: int, wait: timedelta, *, is_master: bool
) -> Any:
    return dist.TCPStore(
        host, port, world_size=size, is_master=is_master, timeout=wait, wait_for_workers=False
    )
