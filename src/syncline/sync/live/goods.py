"""One version as a live path takes it: what is offered, what goes into which bucket, and who sends that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from syncline.abc import Outlet
from syncline.errors import ConfigError
from syncline.format import bucket
from syncline.format.bucket import Bucket, Cargo
from syncline.format.part import payload_meta
from syncline.types import Bits, DeviceBits, TensorMeta
from syncline.version import HeldVersion, Kind

Sent = Callable[[Bucket], None]


class Sender(Protocol):
    """What a trainer has of a version, and how it gets into the engines' buckets."""

    @property
    def lanes(self) -> Sequence[str]:
        """Where engines join the trainer's further ranks, in the order of these; none if one sends alone."""

    def buckets(self, kind: Kind, bucket_bytes: int) -> tuple[tuple[Bucket, ...], Sequence[int]]:
        """Return all buckets in the order in which they go, and by which lane each does: 0, then `lanes`."""

    def send(
        self,
        outlet: Outlet,
        cargo: Cargo,
        members: Sequence[str],
        timeout_s: float,
        on_opened: Callable[[], None],
        on_sent: Sent,
    ) -> None:
        """Send the buckets that have any bytes to these members; raises as `Outlet.round`."""


@dataclass(frozen=True)
class Goods:
    """One version as it is offered.

    Attributes:
        held: manifest and identity.
        raw: the manifest's bytes, and those of its table if that is a file of its own.
        kinds: how it can travel.
        sender: who has its bytes.
        files: the checkpoint's further files, for engines that are empty.
    """

    held: HeldVersion
    raw: tuple[bytes, bytes | None]
    kinds: Sequence[Kind]
    sender: Sender
    files: Mapping[str, bytes] = field(default_factory=dict)

    def cargo(self, kind: Kind, bucket_bytes: int, generation: int) -> tuple[Cargo, Sequence[int]]:
        """Return what is in the buckets, and by which lane each goes."""
        manifest = self.held.manifest
        buckets, sources = self.sender.buckets(kind, bucket_bytes)
        cargo = Cargo(
            run_id=manifest.run_id,
            version=manifest.version,
            manifest_sha256=self.held.sha256,
            generation=generation,
            kind=kind,
            bucket_bytes=bucket_bytes,
            buckets=buckets,
        )
        return cargo, sources


class Whole:
    """The sender that has all of a version in this process.

    Args:
        metas: the version's tensors.
        bits: returns a tensor's weights at this version.
        payloads: returns the payloads of a delta by name; None if the version is no delta.
    """

    lanes: Sequence[str] = ()

    def __init__(
        self,
        metas: Sequence[TensorMeta],
        bits: Callable[[str], Bits | DeviceBits],
        payloads: Callable[[], Mapping[str, memoryview]] | None,
    ) -> None:
        self._metas = metas
        self._bits = bits
        self._payloads = payloads
        self._read: Mapping[str, memoryview] | None = None

    def buckets(self, kind: Kind, bucket_bytes: int) -> tuple[tuple[Bucket, ...], Sequence[int]]:
        """Return all buckets; see `Sender.buckets`."""
        metas = self._metas
        if kind == "delta":
            metas = payload_metas({name: raw.nbytes for name, raw in self._loaded().items()})
        buckets = bucket.pack(metas, bucket_bytes)
        return buckets, [0] * len(buckets)

    def send(
        self,
        outlet: Outlet,
        cargo: Cargo,
        members: Sequence[str],
        timeout_s: float,
        on_opened: Callable[[], None],
        on_sent: Sent,
    ) -> None:
        """Send them; see `Sender.send`."""
        bits = self._bits if cargo.kind == "full" else payload_bits(self._loaded())
        sent = [each for each in cargo.buckets if each.nbytes]
        with outlet.round(members, [each.nbytes for each in sent], timeout_s) as give:
            on_opened()
            for each in sent:
                give(list(pieces_of(each, bits)))
                on_sent(each)

    def _loaded(self) -> Mapping[str, memoryview]:
        if self._read is None:
            if self._payloads is None:
                raise ConfigError("expected the payloads of a delta, found a version that is none")
            self._read = self._payloads()
        return self._read


def payload_metas(sizes_bytes: Mapping[str, int]) -> list[TensorMeta]:
    """Return how payloads of these lengths appear in buckets."""
    return [payload_meta(name, size_bytes) for name, size_bytes in sorted(sizes_bytes.items())]


def payload_bits(payloads: Mapping[str, memoryview]) -> Callable[[str], Bits]:
    """Return what gives a payload's bytes by name."""

    def bits(name: str) -> Bits:
        return np.frombuffer(payloads[name], np.uint8)

    return bits


def pieces_of(
    each: Bucket, bits: Callable[[str], Bits | DeviceBits]
) -> Iterator[tuple[int, Bits | DeviceBits]]:
    """Yield what goes into a bucket, and where."""
    for piece in each.pieces:
        yield piece.offset, bits(piece.meta.name)[piece.units]
