"""Reads of a peer's memory on the same machine: both map the same pages, and a read is one copy.

The memory has no name in any file system: it is found through the peer's process. So nothing can be left
behind, whoever is killed, and only who may look into that process finds it. Linux alone, in one PID namespace, same user.
"""

from __future__ import annotations

import mmap
import os
import select
import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from syncline.abc import ByteArray, PeerMemory
from syncline.anonymous import anonymous_file, is_sealed
from syncline.errors import (
    ConfigError,
    FormatError,
    MovedOnError,
    PeerLostError,
    TransportUnavailableError,
)
from syncline.peers import regions
from syncline.peers.regions import Description, Regions
from syncline.types import Bits, Read

_FIELDS = ("pid", "born", "machine", "table", "table_inode")
_SLOTS = 1 << 17


@dataclass(frozen=True, slots=True, eq=False)
class _Pages:
    """Memory of our own that others can map: the descriptor that they open, and where it lies here."""

    descriptor: int
    inode: int
    first: int
    memory: ByteArray


class SharedPeer(PeerMemory):
    """Memory that peers on the same machine map and read.

    Only memory that came from `allocate` of the same object can be registered. A peer that was killed can be
    read no more, and what was mapped of it is let go of.

    Raises:
        TransportUnavailableError: not Linux.
    """

    name = "shared"

    def __init__(self) -> None:
        if not sys.platform.startswith("linux"):
            raise TransportUnavailableError("shared pages are found through /proc: Linux alone")
        self._regions = Regions()
        self._pages: list[_Pages] = []
        self._mapped: dict[tuple[str, str, str], ByteArray] = {}
        self._watched: dict[tuple[int, str], _Watch] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self._pid = os.getpid()
        # One word a region, its number while it is registered: readers look at it before and after.
        self._table = self.allocate(8 * _SLOTS).view("<u8")
        self._numbers: dict[str, int] = {}
        self._next = 1

    def allocate(self, nbytes: int) -> ByteArray:
        """Return (nbytes,) zeros that peers can map, once registered; they live until `free` or `close`.

        Raises:
            TransportUnavailableError: the system has no memory left for it.
        """
        descriptor = anonymous_file(max(nbytes, 1))
        try:
            pages = mmap.mmap(descriptor, max(nbytes, 1))
        except OSError as error:
            os.close(descriptor)
            raise TransportUnavailableError(
                f"{nbytes} bytes of shared memory: {error.strerror}"
            ) from error
        memory: ByteArray = np.frombuffer(pages, np.uint8)[:nbytes]
        first = int(np.frombuffer(pages, np.uint8).ctypes.data)
        with self._lock:
            self._pages.append(_Pages(descriptor, os.fstat(descriptor).st_ino, first, memory))
        return memory

    def free(self, memory: ByteArray) -> None:
        """Let go of memory from `allocate` that is registered no more; harmless for any other.

        The system has it back when no array, and no peer that mapped it, uses it any more.
        """
        with self._lock:
            found = [p for p in self._pages[1:] if p.first == int(memory.ctypes.data)]
            self._pages = [pages for pages in self._pages if pages not in found]
        for pages in found:
            os.close(pages.descriptor)

    def forget(self) -> None:
        """Let go of what was mapped of peers; it is mapped again when it is read again."""
        with self._lock:
            self._mapped.clear()
            self._watched.clear()

    def register(self, region: str, memory: ByteArray) -> None:
        """Make memory from `allocate` readable; see `PeerMemory.register`."""
        if self._is_closed or self._pid != os.getpid():
            why = "closed" if self._is_closed else "made before this process was forked"
            raise ConfigError(f"register: this side was {why}; make a new one")
        self._find(region, memory)
        if self._next == _SLOTS:
            raise ConfigError(f"register: {_SLOTS - 1} regions are the most; make a new side")
        self._regions.add(region, memory)
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._numbers[region] = number
            self._table[number] = number

    def unregister(self, region: str) -> None:
        """Take a region back; see `PeerMemory.unregister`."""
        with self._lock:
            number = self._numbers.pop(region, None)
            if (
                number is not None and self._pid == os.getpid()
            ):  # the table is a forked child's, too
                self._table[number] = 0
        self._regions.remove(region)

    def describe(self) -> bytes:
        """Return what peers need; see `PeerMemory.describe`."""
        rows = {}
        for name, memory in self._regions.items():
            pages = self._find(name, memory)
            offset = int(memory.ctypes.data) - pages.first
            rows[name] = (memory.size, pages.descriptor, pages.inode, offset, self._numbers[name])
        pid, table = os.getpid(), self._pages[0]
        fields = {
            "pid": str(pid),
            "born": _born(pid),
            "machine": machine(),
            "table": str(table.descriptor),
            "table_inode": str(table.inode),
        }
        return Description(self.name, f"process {pid}", fields, rows).dump()

    def read(self, peer: bytes, reads: Sequence[Read], timeout_s: float) -> None:
        """Copy from the peer's pages; see `PeerMemory.read`. Never waits."""
        places = dict(zip(reads, self._regions.places(reads), strict=True))
        described = regions.load(peer, self.name, _FIELDS, 4)
        located = described.locate(reads)
        fields = described.fields
        numbers = (fields["pid"], fields["table"], fields["table_inode"])
        if not all(number.isdecimal() for number in numbers):
            raise FormatError(f"{described.place}: expected numbers, found {numbers!r:.80}")
        if fields["machine"] != machine():
            raise PeerLostError(f"{described.place} is on another machine")
        if not self._lives(int(fields["pid"]), fields["born"]):
            self._forget(fields["pid"])
            raise PeerLostError(f"{described.place} has ended")
        table = self._map(described, fields["table"], fields["table_inode"]).view("<u8")
        for read, (_, descriptor, inode, first, number) in located:
            _require(table, number, described, read)
            pages = self._map(described, str(descriptor), str(inode))
            start = first + read.offset
            if start + read.nbytes > pages.size:
                raise MovedOnError(f"{described.place}: region {read.region!r} is not there")
            places[read][:] = pages[start : start + read.nbytes]
        for read, row in located:
            _require(table, row[-1], described, read)

    def close(self) -> None:
        """Let go of all memory: it is freed when no array and no peer uses it any more."""
        self._is_closed = True
        for region in self._regions.names():
            self.unregister(region)
        with self._lock:
            pages, self._pages = self._pages, []
            self._table = np.zeros(0, "<u8")  # a closed object may live on, its pages need not
            self._mapped.clear()
            self._watched.clear()
        for one in pages:
            os.close(one.descriptor)

    def _find(self, region: str, memory: ByteArray) -> _Pages:
        address = int(memory.ctypes.data) if isinstance(memory, np.ndarray) else -1
        with self._lock:
            for pages in self._pages:
                if pages.first <= address <= pages.first + pages.memory.size - memory.nbytes:
                    return pages
        raise ConfigError(
            f"region {region!r}: peers can map only memory that came from allocate() of this object"
        )

    def _map(self, described: Description, descriptor: str, inode: str) -> ByteArray:
        key = (described.fields["pid"], described.fields["born"], inode)
        with self._lock:
            if key in self._mapped:
                return self._mapped[key]
        try:
            with open(f"/proc/{key[0]}/fd/{descriptor}", "rb", opener=_opened_at_once) as file:
                status = os.fstat(file.fileno())
                if str(status.st_ino) != inode or not is_sealed(file.fileno()):
                    raise MovedOnError(f"{described.place} has let go of this memory")
                pages = mmap.mmap(file.fileno(), status.st_size, prot=mmap.PROT_READ)
        except FileNotFoundError as error:
            raise MovedOnError(f"{described.place} has let go of this memory") from error
        except OSError as error:
            raise TransportUnavailableError(
                f"{described.place}: its memory cannot be mapped: {error.strerror}; run both as the same user"
            ) from error
        memory: ByteArray = np.frombuffer(pages, np.uint8)
        with self._lock:
            self._mapped[key] = memory
        return memory

    def _forget(self, pid: str) -> None:
        with self._lock:
            self._mapped = {key: pages for key, pages in self._mapped.items() if key[0] != pid}
            self._watched = {key: w for key, w in self._watched.items() if str(key[0]) != pid}

    def _lives(self, pid: int, born: str) -> bool:
        """Say whether a process is still the one that was described."""
        with self._lock:
            watch = self._watched.get((pid, born))
            if watch is not None:
                return watch.is_alive
            watch = _Watch.of(pid)
            is_same = (
                _born(pid) == born
            )  # looked at last: what is watched is the process that was found
            if watch is not None and is_same:
                self._watched[pid, born] = watch
            return is_same


class _Watch:
    """A process that is watched by a descriptor: to ask whether it lives costs a microsecond."""

    def __init__(self, descriptor: int) -> None:
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)
        self._end = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def of(cls, pid: int) -> _Watch | None:
        """Watch a process; None where it is gone, was never possible, or the system cannot."""
        try:
            return cls(os.pidfd_open(pid))
        except (AttributeError, OSError, OverflowError):
            return None

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended; one that nobody has waited for yet has."""
        return not self._poll.poll(0)


def _opened_at_once(path: str, flags: int) -> int:
    """Open what should be memory; a pipe in its place is not waited for."""
    return os.open(path, flags | os.O_NONBLOCK)


def _require(table: Bits, number: int, described: Description, read: Read) -> None:
    if number >= table.size or table[number] != number:
        raise MovedOnError(f"{described.place} has taken region {read.region!r} back")


def _born(pid: int) -> str:
    """Return when a process started, in ticks since boot; empty if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]


def machine() -> str:
    """Return what is equal for processes that can find each other, and for no others.

    Those are under one kernel and in one PID namespace: two containers of one machine are not.
    """
    return _machine_of(os.getpid())


@cache
def _machine_of(pid: int) -> str:  # noqa: ARG001 - a process never changes either, a child may differ
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists():
        return ""
    return f"{boot.read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"
