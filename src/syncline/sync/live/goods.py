"""One version as a live path takes it: what is offered, and what goes into which bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from syncline.format import bucket
from syncline.format.bucket import Cargo
from syncline.format.part import payload_meta
from syncline.types import Bits, DeviceBits
from syncline.version import HeldVersion, Kind


@dataclass(frozen=True)
class Goods:
    """One version as it is offered.

    Attributes:
        held: manifest and identity.
        raw: the manifest's bytes, and those of its table if that is a file of its own.
        bits: returns a tensor's weights at this version.
        payloads: returns the payloads of a delta by name; None if the version is no delta.
        files: the checkpoint's further files, for engines that are empty.
    """

    held: HeldVersion
    raw: tuple[bytes, bytes | None]
    bits: Callable[[str], Bits | DeviceBits]
    payloads: Callable[[], Mapping[str, memoryview]] | None
    files: Mapping[str, bytes] = field(default_factory=dict)


def loaded(
    goods: Goods, kind: Kind, bucket_bytes: int, generation: int
) -> tuple[Cargo, Callable[[str], Bits | DeviceBits]]:
    """Return what is in the buckets, and where the bytes of each tensor or payload are."""
    manifest = goods.held.manifest
    bits = goods.bits
    metas = [entry.meta for entry in manifest.tensors]
    if kind == "delta" and goods.payloads is not None:
        payloads = goods.payloads()
        metas = [payload_meta(name, payloads[name].nbytes) for name in sorted(payloads)]
        bits = partial(_payload, payloads)
    cargo = Cargo(
        run_id=manifest.run_id,
        version=manifest.version,
        manifest_sha256=goods.held.sha256,
        generation=generation,
        kind=kind,
        bucket_bytes=bucket_bytes,
        buckets=bucket.pack(metas, bucket_bytes),
    )
    return cargo, bits


def _payload(payloads: Mapping[str, memoryview], name: str) -> Bits:
    return np.frombuffer(payloads[name], np.uint8)


def pieces_of(
    cargo: Cargo, bits: Callable[[str], Bits | DeviceBits]
) -> Iterator[list[tuple[int, Bits | DeviceBits]]]:
    """Yield what goes into each bucket that has any bytes."""
    for each in cargo.buckets:
        pieces = []
        for piece in each.pieces:
            whole = bits(piece.meta.name)
            start = piece.start // piece.meta.unit_bytes
            count = piece.nbytes // piece.meta.unit_bytes
            pieces.append((piece.offset, whole[start : start + count]))
        if each.nbytes:
            yield pieces
