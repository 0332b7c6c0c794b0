"""Directories of Fireworks snapshots: what each is, and in which order they follow each other."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from syncline.abc import Store
from syncline.errors import FormatError
from syncline.format import names, strict_json
from syncline.interchange import chain, headers
from syncline.interchange.evidence import by_directory, digest
from syncline.types import ObjectInfo
from syncline.version import ForeignTensor, ForeignVersion

NAME = "fireworks"
ARC_V1, ARC_V2 = "arc_v1", "arc_v2"
REQUEST = "incremental_snapshot_metadata.json"
"""What the hot-load request of a delta says, beside it; Syncline writes it, others need not."""

CHECKSUM = "alder32"
"""How the hot-load API spells adler32."""

_ARC_V3 = b"ARC3_ENVELOPE\0"
_ZSTD = b"\x28\xb5\x2f\xfd"
_DECIMAL = re.compile(r"0|[1-9][0-9]{0,9}")
_NUMBERED = re.compile(r"model-([0-9]{5})-of-([0-9]{5})\.safetensors")
_REQUEST_KEYS = ("previous_snapshot_identity", "compression_format", "checksum_format")
_MAX_JSON_BYTES = 1 << 28
_LOOKED_AT = 4
_DIGITS = re.compile(r"([0-9]+)")

_ADLER = "adler32 has 32 bits: it finds accidents, but not every one"
_BY_NAME = (
    "the base is not named: the snapshot before it in order of name is taken for it, and the digests prove "
    "or refute that"
)
_UNPROVED = "the full version has no digests: its tensors are believed as they are read"
_UNMARKED = "nothing marks a directory as whole: one that is still being written may be read"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One directory that keeps the rules.

    Attributes:
        encoding: `arc_v1` or `arc_v2`; `raw` of a full checkpoint.
        slots: where every tensor's payload lies.
        digests: adler32 of every tensor's new bytes, 8 hexadecimal digits; empty of a full checkpoint.
        base: what `REQUEST` names; None without that file.
    """

    encoding: str
    slots: Mapping[str, headers.Slot]
    digests: Mapping[str, str]
    base: str | None


def evidence(store: Store, keys: Sequence[str]) -> str | None:
    """Return a key of a delta, arc_v3 included, among the last directories in order of name.

    A run has few full checkpoints, and looking into every directory of a long run of others costs much.
    """
    first: dict[str, str] = {}
    indexes = {key.partition("/")[0] for key in keys if key.endswith("/" + names.INDEX)}
    for key in keys:
        directory, _, name = key.partition("/")
        if name.endswith(names.PART_SUFFIX) and "/" not in name:
            first.setdefault(directory, key)
    for directory in sorted(first, key=_natural)[-_LOOKED_AT:]:
        key = first[directory]
        if store.get(key, 0, len(_ARC_V3)) == _ARC_V3:
            return key
        try:
            header = headers.read(store, _info(store, key))
        except FormatError:
            continue
        if _is_delta(header) and not (directory in indexes and _is_slime(store, directory)):
            return key
    return None


def versions(store: Store, seen: Sequence[ForeignVersion]) -> list[ForeignVersion]:
    """Return the snapshots of a store, each after its base."""
    known = {version.objects: version for version in seen}
    found: list[ForeignVersion] = []
    directories = _directories(store.list())
    for identity in sorted(directories, key=_natural):
        objects = tuple(directories[identity])
        previous = found[-1] if found else None
        version = known.get(objects)
        if version is None or (_BY_NAME in version.missing and version.base != _before(previous)):
            version = _describe(store, identity, objects, previous)
        found.append(version)
    by_identity = {version.identity: version for version in found}
    for version in found:
        _check_complete(version, by_identity.get(version.base or ""))
    return chain.ordered(found)


def read(store: Store, identity: str, objects: Iterable[ObjectInfo]) -> Snapshot:
    """Return a snapshot after checking its headers.

    Raises:
        FormatError: a rule is broken, files contradict each other, or it is arc_v3; says where.
    """
    infos = {info.key.partition("/")[2]: info for info in objects}
    parts = sorted(name for name in infos if name.endswith(names.PART_SUFFIX))
    _check_numbers(identity, parts)
    slots: dict[str, headers.Slot] = {}
    digests: dict[str, str] = {}
    kinds: set[bool] = set()
    for part in parts:
        check_no_pickle(store.get(infos[part].key, 0, len(_ARC_V3)), infos[part].key)
        header = headers.read(store, infos[part])
        for name, slot in header.slots.items():
            if name in slots:
                raise FormatError(
                    f"{slot.key}: tensor {name!r} is in {slots[name].key} too", tensor=name
                )
            slots[name] = slot
        if header.slots:
            kinds.add(_is_delta(header))
        if _is_delta(header):
            digests |= _digests(header, infos[part].key)
        else:
            _check_full(header, infos[part].key)
    if len(kinds) > 1:
        raise FormatError(
            f"{identity}: some files hold payloads with digests and some do not; expected a delta or a full "
            "checkpoint"
        )
    if True not in kinds:
        return Snapshot("raw", slots, {}, None)
    encoding = _encoding(store, slots.values())
    return Snapshot(encoding, slots, digests, _base(store, infos, encoding))


def check_no_pickle(start: bytes, where: str) -> None:
    """Refuse arc_v3.

    Raises:
        FormatError: the bytes begin an envelope of arc_v3.
    """
    if start.startswith(_ARC_V3):
        raise FormatError(
            f"{where}: ARC3_ENVELOPE: arc_v3 is a Python pickle, which can run any code when it is opened; "
            "it is not read; publish with arc_v2"
        )


def _describe(
    store: Store, identity: str, objects: tuple[ObjectInfo, ...], previous: ForeignVersion | None
) -> ForeignVersion:
    snapshot = read(store, identity, objects)
    is_full = not snapshot.digests and snapshot.encoding == "raw"
    base, missing = snapshot.base, [_ADLER]
    if is_full:
        missing = [_UNPROVED, _UNMARKED]
    elif base is None:
        base = _before(previous)
        missing += [_BY_NAME, _UNMARKED]
    return ForeignVersion(
        layout=NAME,
        identity=identity,
        base=base,
        kind="full" if is_full else "delta",
        encoding=snapshot.encoding,
        checksum=None if is_full else "adler32",
        tensors=tuple(
            ForeignTensor(
                name,
                slot.meta.dtype if is_full else None,
                slot.meta.shape if is_full else None,
                slot.stop - slot.start,
                snapshot.digests.get(name),
            )
            for name, slot in sorted(snapshot.slots.items())
        ),
        missing=tuple(missing),
        objects=objects,
        digest=digest(store, objects),
    )


def _before(previous: ForeignVersion | None) -> str:
    return "the base checkpoint" if previous is None else previous.identity


def _check_complete(version: ForeignVersion, base: ForeignVersion | None) -> None:
    """A delta carries every tensor of its base, so one that does not has lost a file."""
    if base is None or version.kind == "full":
        return
    odd = {tensor.name for tensor in version.tensors} ^ {tensor.name for tensor in base.tensors}
    for name in sorted(odd):
        side = (
            base.identity if name in {tensor.name for tensor in base.tensors} else version.identity
        )
        raise FormatError(
            f"{version.identity}: every tensor of the base {base.identity!r} must be there; {name!r} is in "
            f"{side!r} alone: a file was lost or is not visible yet, or this is not the base",
            tensor=name,
        )


def _directories(objects: Iterable[ObjectInfo]) -> dict[str, list[ObjectInfo]]:
    return {
        directory: infos
        for directory, infos in by_directory(objects).items()
        if any(info.key.endswith(names.PART_SUFFIX) for info in infos)
    }


def _natural(identity: str) -> list[tuple[int, str]]:
    """Order names by their text, and numbers inside them by value."""
    parts = [part for part in _DIGITS.split(identity) if part]
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def _check_numbers(identity: str, parts: Sequence[str]) -> None:
    matches = [match for part in parts if (match := _NUMBERED.fullmatch(part))]
    counts = {int(match[2]) for match in matches}
    if counts and counts != {len(matches)}:
        raise FormatError(
            f"{identity}: the file names say that there are {max(counts)} parts, found {len(matches)}: some "
            "are lost, or not visible yet"
        )


def _is_delta(header: headers.Header) -> bool:
    return bool(header.slots) and all(
        _is_payload(slot) and _DECIMAL.fullmatch(header.metadata.get(name, "")) is not None
        for name, slot in header.slots.items()
    )


def _check_full(header: headers.Header, where: str) -> None:
    """Check that a file without all digests is one of weights, and no delta that lost some of them."""
    for name in header.slots:
        if name in header.metadata:
            odd = next(
                key for key in header.slots if not _DECIMAL.fullmatch(header.metadata.get(key, ""))
            )
            raise FormatError(
                f"{where}: {names.METADATA}[{odd!r:.80}] must be the decimal adler32 of its new bytes, as "
                f"{name!r:.80} has one, found {header.metadata.get(odd, 'nothing')!r:.80}",
                tensor=odd,
            )
    if header.slots and all(_is_payload(slot) for slot in header.slots.values()):
        raise FormatError(
            f"{where}: every tensor is U8 with one dimension, as in a delta, but none has a digest in "
            f"{names.METADATA}; expected a delta's digests, or weights"
        )


def _is_payload(slot: headers.Slot) -> bool:
    return slot.meta.dtype == "U8" and len(slot.meta.shape) == 1


def _digests(header: headers.Header, where: str) -> dict[str, str]:
    found = {}
    for key, text in header.metadata.items():
        if key not in header.slots and key != "format":
            raise FormatError(
                f"{where}: {names.METADATA}[{key!r:.80}] names no tensor of this file"
            )
        if key in header.slots:
            if int(text) >= 1 << 32:
                raise FormatError(
                    f"{where}: {names.METADATA}[{key!r:.80}] must be a decimal adler32 below 2**32, found "
                    f"{text!r}",
                    tensor=key,
                )
            found[key] = f"{int(text):08x}"
    return found


def _encoding(store: Store, slots: Iterable[headers.Slot]) -> str:
    """Return how the first payload is compressed; the others must be alike, or do not decode."""
    for slot in slots:
        if slot.stop > slot.start:
            start = store.get(slot.key, slot.start, min(slot.stop, slot.start + len(_ARC_V3)))
            check_no_pickle(start, slot.key)
            return ARC_V2 if start.startswith(_ZSTD) else ARC_V1
    return ARC_V2


def _base(store: Store, infos: Mapping[str, ObjectInfo], encoding: str) -> str | None:
    if REQUEST not in infos:
        return None
    where = infos[REQUEST].key
    text = store.get(where, 0, _MAX_JSON_BYTES + 1)
    fields = strict_json.Fields(
        strict_json.parse(text, where, limit_bytes=_MAX_JSON_BYTES), where, _REQUEST_KEYS
    )
    fields.word("compression_format", encoding)
    fields.word("checksum_format", CHECKSUM, "adler32")
    return fields.text("previous_snapshot_identity")


def _info(store: Store, key: str) -> ObjectInfo:
    return next(info for info in store.list(key) if info.key == key)


def _is_slime(store: Store, directory: str) -> bool:
    key = f"{directory}/{names.INDEX}"
    document = strict_json.members(
        strict_json.parse(store.get(key, 0, _MAX_JSON_BYTES), key, limit_bytes=_MAX_JSON_BYTES), key
    )
    metadata = document.get("metadata")
    return isinstance(metadata, dict) and "delta_encoding" in metadata
