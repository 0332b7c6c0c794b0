"""Buckets of TRL's delta weight sync: `anchors/step_%06d.safetensors` and `deltas/step_%06d.safetensors`.

A delta holds, for every changed tensor, positions and new values: generation 1 `{name}.indices` and
`{name}.values`, generation 3 `{name}.idx` and `{name}.val` with the coding of positions in `encoding`. It
has no digest and names no base: the order of the files is the chain. No release of TRL has a receiver.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from syncline.abc import Base, Interchange, Store
from syncline.codecs.payload import placing
from syncline.errors import CodecError, ConfigError, FormatError
from syncline.interchange import anchored, headers, raw, sparse, trl_metadata
from syncline.interchange.evidence import digest
from syncline.interchange.headers import Header, Slot
from syncline.types import Bits, Changes, ObjectInfo, Span, TensorMeta, unsigned
from syncline.version import ForeignTensor, ForeignVersion

_PATH = re.compile(r"(anchors|deltas)/step_([0-9]{6,})\.safetensors")
_POSITION_DTYPES = {"raw": ("I32",), "gap_delta": ("U16", "U32")}
_MISSING = (
    "no digest covers the values: they are believed as they are read",
    "the base is not named: the order of the files is taken for the chain, so a lost file goes unnoticed",
    "tensors that a version does not carry are in no digest of it",
)


class Trl(Interchange):
    """Buckets of TRL branches; see `syncline.abc.Interchange`. Identities are `step_%06d`."""

    name: ClassVar[str] = "trl"
    writes: ClassVar[bool] = False

    def evidence(self, store: Store, keys: Sequence[str]) -> str | None:
        """Return the first key of a bucket."""
        return next((key for key in keys if _PATH.fullmatch(key)), None)

    def versions(self, store: Store, seen: Sequence[ForeignVersion] = ()) -> list[ForeignVersion]:
        """Return the steps in order; a step that is there both ways is read by its delta if it can be."""
        known = {version.objects: version for version in seen}
        objects: dict[tuple[str, int], ObjectInfo] = {}
        for info in store.list():
            if match := _PATH.fullmatch(info.key):
                place = (match[1], int(match[2]))
                if place in objects:
                    raise FormatError(f"{info.key}: step {place[1]} is there twice")
                objects[place] = info
        deltas: dict[int, ForeignVersion] = {}
        fulls: dict[int, ForeignVersion] = {}
        previous: dict[int, str] = {}
        base = "the base checkpoint"
        for step in sorted({step for _, step in objects}):
            previous[step], base = base, identity_of(step)
        for (folder, step), info in sorted(objects.items()):
            is_full = folder == "anchors"
            version = known.get((info,))
            if (
                version is None
                or (version.kind == "full") != is_full
                or (not is_full and version.base != previous[step])
            ):
                version = _describe(store, info, step, None if is_full else previous[step])
            (fulls if is_full else deltas)[step] = version
        return anchored.chosen(deltas, fulls)

    def read(
        self, store: Store, version: ForeignVersion, base: Base | None
    ) -> Iterator[tuple[TensorMeta, Iterator[Changes | Span]]]:
        """Yield the tensors in the order of the file; see `Interchange.read`. One payload in memory."""
        header = headers.read(store, version.objects[0])
        if version.kind == "full":
            for slot in header.slots.values():
                yield slot.meta, raw.spans(store, slot)
            return
        if base is None:
            raise ConfigError(f"version {version.identity!r} is a delta; pass its base")
        metadata = trl_metadata.load(header.metadata, version.objects[0].key, is_delta=True)
        for name, (positions, values) in _pairs(header, metadata, version.objects[0].key).items():
            meta, _ = base(name)
            sparse.check_base(meta, values.meta.dtype, None)
            yield meta, _changes(store, meta, positions, values, metadata.encoding)


def identity_of(step: int) -> str:
    """Return what a step is called.

    Example:
        >>> identity_of(12)
        'step_000012'
    """
    return f"step_{step:06d}"


def _describe(store: Store, info: ObjectInfo, step: int, base: str | None) -> ForeignVersion:
    header = headers.read(store, info)
    metadata = trl_metadata.load(header.metadata, info.key, is_delta=base is not None)
    if metadata.model_version != step:
        raise FormatError(
            f"{info.key}: __metadata__.model_version must be that of its name, {step}, found "
            f"{metadata.model_version}: the file was copied or renamed"
        )
    if base is None:
        tensors = [
            ForeignTensor(name, slot.meta.dtype, slot.meta.shape, slot.meta.nbytes)
            for name, slot in header.slots.items()
        ]
    else:
        tensors = [
            ForeignTensor(name, values.meta.dtype, None, positions.meta.nbytes + values.meta.nbytes)
            for name, (positions, values) in _pairs(header, metadata, info.key).items()
        ]
    return ForeignVersion(
        layout=Trl.name,
        identity=identity_of(step),
        base=base,
        kind="full" if base is None else "delta",
        encoding="raw" if base is None else metadata.encoding,
        checksum=None,
        tensors=tuple(sorted(tensors, key=lambda tensor: tensor.name)),
        missing=_MISSING if base is not None else _MISSING[:1],
        objects=(info,),
        digest=digest(store, [info]),
    )


def _pairs(
    header: Header, metadata: trl_metadata.Metadata, where: str
) -> dict[str, tuple[Slot, Slot]]:
    """Return the slots of positions and values of every changed tensor, held against the metadata."""
    dtypes = _POSITION_DTYPES[metadata.encoding]
    first, second = metadata.suffixes
    found: dict[str, tuple[Slot, Slot]] = {}
    total = 0
    for key, slot in header.slots.items():
        name = key.removesuffix(first)
        if name == key:
            if not key.endswith(second) or key.removesuffix(second) + first not in header.slots:
                raise FormatError(
                    f"{where}: tensor {key!r}: no {first!r} belongs to it", tensor=key
                )
            continue
        values = header.slots.get(name + second)
        if values is None:
            raise FormatError(f"{where}: tensor {name + second!r} is missing", tensor=name)
        _check_pair(name, slot, values, dtypes, where)
        total += values.meta.count
        found[name] = (slot, values)
    metadata.check_totals(sorted(found), total, where)
    return found


def _check_pair(name: str, slot: Slot, values: Slot, dtypes: tuple[str, ...], where: str) -> None:
    if slot.meta.dtype not in dtypes:
        raise FormatError(
            f"{where}: tensor {slot.meta.name!r} must be {' or '.join(dtypes)}, found "
            f"{slot.meta.dtype}",
            tensor=name,
        )
    is_flat = len(slot.meta.shape) == len(values.meta.shape) == 1
    if not is_flat or slot.meta.count != values.meta.count:
        raise FormatError(
            f"{where}: positions and values of tensor {name!r} must be flat and equally many, found "
            f"{list(slot.meta.shape)} and {list(values.meta.shape)}",
            tensor=name,
        )


def _changes(
    store: Store, meta: TensorMeta, positions: Slot, values: Slot, encoding: str
) -> Iterator[Changes]:
    with placing(f"{values.key}: tensor {meta.name!r}", meta.name):
        if values.meta.count > meta.unit_count:
            raise CodecError(
                f"{values.meta.count} values cannot be distinct elements of {meta.unit_count}"
            )
        stored = np.frombuffer(
            raw.payload(store, positions, meta), f"<{_kind(positions)}{positions.meta.unit_bytes}"
        )
        where: NDArray[np.int64] = (
            stored.astype(np.int64) if encoding == "raw" else sparse.from_gaps(stored)
        )
        bits: Bits = np.frombuffer(raw.payload(store, values, meta), unsigned(meta.unit_bytes))
        yield from sparse.changes(meta, where, bits)


def _kind(slot: Slot) -> str:
    return "i" if slot.meta.dtype.startswith("I") else "u"
