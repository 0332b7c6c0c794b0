"""Checkpoints of PULSE/grail: `checkpoint-{window}/FULL`, `.../DELTA` and a marker `READY-{window}`.

A delta is made on the window that `prev_window` names, and carries positions and new values. `metadata.json`
lists the SHA-256 of every file. No release has a receiver outside its own miners.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from syncline.abc import Base, Interchange, Store
from syncline.codecs.payload import placing
from syncline.errors import ConfigError, FormatError
from syncline.format import names
from syncline.interchange import anchored, grail_codec, grail_metadata, headers, raw, sparse
from syncline.interchange.evidence import digest
from syncline.types import Changes, ObjectInfo, Span, TensorMeta
from syncline.version import ForeignTensor, ForeignVersion, Kind

DELTA_FILE = "delta_sparse.bin.zst"
DELTA_METADATA = "delta_metadata.json"
METADATA = "metadata.json"

_PATH = re.compile(r"((?:.*/)?)checkpoint-(0|[1-9][0-9]{0,17})/(FULL|DELTA)/([^/]+)")
_READY = re.compile(r"(?:.*/)?checkpoint-(0|[1-9][0-9]{0,17})/READY-[0-9]+")
_MISSING = (
    "manifest.sig is not checked: that needs the publisher's key",
    "weights_hash of the whole model is not checked; the SHA-256 of every file is",
)
_MISSING_DELTA = (
    "its publisher compares values, so a change between 0.0 and -0.0 is not sent",
    "tensors that a version does not carry are in no digest of it",
)


class Grail(Interchange):
    """PULSE/grail checkpoints; see `syncline.abc.Interchange`. An identity is the number of a window."""

    name: ClassVar[str] = "grail"
    writes: ClassVar[bool] = False

    def evidence(self, store: Store, keys: Sequence[str]) -> str | None:
        """Return the first key inside a FULL or DELTA directory."""
        return next((key for key in keys if _PATH.fullmatch(key)), None)

    def versions(self, store: Store, seen: Sequence[ForeignVersion] = ()) -> list[ForeignVersion]:
        """Return the windows with a READY marker, in order; one that is there both ways by its delta."""
        known = {version.objects: version for version in seen}
        deltas: dict[int, ForeignVersion] = {}
        fulls: dict[int, ForeignVersion] = {}
        for (window, folder), infos in _directories(store).items():
            objects = tuple(sorted(infos.values(), key=lambda info: info.key))
            version = known.get(objects) or _describe(store, window, folder, infos, objects)
            (fulls if folder == "FULL" else deltas)[window] = version
        return anchored.chosen(deltas, fulls)

    def read(
        self, store: Store, version: ForeignVersion, base: Base | None
    ) -> Iterator[tuple[TensorMeta, Iterator[Changes | Span]]]:
        """Yield the tensors in the order of the files, whose SHA-256 is checked first."""
        infos = _by_name(version)
        metadata = grail_metadata.load(store, infos[METADATA])
        if version.kind == "full":
            for name in sorted(infos):
                if name.endswith(names.PART_SUFFIX):
                    raw.check_sha256(store, infos[name], metadata.sha256(name), metadata.where)
            for slot in _slots(store, infos).values():
                yield slot.meta, raw.spans(store, slot)
            return
        if base is None:
            raise ConfigError(f"version {version.identity!r} is a delta; pass its base")
        info = infos[DELTA_FILE]
        blocks = grail_codec.peek(store, info).blocks
        # All, before the file is read and unpacked: no block is larger than its tensor.
        metas = {block.meta.name: base(block.meta.name)[0] for block in blocks}
        for block in blocks:
            sparse.check_base(metas[block.meta.name], block.meta.dtype, block.meta.shape)
        raw.check_size(info.size_bytes, sum(meta.nbytes for meta in metas.values()), info.key)
        frame = raw.whole(store, info, metadata.sha256(DELTA_FILE), metadata.where)
        where, opened = info.key, grail_codec.File(frame, info.key)
        if opened.blocks != blocks:
            raise FormatError(f"{info.key}: it changed while it was read; sync again")
        for block, positions, bits in opened.contents():
            meta = metas[block.meta.name]
            yield meta, _placed(where, meta, sparse.changes(meta, positions, bits))

    def files(self, store: Store, version: ForeignVersion) -> Mapping[str, bytes]:
        """Return configuration and tokenizer of a full version; see `Interchange.files`."""
        infos = _by_name(version)
        metadata = infos.pop(METADATA)
        if version.kind == "delta":
            return {}
        found = raw.files(store, infos)
        listed = grail_metadata.load(store, metadata)
        for name in found:
            raw.check_sha256(store, infos[name], listed.sha256(name), listed.where)
        return found


def _directories(store: Store) -> dict[tuple[int, str], dict[str, ObjectInfo]]:
    """Return the files of every directory of a window that is ready."""
    found: dict[tuple[int, str], dict[str, ObjectInfo]] = defaultdict(dict)
    ready: set[int] = set()
    prefix: str | None = None
    for info in store.list():
        if match := _READY.fullmatch(info.key):
            ready.add(int(match[1]))
        elif match := _PATH.fullmatch(info.key):
            if prefix not in (None, match[1]):
                raise FormatError(
                    f"{info.key}: checkpoints lie below {prefix!r} and below {match[1]!r}; expected those "
                    "of one run in a store"
                )
            prefix = match[1]
            found[int(match[2]), match[3]][match[4]] = info
    return {place: infos for place, infos in sorted(found.items()) if place[0] in ready}


def _describe(
    store: Store,
    window: int,
    folder: str,
    infos: Mapping[str, ObjectInfo],
    objects: tuple[ObjectInfo, ...],
) -> ForeignVersion:
    place = objects[0].key.rpartition("/")[0]
    if METADATA not in infos:
        raise FormatError(f"{place}: {METADATA} is missing, but the window is marked as ready")
    metadata = grail_metadata.load(store, infos[METADATA])
    metadata.check(window, folder, set(infos) - {METADATA, "manifest.sig", folder})
    kind: Kind = "full" if folder == "FULL" else "delta"
    encoding, base = "raw", None
    if kind == "full":
        tensors = [
            ForeignTensor(name, slot.meta.dtype, slot.meta.shape, slot.meta.nbytes)
            for name, slot in _slots(store, infos).items()
        ]
    else:
        for name in (DELTA_FILE, DELTA_METADATA):
            if name not in infos:
                raise FormatError(f"{place}: {name} is missing")
        encoding, previous = grail_metadata.load_delta(store, infos[DELTA_METADATA], metadata)
        base = str(previous)
        tensors = _carried(store, infos[DELTA_FILE], encoding)
    return ForeignVersion(
        layout=Grail.name,
        identity=str(window),
        base=base,
        kind=kind,
        encoding=encoding,
        checksum=None,
        tensors=tuple(sorted(tensors, key=lambda tensor: tensor.name)),
        missing=_MISSING if kind == "full" else (*_MISSING, *_MISSING_DELTA),
        objects=objects,
        digest=digest(store, objects),
    )


def _carried(store: Store, info: ObjectInfo, encoding: str) -> list[ForeignTensor]:
    header = grail_codec.peek(store, info)
    if header.version != grail_codec.VERSIONS[encoding]:
        raise FormatError(
            f"{info.key}: version must be {grail_codec.VERSIONS[encoding]}, as {DELTA_METADATA} says "
            f"{encoding!r}, found {header.version}"
        )
    return [
        ForeignTensor(block.meta.name, block.meta.dtype, block.meta.shape, block.nbytes)
        for block in header.blocks
    ]


def _slots(store: Store, infos: Mapping[str, ObjectInfo]) -> dict[str, headers.Slot]:
    found: dict[str, headers.Slot] = {}
    for name in sorted(infos):
        if not name.endswith(names.PART_SUFFIX):
            continue
        for tensor, slot in headers.read(store, infos[name]).slots.items():
            if tensor in found:
                raise FormatError(
                    f"{infos[name].key}: tensor {tensor!r} is in {found[tensor].key} too",
                    tensor=tensor,
                )
            found[tensor] = slot
    if not found:
        raise FormatError(
            f"{next(iter(infos.values())).key}: no {names.PART_SUFFIX} file beside it"
        )
    return found


def _by_name(version: ForeignVersion) -> dict[str, ObjectInfo]:
    return {info.key.rpartition("/")[2]: info for info in version.objects}


def _placed(where: str, meta: TensorMeta, pieces: Iterator[Changes]) -> Iterator[Changes]:
    with placing(f"{where}: tensor {meta.name!r}", meta.name):
        yield from pieces
