"""Fireworks' incremental snapshots: every tensor's XOR with the base, through zstd (arc_v2) or zlib (arc_v1).

A snapshot is a directory named by its identity. Its safetensors files mirror those of the base, tensor by
tensor; `__metadata__` holds the decimal adler32 of every tensor's new bytes. Without such digests a
directory is a full checkpoint. arc_v3 holds pickles and is refused unread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

from syncline import codecs
from syncline.abc import Base, Interchange, Store
from syncline.codecs.payload import placing
from syncline.codecs.xor import changes_from
from syncline.errors import CodecError, ConfigError, FormatError
from syncline.interchange import fireworks_snapshot, fireworks_write, raw
from syncline.interchange.fireworks_snapshot import ARC_V1, Snapshot
from syncline.interchange.headers import Slot
from syncline.interchange.inflating import Inflating
from syncline.interchange.proving import proved
from syncline.types import Bits, Changes, Span, TensorMeta, Window
from syncline.version import ForeignVersion


class Fireworks(Interchange):
    """Fireworks snapshots; see `syncline.abc.Interchange`.

    Args:
        places: file name by tensor name, as in the checkpoint that the receiver has loaded; empty: as in
            the base version in the store, or in files of 4 GiB if it is not there.
    """

    name: ClassVar[str] = fireworks_snapshot.NAME
    writes: ClassVar[bool] = True

    def __init__(self, places: Mapping[str, str] = MappingProxyType({})) -> None:
        self._places = places

    def evidence(self, store: Store, keys: Sequence[str]) -> str | None:
        """Return a file with decimal digests of U8 payloads, or one of arc_v3."""
        return fireworks_snapshot.evidence(store, keys)

    def versions(self, store: Store, seen: Sequence[ForeignVersion] = ()) -> list[ForeignVersion]:
        """Return the snapshots: each after the one that it names as its base, else in order of name."""
        return fireworks_snapshot.versions(store, seen)

    def read(
        self, store: Store, version: ForeignVersion, base: Base | None
    ) -> Iterator[tuple[TensorMeta, Iterator[Changes | Span]]]:
        """Yield every tensor, in the order of the files; see `Interchange.read`. One payload in memory."""
        snapshot = fireworks_snapshot.read(store, version.identity, version.objects)
        if version.kind == "full":
            for slot in snapshot.slots.values():
                yield slot.meta, raw.spans(store, slot)
            return
        if base is None:
            raise ConfigError(f"version {version.identity!r} is a delta; pass its base")
        if snapshot.digests.keys() != snapshot.slots.keys():
            raise FormatError(f"{version.identity}: it changed while it was read; sync again")
        for name, slot in snapshot.slots.items():
            meta, bits = base(name)
            yield meta, _changes(store, snapshot, slot, meta, bits)

    def write(
        self,
        store: Store,
        version: ForeignVersion,
        tensors: Iterable[tuple[TensorMeta, Iterable[Window]]],
        files: Mapping[str, bytes] = MappingProxyType({}),
    ) -> ForeignVersion:
        """Write a snapshot; see `Interchange.write`. Deltas are arc_v2.

        A delta gets `incremental_snapshot_metadata.json` too: what its hot-load request must say.
        """
        fireworks_write.write(store, version, tensors, files, self._places)
        for at in self.versions(store):
            if at.identity == version.identity:
                return at
        raise FormatError(
            f"version {version.identity!r} was written, but is not there; write it again"
        )

    def files(self, store: Store, version: ForeignVersion) -> Mapping[str, bytes]:
        """Return configuration and tokenizer of a full version; see `Interchange.files`."""
        infos = {info.key.partition("/")[2]: info for info in version.objects}
        return raw.files(store, infos) if version.kind == "full" else {}


def _changes(
    store: Store, snapshot: Snapshot, slot: Slot, meta: TensorMeta, bits: Bits
) -> Iterator[Changes | Span]:
    payload = raw.payload(store, slot, meta)
    with placing(f"{slot.key}: tensor {meta.name!r}", meta.name):
        fireworks_snapshot.check_no_pickle(payload, slot.key)
        yield from proved(
            meta,
            _decoded(snapshot.encoding, meta, payload, bits),
            bits,
            checksum="adler32",
            expected=snapshot.digests[meta.name],
            where=slot.key,
        )


def _decoded(
    encoding: str, meta: TensorMeta, payload: bytes, bits: Bits
) -> Iterator[Changes | Span]:
    if encoding != ARC_V1:
        return codecs.get("xor").decode(meta, payload, bits)
    if not meta.nbytes and not payload:
        return iter(())
    reader = Inflating(payload, meta.nbytes)
    if not meta.nbytes:
        if reader.read(0):
            raise CodecError("an empty tensor's payload must be empty")
        return iter(())
    return changes_from(meta, reader.read, bits)
