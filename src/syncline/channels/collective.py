"""A live path over `torch.distributed`: broadcasts of buckets in a process group of the trainer and its engines.

Engines join over TCP; that connection carries all words, and shows at once who has died. For every set of
members a group is made, of which the trainer is rank 0; nobody needs, or touches, a default group. Two
broadcasts are under way at a time. A broadcast that fails closes its group; the next round makes another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from syncline.abc import Channel, Inlet
from syncline.channels.groups import BUFFERS, Backend, Groups, load_torch
from syncline.channels.inlet import RoundInlet
from syncline.channels.lobby import Lobby, default_name, join
from syncline.channels.outlet import RoundOutlet
from syncline.channels.pieces import Pieces, fill, nbytes_of
from syncline.channels.rounds import hear_form, hear_opened
from syncline.channels.sockets import SocketChannel
from syncline.errors import ConfigError, FormatError, PeerLostError
from syncline.format import strict_json
from syncline.types import Bits, DeviceBits, check_seconds
from syncline.version import Kind

_WHERE = "the trainer's group"
_CLOSED = "this engine has left the round: its inlet was closed"
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
        self._groups = Groups(backend)
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
            self._slots = [self._groups.buffer(longest) for _ in range(BUFFERS)]
        for name, channel in channels.items():
            hear_opened(name, channel, self._round, timeout_s)

    def _send(self, timeout_s: float, pieces: Pieces) -> None:
        """Broadcast the bucket; A bucket of one piece is sent from where it lies."""
        if self._group is None:
            raise ConfigError("send: call open first")
        while len(self._pending) >= BUFFERS:
            self._finish_one(timeout_s)
        bucket = self._groups.in_place(pieces)
        if bucket is None:
            self._slots.reverse()
            buffer = self._slots[0]
            fill(self._groups.fillable(buffer), pieces)
            bucket = buffer[: nbytes_of(pieces)]
        self._pending.append(self._groups.broadcast(self._group, bucket, timeout_s))

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
        self._slots = []
        self._members = {}
        group, self._group = self._group, None
        if group is not None:
            self._groups.end(group)


class CollectiveInlet(RoundInlet):
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
        self._groups: Groups | None = None
        self._group: Any = None
        self._slots: list[Any] = []
        self._coming: deque[tuple[Any, Any]] = deque()
        self._sizes: deque[int] = deque()
        self._slot = 0
        self._lanes: dict[str, CollectiveInlet] = {}

    def channel(self) -> Channel:
        """Return the channel to the trainer; see `Inlet.channel`."""
        if self._channel is not None and self._channel.is_lost:
            self.close()
        if self._channel is None:
            load_torch()  # before the trainer counts on this engine and its clock runs
            self._channel = join(
                self._address,
                CollectiveOutlet.name,
                self._name,
                self.timeout_s,
                self._token_env,
            )
        return self._channel

    def lane(self, address: str) -> Inlet:
        """Return the inlet for another trainer rank; see `Inlet.lane`."""
        if address not in self._lanes:
            self._lanes[address] = CollectiveInlet(
                address,
                name=self._name,
                host=self._host,
                timeout_s=self.timeout_s,
                token_env=self._token_env,
            )
        return self._lanes[address]

    def _called(self) -> strict_json.Fields:
        if self._channel is None:
            raise PeerLostError("no trainer: call channel first; or this inlet was closed")
        return hear_form(self._channel, self.timeout_s, _WHERE)

    def _open(self, called: strict_json.Fields, sizes: Sequence[int]) -> None:
        if called["form"] is not None:
            self._form(strict_json.Fields(called["form"], _WHERE, _KEYS))
        if self._groups is None or self._group is None:
            raise FormatError(f"{_WHERE}: it was never formed")
        channel = self._channel
        if channel is None:
            raise PeerLostError(_CLOSED)
        longest = max(sizes, default=1)
        if not self._slots or len(self._slots[0]) < longest:
            self._slots = [self._groups.buffer(longest) for _ in range(BUFFERS)]
        self._sizes = deque(sizes)
        self._coming = deque()
        self._slot = 0
        channel.send(strict_json.dump({"opened": called.integer("round")}))
        for _ in range(BUFFERS):
            self._ask()

    def _receive(self) -> Bits | DeviceBits:
        coming = self._coming  # another thread that closes puts an empty one in its place
        if self._groups is None or not coming:
            raise PeerLostError(_CLOSED)
        work, bucket = coming.popleft()
        self._groups.wait(work, self.timeout_s, "the trainer")
        return self._groups.readable(bucket)

    def _release(self) -> None:
        if self._groups is None:
            raise PeerLostError(_CLOSED)
        self._groups.settle()
        self._ask()

    def close(self) -> None:
        """Leave; see `Inlet.close`."""
        if self._channel is not None:
            self._channel.abort()
            self._channel = None
        self._leave()
        lanes, self._lanes = self._lanes, {}
        for lane in lanes.values():
            lane.close()

    def _ask(self) -> None:
        """Take part in the next broadcast, into the buffer whose turn it is."""
        slots = self._slots  # before the group: another thread that closes takes them after it
        group = self._group
        if group is None or self._groups is None:
            raise PeerLostError(_CLOSED)
        if self._sizes:
            bucket = slots[self._slot % BUFFERS][: self._sizes.popleft()]
            self._slot += 1
            self._coming.append((self._groups.broadcast(group, bucket, self.timeout_s), bucket))

    def _form(self, fields: strict_json.Fields) -> None:
        self._leave()
        backend = fields.word("backend", "gloo", "nccl")
        self._groups = Groups("gloo" if backend == "gloo" else "nccl")
        # If one of them never comes, this engine is to say so while the trainer still listens.
        timeout_s = fields.integer("timeout_ms", minimum=1) / 2000
        host, size = fields.text("host"), fields.integer("size", minimum=2)
        rank = fields.integer("rank", minimum=1, maximum=size - 1)
        port = fields.integer("port", maximum=65535)
        store = self._groups.connect(host, port, timeout_s)
        own = self._host
        if own is None and host in ("127.0.0.1", "::1", "localhost"):
            own = host
        self._group = self._groups.form(store, fields.text("prefix"), rank, size, own, timeout_s)

    def _leave(self) -> None:
        self._coming = deque()
        group, self._group = self._group, None
        self._slots = []  # broadcasts that are still under way in the old group keep theirs
        if group is not None and self._groups is not None:
            self._groups.end(group)
