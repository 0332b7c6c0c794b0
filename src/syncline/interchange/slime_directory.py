"""One version directory of the slime layout: index, headers and listing held against each other."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from syncline.abc import Store
from syncline.errors import FormatError
from syncline.format import checksum as checksums
from syncline.format import names
from syncline.interchange import headers, slime_index
from syncline.interchange.evidence import by_directory, digest
from syncline.types import ObjectInfo
from syncline.version import ForeignTensor, ForeignVersion

NAME = "slime"

_NUMBERED = re.compile(r"model-([0-9]{5})-of-([0-9]{5})\.safetensors")
_COUNTED = re.compile(r"weight_v([0-9]+)")
_FORMAT_KEY = "format"

_ALWAYS = (
    "no digest covers the index: names, base and encoding are believed",
    "tensors that a version does not carry are in no digest of it",
)
_ADLER = "adler32 has 32 bits: it finds accidents, but not every one"
_UNPROVED = "the full version has no digests: its tensors are believed as they are read"


@dataclass(frozen=True, slots=True)
class Directory:
    """A version directory that keeps the rules.

    Attributes:
        name: of the directory.
        index: what its index says.
        slots: where every tensor's payload lies.
        digests: of every tensor's new bytes; empty if the version has none.
        objects: everything in it.
        digest: SHA-256 over the index, and over name, size and header of every part.
    """

    name: str
    index: slime_index.Index
    slots: Mapping[str, headers.Slot]
    digests: Mapping[str, str]
    objects: tuple[ObjectInfo, ...]
    digest: str


def group(objects: Iterable[ObjectInfo]) -> dict[str, list[ObjectInfo]]:
    """Return the objects of every directory right below the store that has an index, by its name."""
    return {
        directory: infos
        for directory, infos in by_directory(objects).items()
        if any(info.key == f"{directory}/{names.INDEX}" for info in infos)
    }


def read(store: Store, name: str, objects: Iterable[ObjectInfo]) -> Directory:
    """Return a version directory after checking its index, its listing and all headers.

    Raises:
        FormatError: they break a rule or contradict each other; names the file and the field.
    """
    infos = {info.key.partition("/")[2]: info for info in objects}
    raw = store.get(infos[names.INDEX].key)
    index = slime_index.load(raw, infos[names.INDEX].key)
    _check_counter(name, index, infos[names.INDEX].key)
    _check_listing(name, index, infos)
    slots: dict[str, headers.Slot] = {}
    digests: dict[str, str] = {}
    total = hashlib.sha256(raw)
    for part in sorted(infos):
        if part.endswith(names.PART_SUFFIX):
            header = headers.read(store, infos[part])
            _check_part(part, header, index, infos[names.INDEX].key)
            digests |= _digests(header, index, infos[part].key)
            slots |= header.slots
            total.update(f"{part}\0{infos[part].size_bytes}\0{header.sha256}\0".encode())
    for tensor, part in index.weight_map.items():
        if tensor not in slots:
            raise FormatError(
                f"{infos[names.INDEX].key}: weight_map says that tensor {tensor!r} is in {part!r}, which "
                "does not hold it",
                tensor=tensor,
            )
    objects_found = tuple(infos[part] for part in sorted(infos))
    return Directory(name, index, slots, digests, objects_found, total.hexdigest())


def describe(store: Store, directory: Directory) -> ForeignVersion:
    """Return the value that a directory stands for; `base` is still as written."""
    index = directory.index
    return ForeignVersion(
        layout=NAME,
        identity=index.version if index.version is not None else counter(directory.name),
        base=index.base_version,
        kind="delta" if index.is_delta else "full",
        encoding=index.encoding,
        checksum=index.checksum,
        tensors=tuple(_tensor(directory, slot) for _, slot in sorted(directory.slots.items())),
        missing=_missing(index),
        objects=directory.objects,
        # The headers list what every tensor is, unless the version has no digests.
        digest=digest(store, directory.objects) if index.checksum is None else directory.digest,
    )


def counter(directory: str) -> str:
    """Return a directory's name without `weight_v`: what deltas call a version that does not say it.

    Example:
        >>> counter("weight_v000007"), counter("snapshot-7f3a")
        ('000007', 'snapshot-7f3a')
    """
    match = _COUNTED.fullmatch(directory)
    return directory if match is None else match[1]


def _missing(index: slime_index.Index) -> tuple[str, ...]:
    more = {None: (_UNPROVED,), "adler32": (_ADLER,)}.get(index.checksum, ())
    return (*_ALWAYS, *more)


def _tensor(directory: Directory, slot: headers.Slot) -> ForeignTensor:
    name, size_bytes = slot.meta.name, slot.stop - slot.start
    found = directory.digests.get(name)
    if directory.index.is_delta:
        return ForeignTensor(name, None, None, size_bytes, found)
    return ForeignTensor(name, slot.meta.dtype, slot.meta.shape, size_bytes, found)


def _check_counter(name: str, index: slime_index.Index, where: str) -> None:
    """A directory that was copied or renamed would be taken for another version by its own readers."""
    match = _COUNTED.fullmatch(name)
    version = None if index.version is None else _COUNTED.sub(r"\1", index.version)
    if match is None or version is None or not version.isdecimal():
        return
    if int(version) != int(match[1]):
        raise FormatError(
            f"{where}: metadata.version must be that of its directory, {match[1]!r}, found "
            f"{index.version!r}: the directory was copied or renamed"
        )


def _check_listing(name: str, index: slime_index.Index, infos: Mapping[str, ObjectInfo]) -> None:
    where = infos[names.INDEX].key
    for part in sorted(set(index.weight_map.values())):
        if part not in infos:
            raise FormatError(
                f"{where}: weight_map names {part!r}, which is not there: it was lost, or is not visible "
                "yet; try again, and publish the version anew if it stays away"
            )
    numbered = [match for part in sorted(infos) if (match := _NUMBERED.fullmatch(part))]
    counts = {int(match[2]) for match in numbered}
    numbers = [int(match[1]) for match in numbered]
    first = numbers[0] if numbers else 0
    if counts and (
        counts != {len(numbers)} or first > 1 or numbers != list(range(first, first + len(numbers)))
    ):
        raise FormatError(
            f"{name}: the names {', '.join(match[0] for match in numbered[:4])} say that there are "
            f"{max(counts)} parts, numbered from 0 or 1; found {len(numbers)} of them: some are lost, not "
            "visible yet, or of another version"
        )


def _check_part(part: str, header: headers.Header, index: slime_index.Index, where: str) -> None:
    for tensor, slot in header.slots.items():
        said = index.weight_map.get(tensor)
        if said != part:
            raise FormatError(
                f"{where}: tensor {tensor!r} is in {part!r}, but weight_map says "
                f"{'no file' if said is None else repr(said)}; every tensor must be in exactly one file, "
                "and every file of payload in the index",
                tensor=tensor,
            )
        if index.is_delta and (slot.meta.dtype != "U8" or len(slot.meta.shape) != 1):
            raise FormatError(
                f"{slot.key}: the payload of tensor {tensor!r} must be U8 with one dimension, found "
                f"{slot.meta.dtype} {list(slot.meta.shape)}",
                tensor=tensor,
            )


def _digests(header: headers.Header, index: slime_index.Index, where: str) -> dict[str, str]:
    if index.checksum is None:
        return {}
    found = {}
    for tensor in header.slots:
        place = f"{where}: {names.METADATA}[{tensor!r:.80}]"
        if tensor not in header.metadata:
            raise FormatError(f"{place} is missing: the digest of its new bytes", tensor=tensor)
        found[tensor] = checksums.check(index.checksum, header.metadata[tensor], place)
    if index.is_delta:
        for key in header.metadata:
            if key not in header.slots and key != _FORMAT_KEY:
                raise FormatError(
                    f"{where}: {names.METADATA}[{key!r:.80}] names no tensor of this file"
                )
    return found
