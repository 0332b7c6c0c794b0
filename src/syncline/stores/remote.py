"""What every store behind a network does: small objects in one request, large ones in pieces, ranges at once."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, closing, suppress
from typing import Protocol

from syncline import config
from syncline.abc import Buffer, Store
from syncline.errors import StoreError
from syncline.format.digest import Tally
from syncline.stores import keys
from syncline.stores.obstore_errors import taken
from syncline.stores.streams import (
    GET_STREAMS,
    PIECE_BYTES,
    PUT_STREAMS,
    TRIAL_BYTES,
    Width,
    ordered,
)
from syncline.stores.writes import HIDDEN, Conditional, Plain, Writes
from syncline.types import ObjectInfo


class Objects(Plain, Protocol):
    """What a service does with single objects, each call tried again where that may help."""

    def get(self, key: str, start: int, stop: int | None) -> bytes:
        """Return bytes `start:stop`, clipped to the object's size."""

    def stream(self, key: str, start: int, stop: int) -> Iterator[bytes]:
        """Yield bytes `start:stop` as they come, clipped to the object's size."""

    def list(self, parent: str | None) -> list[ObjectInfo]:
        """Return every object below a directory, in no order."""

    def put_pieces(self, key: str, chunks: Iterable[Buffer], *, streams: int, doing: str) -> None:
        """Put an object of any size, whatever is there; errors say what this was `doing`."""

    def remove(self, key: str) -> None:
        """Remove an object; harmless if there is none."""


_PUTS_AT_ONCE = 4
_ONE_REQUEST_BYTES = 32 << 20
_ONE_REQUEST_S = 10.0


class RemoteStore(Store):
    """A store over a service's calls.

    Args:
        service: the calls.
        name: what messages call the store.
        one_request_bytes: the largest object that is put in one request, from memory; above 32 MiB only where
            the last puts were so fast that it takes some ten seconds at most.
        decide: says how writes are made; called once, before the first one.

    Safe to use from many threads.
    """

    is_remote = True

    def __init__(
        self,
        service: Objects,
        *,
        name: str,
        one_request_bytes: int,
        decide: Callable[[], Writes],
    ) -> None:
        self._service = service
        self._name = name
        self._one_request_bytes = one_request_bytes
        self._decide = decide
        self._writes: Writes | None = None
        self._deciding = threading.Lock()
        self._put_bytes_per_s = 0.0
        self._get_width = Width(GET_STREAMS)
        self._put_width = Width(PUT_STREAMS)

    def __str__(self) -> str:
        return self._name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name})"

    @property
    def has_conditions(self) -> bool:
        """Whether writes are made under the service's own conditions; may ask it, see `writes`."""
        return isinstance(self._decided(), Conditional)

    @property
    def puts_at_once(self) -> int:
        """Several, but for a lease, which each put would wait for; may ask the service, see `writes`."""
        return _PUTS_AT_ONCE if self.has_conditions else 1

    def turn(self) -> AbstractContextManager[None]:
        """Keep the lease where there is one; see `Store.turn`. May ask the service, see `writes`."""
        return self._decided().turn()

    def put(self, key: str, chunks: Iterable[Buffer]) -> None:
        """Create the object; see `Store.put`."""
        keys.split(key)
        source = iter(chunks)
        begun = bytearray()
        for chunk in source:
            begun += chunk
            if len(begun) > self._most_at_once():
                self._put_in_pieces(key, itertools.chain(_sliced(begun), source))
                return
        writes = self._decided()
        begun_at = time.monotonic()
        writes.create(key, begun)
        self._was_put(len(begun), begun_at)

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes `start:stop` of the object; see `Store.get`."""
        keys.split(key)
        return self._service.get(key, start, stop)

    def pieces(self, key: str, size_bytes: int) -> Iterator[bytes]:
        """Yield the object in order; see `Store.pieces`.

        By one request, or by several ranges at once where large objects were measured to come faster so. What is
        cut is asked for again, the rest is not.
        """
        keys.split(key)
        start = 0
        while start < size_bytes:
            is_whole = self._comes_whole(size_bytes - start)
            with closing(self._found(key, start, size_bytes, is_whole=is_whole)) as found:
                for piece in found:
                    yield piece
                    start += len(piece)
                    if is_whole and size_bytes - start > TRIAL_BYTES and not self._comes_whole():
                        break
                else:
                    if is_whole or self._get_width.streams > 1:
                        return  # all of it, or it is shorter

    def _comes_whole(self, left_bytes: int = TRIAL_BYTES) -> bool:
        is_narrow = self._get_width.streams == 1 or config.threads() == 1
        return is_narrow or left_bytes <= PIECE_BYTES

    def _found(
        self, key: str, start: int, stop: int, *, is_whole: bool
    ) -> Generator[bytes, None, None]:
        if is_whole:
            return self._streamed(key, start, stop)

        def fetch(start: int) -> bytes:
            return self._service.get(key, start, min(start + PIECE_BYTES, stop))

        return ordered(range(start, stop, PIECE_BYTES), fetch, self._get_width)

    def _streamed(self, key: str, start: int, stop: int) -> Generator[bytes, None, None]:
        width = self._get_width
        is_measured = stop - start > TRIAL_BYTES
        for number, chunk in enumerate(self._service.stream(key, start, stop)):
            if is_measured and number == 0:
                width.begin()  # what came before the first byte is waited for only once
            elif is_measured and width.streams == 1:
                width.moved(len(chunk))
            yield chunk

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """Return the objects whose key begins with `prefix`; see `Store.list`."""
        keys.check_prefix(prefix)
        parent = prefix.rpartition("/")[0]
        found = self._service.list(parent or None)
        return sorted(
            (info for info in found if info.key.startswith(prefix) and not _is_hidden(info.key)),
            key=lambda info: info.key,
        )

    def compare_and_swap(self, key: str, expected: bytes | None, new: bytes) -> None:
        """Replace the content `expected` by `new`; see `Store.compare_and_swap`.

        A swap whose answer was lost on the way may raise although it happened: read again.
        """
        keys.split(key)
        self._decided().swap(key, expected, new)

    def delete(self, key: str) -> None:
        """Remove the object; see `Store.delete`."""
        keys.split(key)
        self._service.remove(key)

    def _put_in_pieces(self, key: str, chunks: Iterable[Buffer]) -> None:
        writes = self._decided()
        if self._service.has(key):
            raise taken(f"put {key}")
        *parents, _ = keys.split(key)
        hidden = "/".join([*parents, f"{HIDDEN}{secrets.token_hex(8)}"])
        tally = Tally(chunks)
        begun_at = time.monotonic()
        try:
            self._put_width.begin()
            streams = self._put_width.streams
            self._service.put_pieces(hidden, tally, streams=streams, doing=f"put {key}")
            entry = tally.entry(key)
            self._put_width.moved(entry.size_bytes)
            self._was_put(entry.size_bytes, begun_at)
            writes.create_from(hidden, key, entry.sha256)
        finally:
            with suppress(StoreError):  # hidden, so harmless; the error before it is what matters
                self._service.remove(hidden)

    def _most_at_once(self) -> int:
        """Return how much to put in one request: one that takes long is lost whole when its connection is cut."""
        most_bytes = max(_ONE_REQUEST_BYTES, int(self._put_bytes_per_s * _ONE_REQUEST_S))
        return min(self._one_request_bytes, most_bytes)

    def _was_put(self, nbytes: int, begun_at: float) -> None:
        if nbytes >= PIECE_BYTES:  # the seconds of a smaller one say more of the way's length
            self._put_bytes_per_s = nbytes / max(time.monotonic() - begun_at, 1e-9)

    def _decided(self) -> Writes:
        with self._deciding:
            if self._writes is None:
                self._writes = self._decide()
            return self._writes


def _sliced(content: Buffer) -> Iterator[memoryview]:
    with memoryview(content) as whole:
        for start in range(0, len(whole), PIECE_BYTES):
            yield whole[start : start + PIECE_BYTES]


def _is_hidden(key: str) -> bool:
    return any(segment.startswith(".") for segment in key.split("/"))
