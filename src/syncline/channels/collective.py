"""A live path over `torch.distributed`: broadcasts of buckets in a process group of the trainer and its engines.

Engines join over TCP; that connection carries all words, and shows at once who has died. For every set of
members a group is made, of which the trainer is rank 0; nobody needs, or touches, a default group. Two
broadcasts are under way at a time. A broadcast that fails closes its group; the next round makes another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar, Literal

import numpy as np

from syncline.abc import Channel, Inlet
from syncline.channels.lobby import Lobby, default_name, join
from syncline.channels.outlet import RoundOutlet
from syncline.channels.pieces import Pieces, fill, nbytes_of
from syncline.channels.rounds import hear_form, hear_opened
from syncline.channels.sockets import SocketChannel
from syncline.errors import (
    ConfigError,
    FormatError,
    PeerLostError,
    TransportTimeoutError,
    TransportUnavailableError,
)
from syncline.format import strict_json
from syncline.types import Bits, DeviceBits, check_seconds
from syncline.version import Kind

Backend = Literal["gloo", "nccl"]

_BUFFERS = 2
_ROOT = 0
_WHERE = "the trainer's group"
_KEYS = ("backend", "host", "port", "prefix", "rank", "size", "timeout_ms")


class CollectiveOutlet(RoundOutlet):
    """The trainer's end for engines anywhere on one fabric.

    Args:
        address: `host:port` on which engines join; port 0 takes a free one, see `address`. On another host
            than this one's loopback it needs `token_env`.
        backend: `gloo` for host memory, or `nccl` for buckets in GPU memory, which has never been run: no
            GPU was there to run it on.
        timeout_s: how long a message to an engine may take.
        token_env: environment variable with a token that the engines know, too.

    Raises:
        ConfigError: the address is in use or illegal, or needs a token.
        TransportUnavailableError: this torch lacks the backend.

    The port of the group's own store, and Gloo's ports, are chosen by the system, on the address's host.
    """

    name: ClassVar[str] = "collective"
    kinds: ClassVar[tuple[Kind, ...]] = ("full", "delta")
    bucket_bytes: ClassVar[int] = 16 << 20

    def __init__(
        self,
        address: str,
        *,
        backend: Backend = "gloo",
        timeout_s: float = 60.0,
        token_env: str | None = None,
    ) -> None:
        self._groups = _Groups(backend)
        self._lobby = Lobby(address, self.name, timeout_s, token_env)
        self._host = self._lobby.address.rpartition(":")[0].strip("[]")
        self._store: Any = None
        self._members: dict[str, SocketChannel] = {}
        self._round = 0
        self._group: Any = None
        self._slots: list[Any] = []
        self._pending: deque[Any] = deque()

    @property
    def address(self) -> str:
        """Where engines join: `host:port` with the port that was taken."""
        return self._lobby.address

    def wait(self, engines: int, timeout_s: float) -> None:
        """Return when so many engines have joined; raise `TransportTimeoutError` if they do not."""
        self._lobby.wait(engines, timeout_s)

    def members(self) -> Mapping[str, Channel]:
        """Return the engines that are here; see `Outlet.members`."""
        return self._lobby.members()

    def _open(self, members: Sequence[str], sizes: Sequence[int], timeout_s: float) -> None:
        """Begin a round; The group of the last round stays if its members do."""
        here = self._lobby.members()
        for name in members:
            if name not in here:
                raise PeerLostError(f"engine {name!r} is gone")
        channels = {name: here[name] for name in members}
        if self._members == channels:
            self._round += 1
            for channel in channels.values():
                channel.send(strict_json.dump({"form": None, "round": self._round}))
        else:
            self._form(channels, timeout_s)
        longest = max(sizes, default=1)
        if not self._slots or len(self._slots[0]) < longest:
            self._slots = [self._groups.buffer(longest) for _ in range(_BUFFERS)]
        for name, channel in channels.items():
            hear_opened(name, channel, self._round, timeout_s)

    def _send(self, timeout_s: float, pieces: Pieces) -> None:
        """Broadcast the bucket; A bucket of one piece is sent from where it lies."""
        if self._group is None:
            raise ConfigError("send: call open first")
        while len(self._pending) >= _BUFFERS:
            self._finish_one(timeout_s)
        bucket = self._groups.in_place(pieces)
        if bucket is None:
            self._slots.reverse()
            buffer = self._slots[0]
            fill(self._groups.fillable(buffer), pieces)
            bucket = buffer[: nbytes_of(pieces)]
        self._pending.append(self._groups.broadcast(self._group, bucket))

    def _finish(self, timeout_s: float) -> None:
        """Wait until all broadcasts have ended."""
        while self._pending:
            self._finish_one(timeout_s)

    def close(self) -> None:
        """Let every engine go and free the ports; see `Outlet.close`."""
        self._lobby.close()
        self._abandon()
        self._store = None

    def _finish_one(self, timeout_s: float) -> None:
        self._groups.wait(self._pending.popleft(), timeout_s, "an engine")

    def _form(self, channels: Mapping[str, SocketChannel], timeout_s: float) -> None:
        """Make a group with exactly these engines.

        Raises:
            PeerLostError, TransportTimeoutError: one did not come; `members` tells who is gone.
        """
        self._abandon()
        if self._store is None:
            self._store = self._groups.serve(self._host, timeout_s)
        self._round += 1
        form = {
            "backend": self._groups.backend,
            "host": self._host,
            "port": self._store.port,
            "prefix": str(self._round),
            "size": len(channels) + 1,
            "timeout_ms": round(1000 * timeout_s),
        }
        for rank, channel in enumerate(channels.values(), 1):
            channel.send(strict_json.dump({"form": {**form, "rank": rank}, "round": self._round}))
        self._group = self._groups.form(
            self._store, str(self._round), 0, len(channels) + 1, self._host, timeout_s
        )
        self._members = dict(channels)

    def _abandon(self) -> None:
        self._pending.clear()
        self._members = {}
        group, self._group = self._group, None
        if group is not None:
            self._groups.end(group)


class CollectiveInlet(Inlet):
    """The engine's end; see `CollectiveOutlet`.

    Args:
        address: the trainer's `host:port`.
        name: what the trainer calls this engine in messages; by default machine and process.
        host: the address of this machine by which the trainer and other engines reach it; by default the
            trainer's host if that is a loopback, else what this machine is called.
        timeout_s: see `Inlet`.
        token_env: environment variable with the trainer's token.
    """

    name: ClassVar[str] = CollectiveOutlet.name

    def __init__(
        self,
        address: str,
        *,
        name: str | None = None,
        host: str | None = None,
        timeout_s: float = 600.0,
        token_env: str | None = None,
    ) -> None:
        self.timeout_s = check_seconds("timeout_s", timeout_s)
        self._address = address
        self._name = default_name() if name is None else name
        self._host = host
        self._token_env = token_env
        self._channel: SocketChannel | None = None
        self._groups: _Groups | None = None
        self._group: Any = None
        self._slots: list[Any] = []
        self._coming: deque[tuple[Any, Any]] = deque()
        self._sizes: deque[int] = deque()
        self._slot = 0

    def channel(self) -> Channel:
        """Return the channel to the trainer; see `Inlet.channel`."""
        if self._channel is not None and self._channel.is_lost:
            self.close()
        if self._channel is None:
            self._channel = join(
                self._address,
                CollectiveOutlet.name,
                self._name,
                self.timeout_s,
                self._token_env,
            )
        return self._channel

    def buckets(self, sizes: Sequence[int]) -> Generator[Bits | DeviceBits, None, None]:
        """Take part in a round; see `Inlet.buckets`."""
        if self._channel is None:
            raise ConfigError("open: call channel first")
        form = hear_form(self._channel, self.timeout_s, _WHERE)  # called off, the group stays
        is_whole = False
        try:
            self._open(self._channel, form, sizes)
            for _ in sizes:
                yield self._receive()
                self._release()
            is_whole = True
        finally:
            if not is_whole:
                self._leave()

    def _open(
        self, channel: SocketChannel, fields: strict_json.Fields, sizes: Sequence[int]
    ) -> None:
        """Take part in a round."""
        if fields["form"] is not None:
            self._form(strict_json.Fields(fields["form"], _WHERE, _KEYS))
        if self._groups is None or self._group is None:
            raise FormatError(f"{_WHERE}: it was never formed")
        longest = max(sizes, default=1)
        if not self._slots or len(self._slots[0]) < longest:
            self._slots = [self._groups.buffer(longest) for _ in range(_BUFFERS)]
        self._sizes = deque(sizes)
        self._coming.clear()
        self._slot = 0
        channel.send(strict_json.dump({"opened": fields.integer("round")}))
        for _ in range(_BUFFERS):
            self._ask()

    def _receive(self) -> Bits | DeviceBits:
        """Return the next bucket."""
        if self._groups is None or not self._coming:
            raise ConfigError("receive: the round is over, or was not opened")
        work, bucket = self._coming[0]
        if work is not None:
            self._groups.wait(work, self.timeout_s, "the trainer")
            self._coming[0] = (None, bucket)
        return self._groups.readable(bucket)

    def _release(self) -> None:
        """Let the buffer take another bucket."""
        if self._groups is None or not self._coming:
            raise ConfigError("release: the round is over, or was not opened")
        self._groups.settle()
        self._coming.popleft()
        self._ask()

    def close(self) -> None:
        """Leave; see `Inlet.close`."""
        if self._channel is not None:
            self._channel.abort()
            self._channel = None
        self._leave()

    def _ask(self) -> None:
        """Take part in the next broadcast, into the buffer whose turn it is."""
        if self._sizes and self._groups is not None:
            bucket = self._slots[self._slot % _BUFFERS][: self._sizes.popleft()]
            self._slot += 1
            self._coming.append((self._groups.broadcast(self._group, bucket), bucket))

    def _form(self, fields: strict_json.Fields) -> None:
        self._leave()
        backend = fields.word("backend", "gloo", "nccl")
        self._groups = _Groups("gloo" if backend == "gloo" else "nccl")
        timeout_s = fields.integer("timeout_ms", minimum=1) / 1000
        host, size = fields.text("host"), fields.integer("size", minimum=2)
        rank = fields.integer("rank", minimum=1, maximum=size - 1)
        store = self._groups.connect(host, fields.integer("port", maximum=65535), timeout_s)
        own = self._host
        if own is None and host in ("127.0.0.1", "::1", "localhost"):
            own = host
        self._group = self._groups.form(store, fields.text("prefix"), rank, size, own, timeout_s)

    def _leave(self) -> None:
        self._coming.clear()
        group, self._group = self._group, None
        if group is not None and self._groups is not None:
            self._groups.end(group)


class _Groups:
    """What is asked of torch: stores, groups, broadcasts; its errors become ours."""

    def __init__(self, backend: Backend) -> None:
        if find_spec("torch") is None:
            raise TransportUnavailableError("torch is not installed; pip install syncline[torch]")
        self.torch = import_module("torch")
        self.dist = import_module("torch.distributed")
        if not self.dist.is_available():
            raise TransportUnavailableError("this torch was built without torch.distributed")
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
        import socket  # noqa: PLC0415

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
            options._threads = _BUFFERS  # noqa: SLF001
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

    def broadcast(self, group: Any, bucket: Any) -> Any:
        """Begin a broadcast; return what to wait for."""
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
        """Leave a group; what is under way in it fails."""
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
