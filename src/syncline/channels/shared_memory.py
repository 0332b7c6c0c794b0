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
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from typing import ClassVar, Protocol

import numpy as np

from syncline.abc import Channel, Inlet
from syncline.anonymous import anonymous_file, is_sealed
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

_BUFFERS = 2
_NUMBER = struct.Struct("<q")
_READY = -1
_WHERE = "the trainer's buffers"
_HOST_FDS = 2
_PAGE_BYTES = mmap.PAGESIZE


class Buffers(Protocol):
    """Two buffers that a trainer shares: their memory here, and what an engine needs to see it."""

    bucket_bytes: int

    def at(self, slot: int) -> Bits | DeviceBits:
        """Return one of the buffers, (bucket_bytes,) uint8."""

    def told(self) -> tuple[Mapping[str, object], list[int]]:
        """Return what to tell an engine, as JSON and open files."""

    def settle(self) -> None:
        """Return when what was written to the buffers is there for other processes."""

    def free(self) -> None:
        """Give the memory back."""


class HostBuffers:
    """Two buffers in anonymous shared memory that nobody can shrink."""

    kind = "host"

    def __init__(self, bucket_bytes: int) -> None:
        self.bucket_bytes = bucket_bytes
        self._fd = anonymous_file(_BUFFERS * bucket_bytes)
        try:
            self._map = mmap.mmap(self._fd, _BUFFERS * bucket_bytes)
        except OSError as error:
            os.close(self._fd)
            raise TransportUnavailableError(f"shared memory: {error.strerror}") from error
        self._bits = np.frombuffer(self._map, np.uint8).reshape(_BUFFERS, bucket_bytes)

    def at(self, slot: int) -> Bits:
        """Return one of the buffers."""
        found: Bits = self._bits[slot]
        return found

    def told(self) -> tuple[Mapping[str, object], list[int]]:
        """Return the size, and the file that is the memory."""
        return {"kind": self.kind, "bucket_bytes": self.bucket_bytes, "handle": ""}, [self._fd]

    def settle(self) -> None:
        """Do nothing: the message that follows orders what was written before it."""

    def free(self) -> None:
        """Close the file; the memory goes when the last view of it does."""
        os.close(self._fd)
        del self._bits
        with suppress(BufferError):  # a view is still in use; it frees the map itself
            self._map.close()


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
        self._wait(self._sent - _BUFFERS + 1, timeout_s)
        fill(self._buffers.at(self._sent % _BUFFERS), pieces)
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


class SharedMemoryInlet(Inlet):
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
        self._view: _View | None = None
        self._bell: socket.socket | None = None
        self._sizes: tuple[int, ...] = ()
        self._at = 0

    def channel(self) -> Channel:
        """Return the channel to the trainer; see `Inlet.channel`."""
        if self._channel is not None and self._channel.is_lost:
            self.close()
        if self._channel is None:
            self._channel = join(self._path, SharedMemoryOutlet.name, self._name, self.timeout_s)
        return self._channel

    def buckets(self, sizes: Sequence[int]) -> Generator[Bits | DeviceBits, None, None]:
        """Take part in a round; see `Inlet.buckets`."""
        if self._channel is None:
            raise ConfigError("open: call channel first")
        form = hear_form(self._channel, self.timeout_s, _WHERE)  # called off, the buffers stay
        is_whole = False
        try:
            self._open(self._channel, form, sizes)
            for _ in sizes:
                yield self._receive()
                self._release()
            is_whole = True
        finally:
            if not is_whole:
                self._free()

    def _open(
        self, channel: SocketChannel, fields: strict_json.Fields, sizes: Sequence[int]
    ) -> None:
        """Take part in a round."""
        fds = channel.take_fds()
        try:
            if fields["form"] is not None:
                self._form(fields["form"], _WHERE, fds)
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
        """Return the next bucket."""
        if self._bell is None or self._view is None or self._at >= len(self._sizes):
            raise ConfigError("receive: the round is over, or was not opened")
        try:
            number = _rung(self._bell, time.monotonic() + self.timeout_s)
        except TransportTimeoutError:
            raise TransportTimeoutError(
                f"the trainer filled no bucket in {self.timeout_s} s; it is slow or stuck"
            ) from None
        if number is None:
            raise PeerLostError("the trainer is gone, or has ended the round")
        if number != self._at:
            raise FormatError(f"the trainer filled bucket {number}, expected {self._at}")
        return self._view.at(self._at % _BUFFERS)[: self._sizes[self._at]]

    def _release(self) -> None:
        """Let the buffer be filled again."""
        if self._view is not None:
            self._view.settle()
        self._ring(self._at)
        self._at += 1

    def close(self) -> None:
        """Leave; see `Inlet.close`."""
        if self._channel is not None:
            self._channel.abort()
            self._channel = None
        self._free()

    def _form(self, form: object, where: str, fds: list[int]) -> None:
        """Map the memory; the files are the last ones that came, those before are of a round called off."""
        self._free()
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
            self._view = _HostView(memory[0], bucket_bytes)
        else:
            from syncline.channels.cuda_ipc import CudaView  # noqa: PLC0415 - needs torch

            self._view = CudaView(fields.text("handle"), bucket_bytes)

    def _ring(self, number: int) -> None:
        if self._bell is None:
            raise ConfigError("release: the round was not opened")
        try:
            self._bell.sendall(_NUMBER.pack(number))
        except OSError as error:
            raise PeerLostError("the trainer is gone, or has ended the round") from error

    def _free(self) -> None:
        if self._bell is not None:
            self._bell.close()
            self._bell = None
        if self._view is not None:
            self._view.free()
            self._view = None


class _View(Protocol):
    """An engine's view of a trainer's buffers."""

    bucket_bytes: int

    def at(self, slot: int) -> Bits | DeviceBits: ...

    def settle(self) -> None: ...

    def free(self) -> None: ...


class _HostView:
    """A read-only map of a trainer's shared memory."""

    def __init__(self, fd: int, bucket_bytes: int) -> None:
        self.bucket_bytes = bucket_bytes
        found_bytes = os.fstat(fd).st_size
        if found_bytes != _BUFFERS * bucket_bytes or not is_sealed(fd):
            raise FormatError(
                f"the trainer's buffers: expected {_BUFFERS * bucket_bytes} bytes that nobody can shrink, "
                f"found {found_bytes}"
            )
        self._map = mmap.mmap(fd, found_bytes, prot=mmap.PROT_READ)
        self._bits = np.frombuffer(self._map, np.uint8).reshape(_BUFFERS, bucket_bytes)

    def at(self, slot: int) -> Bits:
        found: Bits = self._bits[slot]
        return found

    def settle(self) -> None:
        """Do nothing: reads are done when the message that says so goes out."""

    def free(self) -> None:
        del self._bits
        with suppress(BufferError):  # a view is still in use; it frees the map itself
            self._map.close()


def _rung(bell: socket.socket, deadline_s: float) -> int | None:
    """Return the next number of a bell; None if the other side is gone.

    Raises:
        TransportTimeoutError: none came in time.
    """
    raw = b""
    poll = select.poll()
    poll.register(bell, select.POLLIN)
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
