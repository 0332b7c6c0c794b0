"""Two buffers that a trainer shares with processes of its machine, and an engine's view of them."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol

import numpy as np

from syncline.anonymous import anonymous_file, is_sealed
from syncline.errors import FormatError, TransportUnavailableError
from syncline.types import Bits, DeviceBits

BUFFERS = 2
"""How many there are, filled in turn."""


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
        self._fd = anonymous_file(BUFFERS * bucket_bytes)
        try:
            self._map = mmap.mmap(self._fd, BUFFERS * bucket_bytes)
        except OSError as error:
            os.close(self._fd)
            raise TransportUnavailableError(f"shared memory: {error.strerror}") from error
        self._bits = np.frombuffer(self._map, np.uint8).reshape(BUFFERS, bucket_bytes)

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


class View(Protocol):
    """An engine's view of a trainer's buffers."""

    bucket_bytes: int

    def at(self, slot: int) -> Bits | DeviceBits:
        """Return one of the buffers, (bucket_bytes,) uint8, read-only where numpy can say so."""

    def settle(self) -> None:
        """Return when what this process reads from the buffers is read."""

    def free(self) -> None:
        """Let go of the memory."""


class HostView:
    """A read-only map of a trainer's shared memory."""

    def __init__(self, fd: int, bucket_bytes: int) -> None:
        self.bucket_bytes = bucket_bytes
        found_bytes = os.fstat(fd).st_size
        if found_bytes != BUFFERS * bucket_bytes or not is_sealed(fd):
            raise FormatError(
                f"the trainer's buffers: expected {BUFFERS * bucket_bytes} bytes that nobody can shrink, "
                f"found {found_bytes}"
            )
        self._map = mmap.mmap(fd, found_bytes, prot=mmap.PROT_READ)
        self._bits = np.frombuffer(self._map, np.uint8).reshape(BUFFERS, bucket_bytes)

    def at(self, slot: int) -> Bits:
        """Return one of the buffers."""
        found: Bits = self._bits[slot]
        return found

    def settle(self) -> None:
        """Do nothing: reads are done when the message that says so goes out."""

    def free(self) -> None:
        """Unmap the memory, or let the last view of it do so."""
        del self._bits
        with suppress(BufferError):  # a view is still in use; it frees the map itself
            self._map.close()
