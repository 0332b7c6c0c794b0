"""SkyRL's delta directories: `delta-%08d/manifest.json` and payload files, XOR through zstd.

Every directory is a delta on the version before it; version 0 is the base checkpoint, which is not there.
The receiver is not in a release of SkyRL, so this layout is only read.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from syncline import codecs
from syncline.abc import Base, Interchange, Store
from syncline.codecs.payload import placing
from syncline.errors import ConfigError, FormatError
from syncline.interchange import chain, headers, raw, skyrl_manifest, sparse
from syncline.interchange.evidence import digest
from syncline.interchange.headers import Slot
from syncline.interchange.proving import proved
from syncline.interchange.skyrl_manifest import Manifest, Record
from syncline.types import Bits, Changes, ObjectInfo, Span, TensorMeta
from syncline.version import ForeignTensor, ForeignVersion

MANIFEST = "manifest.json"

_DIRECTORY = re.compile(r"delta-([0-9]{8,})")
_MISSING = (
    "no digest covers the manifest: names, base and sizes are believed",
    "tensors that a version does not carry are in no digest of it",
)


class SkyRL(Interchange):
    """SkyRL delta directories; see `syncline.abc.Interchange`. Identities are eight digits."""

    name: ClassVar[str] = "skyrl"
    writes: ClassVar[bool] = False

    def evidence(self, store: Store, keys: Sequence[str]) -> str | None:
        """Return the first manifest of a delta."""
        return next((key for key in keys if _is_manifest(key)), None)

    def versions(self, store: Store, seen: Sequence[ForeignVersion] = ()) -> list[ForeignVersion]:
        """Return the directories with a manifest, each after its base."""
        known = {version.objects: version for version in seen}
        found = []
        for infos in _directories(store.list()).values():
            objects = tuple(infos[name] for name in sorted(infos))
            found.append(known.get(objects) or _describe(store, infos, objects))
        return chain.ordered(sorted(found, key=lambda version: int(version.identity)))

    def read(
        self, store: Store, version: ForeignVersion, base: Base | None
    ) -> Iterator[tuple[TensorMeta, Iterator[Changes | Span]]]:
        """Yield the tensors in the order of the manifest; see `Interchange.read`. One payload in memory."""
        if base is None:
            raise ConfigError(f"version {version.identity!r} is a delta; pass its base")
        infos = {info.key.partition("/")[2]: info for info in version.objects}
        manifest = _manifest(store, infos[MANIFEST])
        slots = _slots(store, infos, manifest)
        for record in manifest.tensors:
            meta, bits = base(record.meta.name)
            sparse.check_base(meta, record.meta.dtype, record.meta.shape)
            yield meta, _changes(store, slots[record.meta.name], record, meta, bits)


def _is_manifest(key: str) -> bool:
    directory, _, name = key.partition("/")
    return name == MANIFEST and _DIRECTORY.fullmatch(directory) is not None


def _directories(objects: Sequence[ObjectInfo]) -> dict[str, dict[str, ObjectInfo]]:
    found: dict[str, dict[str, ObjectInfo]] = defaultdict(dict)
    for info in objects:
        directory, _, name = info.key.partition("/")
        if _DIRECTORY.fullmatch(directory) and name:
            found[directory][name] = info
    return {directory: infos for directory, infos in found.items() if MANIFEST in infos}


def _manifest(store: Store, info: ObjectInfo) -> Manifest:
    text = store.get(info.key, 0, skyrl_manifest.MAX_BYTES + 1)
    return skyrl_manifest.load(text, info.key)


def _describe(
    store: Store, infos: Mapping[str, ObjectInfo], objects: tuple[ObjectInfo, ...]
) -> ForeignVersion:
    manifest = _manifest(store, infos[MANIFEST])
    directory = infos[MANIFEST].key.partition("/")[0]
    if int(directory.rpartition("-")[2]) != manifest.version:
        raise FormatError(
            f"{infos[MANIFEST].key}: version must be that of its directory, {directory!r}, found "
            f"{manifest.version}: the directory was copied or renamed"
        )
    _slots(store, infos, manifest)
    tensors = [
        ForeignTensor(
            record.meta.name,
            record.meta.dtype,
            record.meta.shape,
            record.payload_bytes,
            record.checksum,
        )
        for record in manifest.tensors
    ]
    return ForeignVersion(
        layout=SkyRL.name,
        identity=f"{manifest.version:08d}",
        base=f"{manifest.base_version:08d}",
        kind="delta",
        encoding="xor",
        checksum=manifest.algorithm,
        tensors=tuple(sorted(tensors, key=lambda tensor: tensor.name)),
        missing=_MISSING,
        objects=objects,
        digest=digest(store, objects),
    )


def _slots(store: Store, infos: Mapping[str, ObjectInfo], manifest: Manifest) -> dict[str, Slot]:
    """Return the slot of every tensor; files and manifest name exactly the same payloads."""
    where = infos[MANIFEST].key
    for name in sorted(set(manifest.payload_files) ^ (infos.keys() - {MANIFEST})):
        fault = "is not there" if name in manifest.payload_files else "is there, but not listed"
        raise FormatError(
            f"{where}: payload_files: {name!r} {fault}; it was lost, is not visible yet, or is of another "
            "run"
        )
    found: dict[tuple[str, str], Slot] = {}
    for name in manifest.payload_files:
        for key, slot in headers.read(store, infos[name]).slots.items():
            found[name, key] = slot
    slots: dict[str, Slot] = {}
    for record in manifest.tensors:
        place = (record.payload_file, record.payload_key)
        if place not in found:
            raise FormatError(
                f"{where}: tensor {record.meta.name!r}: {record.payload_file!r} has no payload "
                f"{record.payload_key!r} left for it",
                tensor=record.meta.name,
            )
        slot = found.pop(place)
        if slot.meta.dtype != "U8" or slot.meta.shape != (record.payload_bytes,):
            raise FormatError(
                f"{slot.key}: {record.payload_key!r} must be U8 [{record.payload_bytes}], as {MANIFEST} "
                f"says, found {slot.meta.dtype} {list(slot.meta.shape)}",
                tensor=record.meta.name,
            )
        slots[record.meta.name] = slot
    for name, key in found:
        raise FormatError(f"{where}: tensors: nothing says what {key!r} in {name!r} is", tensor=key)
    return slots


def _changes(
    store: Store, slot: Slot, record: Record, meta: TensorMeta, bits: Bits
) -> Iterator[Changes | Span]:
    payload = raw.payload(store, slot, meta)
    with placing(slot.key, meta.name):
        pieces = codecs.get("xor").decode(meta, payload, bits)
        yield from proved(
            meta,
            pieces,
            bits,
            checksum=record.algorithm,
            expected=record.checksum,
            where=slot.key,
        )
