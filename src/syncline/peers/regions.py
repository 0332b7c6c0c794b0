"""Registered memory by name, and the description of it that travels: the same for every transport."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from syncline.abc import ByteArray
from syncline.errors import ConfigError, MovedOnError
from syncline.format import strict_json
from syncline.types import Read

MAX_READS = 1024
"""Reads under way at a time: more than this many, queued on TCP, fail as a whole in Mooncake."""

_FORMAT = "syncline-peer"
_LIMIT_BYTES = 1 << 26
_MOST_NUMBERS = 4


@dataclass(frozen=True, slots=True)
class Description:
    """What a peer's `describe` says.

    Attributes:
        kind: name of the transport.
        place: where the peer is, as messages call it.
        fields: what the transport needs besides, by its own keys.
        regions: by name the size in bytes, then where the region is in the transport's own numbers.
    """

    kind: str
    place: str
    fields: Mapping[str, str]
    regions: Mapping[str, tuple[int, ...]]

    def dump(self) -> bytes:
        """Return it as strict JSON."""
        return strict_json.dump(
            {
                "format": _FORMAT,
                "format_version": 1,
                "kind": self.kind,
                "place": self.place,
                "fields": dict(self.fields),
                "regions": {name: list(row) for name, row in self.regions.items()},
            }
        )

    def locate(self, reads: Sequence[Read]) -> list[tuple[Read, tuple[int, ...]]]:
        """Return the reads that read something, each with the row of the peer's region.

        Raises:
            MovedOnError: the peer described no such region, or a read reaches beyond it.
        """
        located = []
        for read in reads:
            row = self.regions.get(read.region)
            if row is None:
                raise MovedOnError(f"{self.place} has no region {read.region!r}")
            if read.offset < 0 or read.nbytes < 0 or read.offset + read.nbytes > row[0]:
                raise MovedOnError(
                    f"{self.place}: region {read.region!r} has {row[0]} bytes, asked for {read.nbytes} from "
                    f"{read.offset} on"
                )
            if read.nbytes:
                located.append((read, row))
        return located


@lru_cache(maxsize=64)  # the same peer is read again and again
def load(data: bytes, kind: str, keys: tuple[str, ...], numbers: int) -> Description:
    """Return the description that these bytes stand for.

    Args:
        kind: the transport that reads it; `keys`: of its fields; `numbers`: in a row besides the size.

    Raises:
        FormatError: it is something else.
    """
    where = "description of a peer"
    fields = strict_json.document(
        data,
        where,
        _FORMAT,
        ("format", "format_version", "kind", "place", "fields", "regions"),
        limit_bytes=_LIMIT_BYTES,
    )
    fields.word("kind", kind)
    own = strict_json.Fields(fields["fields"], where, keys, "fields")
    regions = {}
    for name, row in strict_json.members(fields["regions"], fields.place("regions")).items():
        place = f"{where}: regions[{name!r:.80}]"
        values = strict_json.items(row, place)
        if len(values) != numbers + 1:
            fields.refuse("regions", f"rows of {numbers + 1} integers")
        regions[name] = tuple(strict_json.integer(v, place, maximum=(1 << 64) - 1) for v in values)
    return Description(kind, fields.text("place"), {key: own.text(key) for key in keys}, regions)


class Regions:
    """Memory by name; may be used from several threads."""

    def __init__(self) -> None:
        self._memory: dict[str, ByteArray] = {}
        self._lock = threading.Lock()

    def add(self, region: str, memory: ByteArray) -> None:
        """Keep memory under a name; see `PeerMemory.register`."""
        flat = isinstance(memory, np.ndarray) and memory.ndim == 1 and memory.dtype == np.uint8
        if not flat or not memory.flags.c_contiguous or not memory.flags.writeable:
            raise ConfigError(
                f"region {region!r}: expected a flat, contiguous, writable uint8 array, found "
                f"{getattr(memory, 'dtype', type(memory).__name__)} {getattr(memory, 'shape', '')}"
            )
        with self._lock:
            if region in self._memory:
                raise ConfigError(
                    f"region {region!r} is registered already, and stays so; unregister it first"
                )
            self._memory[region] = memory

    def remove(self, region: str) -> ByteArray | None:
        """Forget a region and return its memory; None if there is none."""
        with self._lock:
            return self._memory.pop(region, None)

    def names(self) -> list[str]:
        """Return the names of all regions."""
        with self._lock:
            return list(self._memory)

    def items(self) -> list[tuple[str, ByteArray]]:
        """Return all regions."""
        with self._lock:
            return list(self._memory.items())

    def places(self, reads: Sequence[Read]) -> list[ByteArray]:
        """Return for each read the bytes that it fills.

        Raises:
            ConfigError: no such region on this side, or the place does not lie in it.
        """
        with self._lock:
            memory = dict(self._memory)
        return [self._place(memory, read) for read in reads]

    @staticmethod
    def _place(memory: Mapping[str, ByteArray], read: Read) -> ByteArray:
        there = memory.get(read.into)
        if there is None:
            raise ConfigError(f"read into {read.into!r}: this side has no such region")
        if read.place < 0 or read.place + read.nbytes > there.size:
            raise ConfigError(
                f"read into {read.into!r}: {read.nbytes} bytes from {read.place} on do not lie in its {there.size}"
            )
        return there[read.place : read.place + read.nbytes]


def batches(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Yield consecutive items, at most `MAX_READS` at a time."""
    for start in range(0, len(items), MAX_READS):
        yield items[start : start + MAX_READS]
