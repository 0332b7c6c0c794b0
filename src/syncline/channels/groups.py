"""What a collective path asks of torch: stores, groups, broadcasts; its errors become ours."""

from __future__ import annotations

import socket
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np

from syncline.channels.pieces import Pieces
from syncline.errors import (
    ConfigError,
    PeerLostError,
    TransportTimeoutError,
    TransportUnavailableError,
)
from syncline.types import Bits, DeviceBits

Backend = Literal["gloo", "nccl"]

BUFFERS = 2
"""How many broadcasts are under way at a time."""

_ROOT = 0


def load_torch() -> tuple[Any, Any]:
    """Return torch and its `distributed`; on a busy machine the first time takes most of a minute.

    Raises:
        TransportUnavailableError: it is not there, or has none.
    """
    if find_spec("torch") is None:
        raise TransportUnavailableError("torch is not installed; pip install syncline[torch]")
    torch, dist = import_module("torch"), import_module("torch.distributed")
    if not dist.is_available():
        raise TransportUnavailableError("this torch was built without torch.distributed")
    return torch, dist


class Groups:
    """What is asked of torch: stores, groups, broadcasts; its errors become ours."""

    def __init__(self, backend: Backend) -> None:
        self.torch, self.dist = load_torch()
        if backend not in ("gloo", "nccl"):
            raise ConfigError(f"backend: expected 'gloo' or 'nccl', found {backend!r}")
        is_there = self.dist.is_gloo_available if backend == "gloo" else self.dist.is_nccl_available
        if not is_there():
            raise TransportUnavailableError(f"this torch was built without {backend}")
        if backend == "nccl" and not self.torch.cuda.is_available():
            raise TransportUnavailableError("backend 'nccl' needs a GPU, and torch finds none")
        self.backend = backend
        self._options = self.dist.BroadcastOptions()
        self._options.rootRank = _ROOT
        self._options.rootTensor = 0

    def serve(self, host: str, timeout_s: float) -> Any:
        """Return a store that listens on this host alone, on a free port."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, 0), family=family)
        port = listening.getsockname()[1]
        return self._opened_store(
            host, port, timeout_s, is_master=True, master_listen_fd=listening.detach()
        )

    def connect(self, host: str, port: int, timeout_s: float) -> Any:
        """Return the trainer's store."""
        return self._opened_store(host, port, timeout_s, is_master=False)

    def form(
        self, store: Any, prefix: str, rank: int, size: int, host: str | None, timeout_s: float
    ) -> Any:
        """Return a group in which this process has this rank."""
        wait = timedelta(seconds=timeout_s)
        named = self.dist.PrefixStore(prefix, store)
        try:
            if self.backend == "nccl":
                options = self.dist.ProcessGroupNCCL.Options()
                options._timeout = wait  # noqa: SLF001 - torch's own way to say it
                return self.dist.ProcessGroupNCCL(named, rank, size, options)
            options = self.dist.ProcessGroupGloo._Options()  # noqa: SLF001
            options._timeout = wait  # noqa: SLF001
            options._threads = BUFFERS  # noqa: SLF001
            gloo = self.dist.ProcessGroupGloo
            options._devices = [  # noqa: SLF001
                gloo.create_default_device() if host is None else gloo.create_device(hostname=host)
            ]
            return gloo(named, rank, size, options)
        except RuntimeError as error:
            raise TransportTimeoutError(
                f"the group of {size} did not form in {timeout_s} s: {_first_line(error)}"
            ) from error

    def buffer(self, nbytes: int) -> Any:
        """Return a new buffer where the backend wants it."""
        device = "cuda" if self.backend == "nccl" else "cpu"
        return self.torch.empty(nbytes, dtype=self.torch.uint8, device=device)

    def fillable(self, buffer: Any) -> Bits | DeviceBits:
        """Return a buffer as `fill` wants it."""
        return buffer if self.backend == "nccl" else buffer.numpy()

    def readable(self, bucket: Any) -> Bits | DeviceBits:
        """Return a bucket that came, read-only where numpy can say so."""
        if self.backend == "nccl":
            return bucket
        bits: Bits = bucket.numpy()
        bits.flags.writeable = False
        return bits

    def in_place(self, pieces: Pieces) -> Any:
        """Return the tensor to send a bucket from where it lies; None if it must be put together."""
        if len(pieces) != 1:
            return None
        bits = pieces[0][1]
        if isinstance(bits, np.ndarray):
            if self.backend == "nccl" or not bits.flags.writeable:
                return None  # torch would warn about memory that it must not write to
            return self.torch.from_numpy(bits.view(np.uint8))
        return bits.view(self.torch.uint8) if self.backend == "nccl" else None

    def broadcast(self, group: Any, bucket: Any, timeout_s: float) -> Any:
        """Begin a broadcast, which may take so long; return what to wait for."""
        self._options.timeout = timedelta(seconds=timeout_s)
        try:
            return group.broadcast([bucket], self._options)
        except RuntimeError as error:
            raise PeerLostError(f"the group is broken: {_first_line(error)}") from error

    def wait(self, work: Any, timeout_s: float, whom: str) -> None:
        """Wait for a broadcast.

        Raises:
            PeerLostError, TransportTimeoutError: it failed, or took longer.
        """
        try:
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            text = _first_line(error)
            if "imed out" in text or "imeout" in text:
                raise TransportTimeoutError(
                    f"a broadcast took longer than {timeout_s} s; {whom} is slow or stuck"
                ) from error
            raise PeerLostError(f"a broadcast failed, {whom} is gone: {text}") from error
        if self.backend == "nccl":
            self.torch.cuda.current_stream().synchronize()

    def settle(self) -> None:
        """Wait for what this process reads from a bucket."""
        if self.backend == "nccl":
            self.torch.cuda.current_stream().synchronize()

    def end(self, group: Any) -> None:
        """Leave a group. What is under way in it fails; with Gloo, which cannot give up, not before the others move.

        Then whoever lets go of the group waits until they send on, leave or die, or its broadcasts' time is over.
        """
        with suppress(RuntimeError):  # broken already
            group.abort()

    def _opened_store(self, host: str, port: int, timeout_s: float, **options: Any) -> Any:
        try:
            return self.dist.TCPStore(
                host,
                port,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
                **options,
            )
        except RuntimeError as error:
            raise PeerLostError(f"the group's store is gone: {_first_line(error)}") from error


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]
