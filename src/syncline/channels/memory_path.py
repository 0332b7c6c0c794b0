"""A live path between threads of one process: the reference of what `Outlet` and `Inlet` promise."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import numpy as np

from syncline.abc import Channel, Inlet
from syncline.channels.inlet import RoundInlet
from syncline.channels.memory import MemoryChannel
from syncline.channels.outlet import RoundOutlet
from syncline.channels.pieces import Pieces, fill
from syncline.errors import ConfigError, PeerLostError, TransportTimeoutError
from syncline.types import Bits, check_seconds
from syncline.version import Kind

_BUFFERS = 2
_LOOK_S = 0.02
_NUMBERS = itertools.count()
_OUTLETS: WeakValueDictionary[str, MemoryOutlet] = WeakValueDictionary()


class MemoryOutlet(RoundOutlet):
    """The trainer's end; `MemoryInlet(outlet)` joins.

    Example:
        >>> import numpy as np
        >>> outlet = MemoryOutlet()
        >>> inlet = MemoryInlet(outlet, name="engine")
        >>> _ = inlet.channel()
        >>> def engine():
        ...     for bucket in inlet.buckets([3]):
        ...         print(bucket.tolist())
        >>> waiting = threading.Thread(target=engine)
        >>> waiting.start()
        >>> with outlet.round(["engine"], [3], timeout_s=10.0) as send:
        ...     send([(0, np.arange(3, dtype=np.uint8))])
        [0, 1, 2]
    """

    name: ClassVar[str] = "memory"
    kinds: ClassVar[tuple[Kind, ...]] = ("full", "delta")
    bucket_bytes: ClassVar[int] = 1 << 20

    def __init__(self) -> None:
        self._changed = threading.Lock()
        self._members: dict[str, _Ends] = {}
        self._round: dict[str, _Lane] = {}
        self._buffers: list[Bits] = []
        self._sizes: list[int] = []
        self._sent = 0
        self.is_closed = False
        self._address = f"memory-{next(_NUMBERS)}"
        _OUTLETS[self._address] = self

    @property
    def address(self) -> str:
        """What `MemoryInlet.lane` finds this outlet by, inside this process."""
        return self._address

    def join(self, name: str) -> tuple[Channel, queue.SimpleQueue[_Lane]]:
        """Let an engine in; return its channel, and where it finds its end of every round.

        Raises:
            ConfigError: an engine of this name is here, or the trainer has closed.
        """
        self.members()
        with self._changed:
            if name in self._members or self.is_closed:
                raise ConfigError(
                    "the trainer has closed"
                    if self.is_closed
                    else f"an engine called {name!r} is here already; give this one a name"
                )
            ours, theirs = _LeavingChannel.pair()
            ends = _Ends(ours, queue.SimpleQueue())
            self._members[name] = ends
            return theirs, ends.rounds

    def members(self) -> Mapping[str, Channel]:
        """Return the engines that are here; see `Outlet.members`."""
        with self._changed:
            for name, ends in list(self._members.items()):
                if ends.channel.is_lost:
                    ends.channel.close()
                    del self._members[name]
            return {name: ends.channel for name, ends in self._members.items()}

    def _open(self, members: Sequence[str], sizes: Sequence[int], timeout_s: float) -> None:
        """Begin a round."""
        self._abandon()
        self._sizes, self._sent = list(sizes), 0
        longest = max(sizes, default=0)
        self._buffers = [np.empty(longest, np.uint8) for _ in range(_BUFFERS)]
        for name in members:
            ends = self._members.get(name)
            if ends is None or ends.channel.is_lost:
                raise PeerLostError(f"engine {name!r} is gone")
            lane = _Lane(self._buffers, tuple(sizes))
            self._round[name] = lane
            ends.rounds.put(lane)
        for name, lane in self._round.items():
            if not lane.opened.wait(timeout_s):
                raise TransportTimeoutError(f"engine {name!r} did not come in {timeout_s} s")

    def _send(self, timeout_s: float, pieces: Pieces) -> None:
        """Copy the bucket into the next buffer."""
        self._wait(self._sent - _BUFFERS + 1, timeout_s)
        fill(self._buffers[self._sent % _BUFFERS], pieces)
        self._sent += 1
        for lane in self._round.values():
            lane.filled.put(self._sent - 1)

    def _finish(self, timeout_s: float) -> None:
        """Wait until all buckets are released."""
        self._wait(self._sent, timeout_s)

    def close(self) -> None:
        """Let every engine go; see `Outlet.close`."""
        with self._changed:
            self.is_closed = True
            members, self._members = self._members, {}
        for ends in members.values():
            ends.channel.close()
        self._abandon()

    def _wait(self, released: int, timeout_s: float) -> None:
        """Wait until every member has released so many buckets."""
        for name, lane in self._round.items():
            with lane.changed:
                is_done = lane.changed.wait_for(
                    lambda lane=lane: lane.released >= released or lane.is_over,  # type: ignore[misc]
                    timeout_s,
                )
                if lane.is_over:
                    raise PeerLostError(f"engine {name!r} is gone")
                if not is_done:
                    raise TransportTimeoutError(
                        f"engine {name!r} released nothing in {timeout_s} s; it is slow or stuck"
                    )

    def _abandon(self) -> None:
        for lane in self._round.values():
            lane.end()
            lane.filled.put(None)
        self._round = {}


class MemoryInlet(RoundInlet):
    """An engine's end in another thread; see `MemoryOutlet`.

    Args:
        outlet: the trainer's end.
        name: what the trainer calls this engine.
        timeout_s: see `Inlet`.
    """

    name: ClassVar[str] = MemoryOutlet.name
    _numbers = itertools.count()

    def __init__(
        self, outlet: MemoryOutlet, *, name: str | None = None, timeout_s: float = 600.0
    ) -> None:
        self.timeout_s = check_seconds("timeout_s", timeout_s)
        self._outlet = outlet
        self._name = f"engine-{next(self._numbers)}" if name is None else name
        self._channel: Channel | None = None
        self._rounds: queue.SimpleQueue[_Lane] = queue.SimpleQueue()
        self._lane: _Lane | None = None
        self._lanes: dict[str, MemoryInlet] = {}

    def channel(self) -> Channel:
        """Return the channel to the trainer; see `Inlet.channel`."""
        if isinstance(self._channel, _LeavingChannel) and self._channel.is_lost:
            self._channel.close()
            self._channel = None
        if self._channel is None:
            self._channel, self._rounds = self._outlet.join(self._name)
        return self._channel

    def lane(self, address: str) -> Inlet:
        """Return the inlet for another trainer rank; see `Inlet.lane`."""
        if address not in self._lanes:
            outlet = _OUTLETS.get(address)
            if outlet is None:
                raise PeerLostError(f"no trainer rank has the address {address!r} in this process")
            self._lanes[address] = MemoryInlet(outlet, name=self._name, timeout_s=self.timeout_s)
        return self._lanes[address]

    def _open(self, called: Any, sizes: Sequence[int]) -> None:
        lane: _Lane = called
        self._lane = lane
        if lane.sizes != tuple(sizes):
            raise ConfigError(
                f"the round has buckets of {lane.sizes} bytes, expected {list(sizes)}"
            )
        lane.opened.set()

    def _called(self) -> _Lane:
        """Wait for the trainer to begin a round; a word from it instead means that none begins."""
        self._leave()
        deadline_s = time.monotonic() + self.timeout_s
        while time.monotonic() < deadline_s:
            if self._channel is None:
                raise PeerLostError("no trainer: call channel first; or this inlet was closed")
            with suppress(queue.Empty):
                return self._rounds.get(timeout=min(_LOOK_S, self.timeout_s))
            if isinstance(self._channel, _LeavingChannel) and self._channel.has_message:
                self._channel.receive(0.0)
                raise PeerLostError("the trainer called the round off before it began")
        raise TransportTimeoutError(f"the trainer opened no round in {self.timeout_s} s")

    def _receive(self) -> Bits:
        lane = self._open_lane()
        try:
            filled = lane.filled.get(timeout=self.timeout_s)
        except queue.Empty:
            raise TransportTimeoutError(f"no bucket came in {self.timeout_s} s") from None
        if filled is None:
            raise PeerLostError("the trainer ended the round, or this engine has left it")
        bucket = lane.buffers[filled % _BUFFERS][: lane.sizes[filled]].view()
        bucket.flags.writeable = False
        return bucket

    def _release(self) -> None:
        lane = self._open_lane()
        with lane.changed:
            lane.released += 1
            lane.changed.notify_all()

    def close(self) -> None:
        """Leave; see `Inlet.close`."""
        self._leave()
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        lanes, self._lanes = self._lanes, {}
        for each in lanes.values():
            each.close()

    def _open_lane(self) -> _Lane:
        if self._lane is None:
            raise PeerLostError("this engine has left the round: its inlet was closed")
        return self._lane

    def _leave(self) -> None:
        lane, self._lane = self._lane, None
        if lane is not None and lane.released < len(lane.sizes):
            lane.end()
            lane.filled.put(None)


class _LeavingChannel(MemoryChannel):
    """A memory channel that can be asked whether a side has closed, and whether a message waits."""

    @property
    def has_message(self) -> bool:
        return self._incoming.has_message or self._incoming.is_closed

    @property
    def is_lost(self) -> bool:
        return self._incoming.is_closed or self._outgoing.is_closed


class _Ends:
    """What the trainer keeps of one engine."""

    def __init__(self, channel: _LeavingChannel, rounds: queue.SimpleQueue[_Lane]) -> None:
        self.channel = channel
        self.rounds = rounds


class _Lane:
    """One engine's share of a round: which buckets are filled, and how many it has released."""

    def __init__(self, buffers: list[Bits], sizes: tuple[int, ...]) -> None:
        self.buffers = buffers
        self.sizes = sizes
        self.opened = threading.Event()
        self.filled: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self.changed = threading.Condition()
        self.released = 0
        self.is_over = False

    def end(self) -> None:
        with self.changed:
            self.is_over = True
            self.changed.notify_all()
