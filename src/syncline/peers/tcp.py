"""Reads of a peer's memory over plain TCP sockets: works wherever Python does, with nothing installed.

The side that is read has one thread that listens and one a connection; none of them ever waits for the
program whose memory it serves. A connection begins with a 16-byte key that only `describe` tells, so a stranger, or
another process that got the port of a dead one, is turned away. Nothing is encrypted.
"""

from __future__ import annotations

import hmac
import re
import secrets
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from itertools import count

from syncline.abc import ByteArray, PeerMemory
from syncline.endpoints import answer_each, own
from syncline.errors import (
    ConfigError,
    FormatError,
    MovedOnError,
    PeerLostError,
    TransportTimeoutError,
)
from syncline.peers import regions
from syncline.peers.regions import MAX_READS, Description, Regions, batches
from syncline.peers.streams import Deadline, receive_exactly, receive_into, send_all
from syncline.types import Read

_COUNT = struct.Struct("<I")
_ITEM = struct.Struct("<QQQ")
_OK, _GONE = b"\0", b"\1"
_KEY_BYTES = 16
_KEY = re.compile(f"[0-9a-f]{{{2 * _KEY_BYTES}}}")
_PORT = re.compile("[0-9]{1,5}")
_IDLE_S = 3600.0
_GREETING_S = 10.0


class TcpPeer(PeerMemory):
    """Memory that peers read over TCP.

    Args:
        bind: the address to listen on; peers must reach it under the same one.
        port: to listen on; 0: a free one.

    Raises:
        ConfigError: the address is not one of this machine, or the port is taken.

    A read that failed or timed out has closed its connection: nothing is written afterwards. Close it when done.
    """

    name = "tcp"

    def __init__(self, bind: str = "127.0.0.1", port: int = 0) -> None:
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        self._listening = own(socket.socket(family, socket.SOCK_STREAM))
        try:
            self._listening.bind((bind, port))
            self._listening.listen(128)
        except OSError as error:
            self._listening.close()
            raise ConfigError(f"listen on {bind} port {port}: {error.strerror}") from error
        self._host, self._port = self._listening.getsockname()[:2]
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._regions = Regions()
        self._ids: dict[int, str] = {}
        self._numbers: dict[str, int] = {}
        self._next = count(1)
        self._lock = threading.Lock()
        self._served: set[socket.socket] = set()
        self._asked: dict[tuple[str, int, str], _Connection] = {}
        self._is_closed = False
        threading.Thread(
            target=answer_each,
            args=(self._listening, self._serve, "syncline-peer"),
            name="syncline-peer",
            daemon=True,
        ).start()

    def register(self, region: str, memory: ByteArray) -> None:
        """Make memory readable; see `PeerMemory.register`."""
        if self._is_closed:
            raise ConfigError("register: this side was closed; make a new one")
        self._regions.add(region, memory)
        with self._lock:
            number = next(self._next)  # never used again, so that an old description cannot meet it
            self._ids[number], self._numbers[region] = region, number

    def unregister(self, region: str) -> None:
        """Take a region back; see `PeerMemory.unregister`."""
        with self._lock:
            number = self._numbers.pop(region, None)
            if number is not None:
                del self._ids[number]
        self._regions.remove(region)

    def describe(self) -> bytes:
        """Return what peers need; see `PeerMemory.describe`. Says the key: it is a secret."""
        with self._lock:
            numbers = dict(self._numbers)
        rows = {
            name: (memory.size, numbers[name])
            for name, memory in self._regions.items()
            if name in numbers
        }
        fields = {"host": self._host, "port": str(self._port), "key": self._key.hex()}
        return Description(self.name, f"{self._host} port {self._port}", fields, rows).dump()

    def read(self, peer: bytes, reads: Sequence[Read], timeout_s: float) -> None:
        """Read from the peer; see `PeerMemory.read`. Cost: one round trip per 1,024 reads."""
        deadline = Deadline(timeout_s)
        places = dict(zip(reads, self._regions.places(reads), strict=True))
        described = regions.load(peer, self.name, ("host", "port", "key"), 1)
        located = described.locate(reads)
        connection = self._connection(described)
        with connection.lock:
            for batch in batches(located):
                items = [(row[1], read.offset, read.nbytes) for read, row in batch]
                connection.ask(items, [places[read] for read, _ in batch], deadline)

    def close(self) -> None:
        """End all connections and stop listening; harmless when called again."""
        with self._lock:
            self._is_closed = True
            served, self._served = self._served, set()
            asked, self._asked = self._asked, {}
        for sock in (self._listening, *served):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for connection in asked.values():
            connection.close()
        for region in self._regions.names():
            self.unregister(region)

    def _connection(self, described: Description) -> _Connection:
        fields = described.fields
        if not (_PORT.fullmatch(fields["port"]) and _KEY.fullmatch(fields["key"])):
            raise FormatError(f"{described.place}: expected a port and a key of {_KEY_BYTES} bytes")
        key = (fields["host"], int(fields["port"]), fields["key"])
        with self._lock:
            if self._is_closed:
                raise ConfigError("read: this side was closed; make a new one")
            if key not in self._asked:
                self._asked[key] = _Connection(*key, described.place)
            return self._asked[key]

    def _serve(self, sock: socket.socket) -> None:
        """Answer one peer until it goes; a broken connection is the peer's to notice."""
        with self._lock:
            self._served.add(sock)
            if self._is_closed:
                sock.close()
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            key = receive_exactly(sock, _KEY_BYTES, Deadline(_GREETING_S))
            while hmac.compare_digest(key, self._key):
                (number,) = _COUNT.unpack(receive_exactly(sock, _COUNT.size, Deadline(_IDLE_S)))
                if number > MAX_READS:
                    return
                raw = receive_exactly(sock, number * _ITEM.size, Deadline(_IDLE_S))
                found = self._find(list(_ITEM.iter_unpack(raw)))
                if found is None:
                    send_all(sock, [_GONE], Deadline(_IDLE_S))
                else:
                    send_all(sock, [_OK, *found], Deadline(_IDLE_S))
        except (OSError, EOFError):
            return
        finally:
            with self._lock:
                self._served.discard(sock)
            sock.close()

    def _find(self, items: Sequence[tuple[int, int, int]]) -> list[memoryview] | None:
        """Return the memory that a peer asks for; None if some of it is not there."""
        with self._lock:
            ids = dict(self._ids)
        memory = dict(self._regions.items())
        found = []
        for number, offset, nbytes in items:
            there = memory.get(ids.get(number, ""))
            if there is None or offset + nbytes > there.size:
                return None
            found.append(there.data[offset : offset + nbytes])
        return found


class _Connection:
    """This side's connection to one peer; made when first used, and anew after a failure."""

    def __init__(self, host: str, port: int, key: str, place: str) -> None:
        self._address = (host, port)
        self._key = bytes.fromhex(key)
        self._place = place
        self._socket: socket.socket | None = None
        self.lock = threading.Lock()

    def ask(
        self,
        items: Sequence[tuple[int, int, int]],
        places: Sequence[ByteArray],
        deadline: Deadline,
    ) -> None:
        """Fill the places with the peer's answer, or close the connection and raise."""
        try:
            sock = self._open(deadline)
            request = b"".join(_ITEM.pack(*item) for item in items)
            send_all(sock, [_COUNT.pack(len(items)), request], deadline)
            status = receive_exactly(sock, 1, deadline)
            if status == _OK:
                receive_into(sock, [place.data for place in places], deadline)
        except TimeoutError as error:
            self.close()
            raise TransportTimeoutError(
                f"{self._place} did not answer in {deadline.timeout_s} s; it is slow, stuck or cut off"
            ) from error
        except (
            OSError,
            EOFError,
            OverflowError,
            UnicodeError,
        ) as error:  # the latter: no port, no host
            self.close()
            raise PeerLostError(f"{self._place} is gone: {error}") from error
        except BaseException:
            self.close()
            raise
        if status != _OK:
            raise MovedOnError(f"{self._place} has taken back what was asked for")

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        sock, self._socket = self._socket, None
        if sock is not None:
            sock.close()

    def _open(self, deadline: Deadline) -> socket.socket:
        if self._socket is None:
            self._socket = own(socket.create_connection(self._address, deadline.left_s()))
            self._socket.settimeout(None)  # deadlines are the kernel's from here on
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            send_all(self._socket, [self._key], deadline)
        return self._socket
