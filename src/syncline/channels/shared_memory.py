"""A live path inside one machine: two buffers of shared memory, filled in turn, read where they are.

The memory has no name. It is made by the trainer, sealed, and handed to every engine as an open file over
the Unix socket on which the engine joined; so nothing is left behind, whoever is killed when. Beside it every
engine has a pair of sockets for numbers of buckets: filled in one direction, released in the other.

    trainer: wait for `released n-2` of all, copy bucket n into buffer n mod 2, say `filled n` to all
    engine:  wait for `filled n`, use the bucket where it lies, say `released n`
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import ClassVar

from syncline.abc import Channel, Inlet
from syncline.channels.buffers import BUFFERS, Buffers, HostBuffers, HostView, View
from syncline.channels.inlet import RoundInlet
from syncline.channels.lobby import Lobby, default_name, join
from syncline.channels.outlet import RoundOutlet
from syncline.channels.pieces import Pieces, fill
from syncline.channels.rounds import hear_form
from syncline.channels.sockets import SocketChannel
from syncline.endpoints import own
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

_NUMBER = struct.Struct("<q")
_READY = -1
_CLOSED = "this engine has left the round: its inlet was closed"
_WHERE = "the trainer's buffers"
_HOST_FDS = 2
_PAGE_BYTES = mmap.PAGESIZE


class SharedMemoryOutlet(RoundOutlet):
    """The trainer's end for engines on the same machine, in shared memory or, with `device`, GPU memory.

    Args:
        path: Unix socket on which engines join; only this user's processes can.
        timeout_s: how long a message to an engine may take.
        device: index of the GPU whose memory the buffers are in, handed over by CUDA IPC; None: host
            memory. With a device it has never been run: no GPU was there to run it on.

    Raises:
        ConfigError: the path is in use or too long.

    Full versions only. A delta saves nothing here: all weights cross at the speed of memory, and finding
    what changed means reading all of them, too.
    """

    name: ClassVar[str] = "shared-memory"
    kinds: ClassVar[tuple[Kind, ...]] = ("full",)
    bucket_bytes: ClassVar[int] = 2 << 20
    """Both buffers stay in the cache between the two copies; see benchmarks/colocated.py."""

    def __init__(self, path: str, *, timeout_s: float = 60.0, device: int | None = None) -> None:
        self._lobby = Lobby(path, self.name, timeout_s)
        self._device = device
        self._buffers: Buffers | None = None
        self._bells: dict[str, socket.socket] = {}
        self._released: dict[str, int] = {}
        self._sent = self._round = 0
        self._formed_with: dict[str, SocketChannel] = {}

    @property
    def address(self) -> str:
        """Where engines join: the path."""
        return self._lobby.address

    def wait(self, engines: int, timeout_s: float) -> None:
        """Return when so many engines have joined; raise `TransportTimeoutError` if they do not."""
        self._lobby.wait(engines, timeout_s)

    def members(self) -> Mapping[str, Channel]:
        """Return the engines that are here; see `Outlet.members`."""
        return self._lobby.members()

    def _open(self, members: Sequence[str], sizes: Sequence[int], timeout_s: float) -> None:
        """Begin a round; The memory of the last round is used again if it can be."""
        longest = -(-max(sizes, default=1) // _PAGE_BYTES) * _PAGE_BYTES
        self._round += 1
        is_fit = self._buffers is not None and self._buffers.bucket_bytes >= longest
        here = self._present(members)
        if not (is_fit and self._formed_with == here):
            self._form(here, longest)
        else:
            for name, channel in here.items():
                channel.send(
                    strict_json.dump({"form": None, "round": self._round}), timeout_s=timeout_s
                )
                self._released[name] = 0
        self._sent = 0
        deadline_s = time.monotonic() + timeout_s
        for name in members:
            self._hear(name, _READY, deadline_s, "did not open the round")

    def _send(self, timeout_s: float, pieces: Pieces) -> None:
        """Copy the bucket into the buffer whose turn it is."""
        if self._buffers is None:
            raise ConfigError("send: call open first")
        self._wait(self._sent - BUFFERS + 1, timeout_s)
        fill(self._buffers.at(self._sent % BUFFERS), pieces)
        self._buffers.settle()
        for name, bell in self._bells.items():
            try:
                bell.sendall(_NUMBER.pack(self._sent))
            except OSError as error:
                raise PeerLostError(f"engine {name!r} is gone") from error
        self._sent += 1

    def _finish(self, timeout_s: float) -> None:
        """Wait until all buckets are released."""
        self._wait(self._sent, timeout_s)

    def close(self) -> None:
        """Let every engine go, free the memory and the path; see `Outlet.close`."""
        self._lobby.close()
        self._abandon()

    def _form(self, members: Mapping[str, SocketChannel], bucket_bytes: int) -> None:
        self._abandon()
        self._buffers = self._allocated(bucket_bytes)
        form, fds = self._buffers.told()
        for name, channel in members.items():
            try:
                ours, theirs = socket.socketpair()
            except OSError as error:
                raise TransportUnavailableError(f"a pair of sockets: {error.strerror}") from error
            self._bells[name], self._released[name] = own(ours), 0
            with theirs:
                channel.send(
                    strict_json.dump({"form": form, "round": self._round}), [theirs.fileno(), *fds]
                )
        self._formed_with = dict(members)

    def _present(self, members: Sequence[str]) -> dict[str, SocketChannel]:
        here = self._lobby.members()
        for name in members:
            if name not in here:
                raise PeerLostError(f"engine {name!r} is gone")
        return {name: here[name] for name in members}

    def _allocated(self, bucket_bytes: int) -> Buffers:
        if self._device is None:
            return HostBuffers(bucket_bytes)
        from syncline.channels.cuda_ipc import CudaBuffers  # noqa: PLC0415 - needs torch

        return CudaBuffers(bucket_bytes, self._device)

    def _wait(self, released: int, timeout_s: float) -> None:
        """Wait until every member has released so many buckets."""
        deadline_s = time.monotonic() + timeout_s
        for name in self._bells:
            while self._released[name] < released:
                self._hear(name, self._released[name], deadline_s, "released nothing")
                self._released[name] += 1

    def _hear(self, name: str, expected: int, deadline_s: float, fault: str) -> None:
        try:
            number = _rung(self._bells[name], deadline_s)
        except TransportTimeoutError:
            raise TransportTimeoutError(
                f"engine {name!r} {fault} in time; it is slow or stuck"
            ) from None
        if number != expected:
            raise PeerLostError(
                f"engine {name!r} is gone"
                if number is None
                else f"engine {name!r} answered for bucket {number}, expected {expected}"
            )

    def _abandon(self) -> None:
        for bell in self._bells.values():
            bell.close()
        self._bells, self._released, self._formed_with = {}, {}, {}
        if self._buffers is not None:
            self._buffers.free()
            self._buffers = None


class SharedMemoryInlet(RoundInlet):
    """The engine's end on the same machine; see `SharedMemoryOutlet`.

    Args:
        path: the trainer's.
        name: what the trainer calls this engine in messages; by default machine and process.
        timeout_s: see `Inlet`.
    """

    name: ClassVar[str] = SharedMemoryOutlet.name

    def __init__(self, path: str, *, name: str | None = None, timeout_s: float = 600.0) -> None:
        self.timeout_s = check_seconds("timeout_s", timeout_s)
        self._path = path
        self._name = default_name() if name is None else name
        self._channel: SocketChannel | None = None
        self._view: View | None = None
        self._bell: socket.socket | None = None
        self._sizes: tuple[int, ...] = ()
        self._at = 0
        self._lanes: dict[str, SharedMemoryInlet] = {}

    def channel(self) -> Channel:
        """Return the channel to the trainer; see `Inlet.channel`."""
        if self._channel is not None and self._channel.is_lost:
            self.close()
        if self._channel is None:
            self._channel = join(self._path, SharedMemoryOutlet.name, self._name, self.timeout_s)
        return self._channel

    def lane(self, address: str) -> Inlet:
        """Return the inlet for another trainer rank; see `Inlet.lane`."""
        if address not in self._lanes:
            self._lanes[address] = SharedMemoryInlet(
                address, name=self._name, timeout_s=self.timeout_s
            )
        return self._lanes[address]

    def _called(self) -> strict_json.Fields:
        if self._channel is None:
            raise PeerLostError("no trainer: call channel first; or this inlet was closed")
        return hear_form(self._channel, self.timeout_s, _WHERE)

    def _open(self, called: strict_json.Fields, sizes: Sequence[int]) -> None:
        if self._channel is None:
            raise PeerLostError(_CLOSED)
        fds = self._channel.take_fds()
        try:
            if called["form"] is not None:
                self._form(called["form"], _WHERE, fds)
        finally:
            for fd in fds:
                os.close(fd)
        if self._bell is None or self._view is None:
            raise FormatError(f"{_WHERE}: they were never handed over")
        self._sizes, self._at = tuple(sizes), 0
        if max(sizes, default=0) > self._view.bucket_bytes:
            raise FormatError(f"{_WHERE} have {self._view.bucket_bytes} bytes, a bucket has more")
        self._ring(_READY)

    def _receive(self) -> Bits | DeviceBits:
        bell, view = self._bell, self._view
        if bell is None or view is None:
            raise PeerLostError(_CLOSED)
        try:
            number = _rung(bell, time.monotonic() + self.timeout_s)
        except TransportTimeoutError:
            raise TransportTimeoutError(
                f"the trainer filled no bucket in {self.timeout_s} s; it is slow or stuck"
            ) from None
        if number is None:
            raise PeerLostError("the trainer is gone, or has ended the round")
        if number != self._at:
            raise FormatError(f"the trainer filled bucket {number}, expected {self._at}")
        if self._view is None:
            raise PeerLostError(_CLOSED)
        return view.at(self._at % BUFFERS)[: self._sizes[self._at]]

    def _release(self) -> None:
        if self._view is not None:
            self._view.settle()
        self._ring(self._at)
        self._at += 1

    def close(self) -> None:
        """Leave; see `Inlet.close`."""
        if self._channel is not None:
            self._channel.abort()
            self._channel = None
        self._leave()
        lanes, self._lanes = self._lanes, {}
        for lane in lanes.values():
            lane.close()

    def _form(self, form: object, where: str, fds: list[int]) -> None:
        """Map the memory; the files are the last ones that came, those before are of a round called off."""
        self._leave()
        fields = strict_json.Fields(form, where, ("kind", "bucket_bytes", "handle"))
        bucket_bytes = fields.integer("bucket_bytes", minimum=1)
        kind = fields.word("kind", "host", "cuda")
        count = _HOST_FDS if kind == "host" else 1
        if len(fds) < count:
            raise FormatError(
                f"{where}: expected {count} open files to come along, found {len(fds)}"
            )
        bell, *memory = fds[-count:]
        self._bell = own(socket.socket(fileno=os.dup(bell)))
        if kind == "host":
            self._view = HostView(memory[0], bucket_bytes)
        else:
            from syncline.channels.cuda_ipc import CudaView  # noqa: PLC0415 - needs torch

            self._view = CudaView(fields.text("handle"), bucket_bytes)

    def _ring(self, number: int) -> None:
        if self._bell is None:
            raise PeerLostError(_CLOSED)
        try:
            self._bell.sendall(_NUMBER.pack(number))
        except OSError as error:
            raise PeerLostError("the trainer is gone, or has ended the round") from error

    def _leave(self) -> None:
        if self._bell is not None:
            self._bell.close()
            self._bell = None
        if self._view is not None:
            self._view.free()
            self._view = None


def _rung(bell: socket.socket, deadline_s: float) -> int | None:
    """Return the next number of a bell; None if the other side is gone.

    Raises:
        TransportTimeoutError: none came in time.
    """
    raw = b""
    poll = select.poll()
    try:
        poll.register(bell, select.POLLIN)
    except ValueError:  # closed by another thread
        return None
    while len(raw) < _NUMBER.size:
        left_ms = 1000 * (deadline_s - time.monotonic())
        if not poll.poll(max(0.0, left_ms)):
            raise TransportTimeoutError("nothing came in time")
        try:
            data = bell.recv(_NUMBER.size - len(raw))
        except OSError:
            return None
        if not data:
            return None
        raw += data
    number: int = _NUMBER.unpack(raw)[0]
    return number
