"""The slime layout: what slime, miles, SGLang's `/pull_weights`, ModelExpress and cwtrain exchange.

A directory `weight_v%06d` (or of any name) for each version, with safetensors files and
`model.safetensors.index.json`. A delta carries, for every changed tensor, one zstd frame of XOR or of
overwritten bytes, and the digest of the tensor's new bytes; anything else is a full checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from syncline import codecs
from syncline.abc import Base, Interchange, Store
from syncline.codecs.payload import placing
from syncline.errors import ConfigError, FormatError, LayoutError
from syncline.format import names
from syncline.interchange import chain, raw, slime_directory, slime_index, slime_write
from syncline.interchange.headers import Slot
from syncline.interchange.proving import proved
from syncline.types import Bits, Changes, Span, TensorMeta, Window, unsigned
from syncline.version import ForeignVersion


class Slime(Interchange):
    """Slime-layout directories; see `syncline.abc.Interchange`.

    A version's identity is its index's `version`; of a full version that does not say one, the directory's
    name without `weight_v`. A base may be named by identity or by directory.
    """

    name: ClassVar[str] = slime_directory.NAME
    writes: ClassVar[bool] = True
    is_concurrent: ClassVar[bool] = True

    def evidence(self, store: Store, keys: Sequence[str]) -> str | None:
        """Return the first index of a delta; else of a full version in a directory `weight_v...`."""
        found = [key for key in keys if _is_index(key)]
        for key in found:
            try:
                if slime_index.is_delta(store.get(key), key):
                    return key
            except FormatError:
                continue
        return next((key for key in found if key.startswith(names.VERSION_PREFIX)), None)

    def versions(self, store: Store, seen: Sequence[ForeignVersion] = ()) -> list[ForeignVersion]:
        """Return the versions with an index, each after its base; see `Interchange.versions`.

        A directory without an index is not finished, so it is no version.
        """
        known = {version.objects: version for version in seen}
        found: dict[str, ForeignVersion] = {}
        for directory, objects in slime_directory.group(store.list()).items():
            version = known.get(tuple(objects))
            if version is None:
                version = slime_directory.describe(
                    store, slime_directory.read(store, directory, objects)
                )
            found[directory] = version
        return chain.ordered(_linked(found))

    def read(
        self, store: Store, version: ForeignVersion, base: Base | None
    ) -> Iterator[tuple[TensorMeta, Iterator[Changes | Span]]]:
        """Yield the tensors in the order of the files; see `Interchange.read`. One payload in memory."""
        directory_name = version.objects[0].key.partition("/")[0]
        directory = slime_directory.read(store, directory_name, version.objects)
        for slot in directory.slots.values():
            expected = directory.digests.get(slot.meta.name)
            if directory.index.is_delta:
                if base is None:
                    raise ConfigError(f"version {version.identity!r} is a delta; pass its base")
                yield _delta(store, slot, version, base, expected)
            else:
                yield slot.meta, _full(store, slot, version.checksum, expected)

    def write(
        self,
        store: Store,
        version: ForeignVersion,
        tensors: Iterable[tuple[TensorMeta, Iterable[Window]]],
        files: Mapping[str, bytes] = MappingProxyType({}),
    ) -> ForeignVersion:
        """Write parts, then files, the index last; see `Interchange.write`.

        An identity of digits becomes the directory `weight_v%06d`, any other one a directory of that name.
        """
        directory = slime_write.write(store, version, tensors, files)
        objects = store.list(directory + "/")
        return slime_directory.describe(store, slime_directory.read(store, directory, objects))

    def files(self, store: Store, version: ForeignVersion) -> Mapping[str, bytes]:
        """Return configuration, tokenizer and licence of a full version; see `Interchange.files`."""
        infos = {info.key.partition("/")[2]: info for info in version.objects}
        return raw.files(store, infos) if version.kind == "full" else {}


def _is_index(key: str) -> bool:
    directory, _, name = key.partition("/")
    return bool(directory) and name == names.INDEX


def _linked(found: Mapping[str, ForeignVersion]) -> Iterator[ForeignVersion]:
    """Yield versions whose bases are identities, whether they were named so or by directory.

    Raises:
        FormatError: one name stands for two versions.
    """
    aliases: dict[str, str] = {}
    for directory, version in found.items():
        for alias in {version.identity, directory, slime_directory.counter(directory)}:
            if aliases.setdefault(alias, version.identity) != version.identity:
                raise FormatError(
                    f"{directory}/{names.INDEX}: {alias!r} stands for the versions {aliases[alias]!r} and "
                    f"{version.identity!r}; two runs lie in one directory"
                )
    for version in found.values():
        base = None if version.base is None else aliases.get(version.base, version.base)
        yield version if base == version.base else replace(version, base=base)


def _delta(
    store: Store, slot: Slot, version: ForeignVersion, base: Base, expected: str | None
) -> tuple[TensorMeta, Iterator[Changes | Span]]:
    name = slot.meta.name
    try:
        meta, bits = base(name)
    except LayoutError as error:
        raise LayoutError(f"{slot.key}: {error}", tensor=name) from error
    return meta, _changes(store, slot, meta, bits, version, expected)


def _changes(
    store: Store,
    slot: Slot,
    meta: TensorMeta,
    bits: Bits,
    version: ForeignVersion,
    expected: str | None,
) -> Iterator[Changes | Span]:
    payload = raw.payload(store, slot, meta)
    with placing(slot.key, meta.name):
        pieces = codecs.get(version.encoding).decode(meta, payload, bits)
        if version.checksum is None or expected is None:
            raise FormatError("a delta must have a digest of its new bytes")
        yield from proved(
            meta, pieces, bits, checksum=version.checksum, expected=expected, where=slot.key
        )


def _full(
    store: Store, slot: Slot, checksum: str | None, expected: str | None
) -> Iterator[Changes | Span]:
    spans = raw.spans(store, slot)
    if checksum is None or expected is None:
        yield from spans
        return
    nothing = np.empty(0, unsigned(slot.meta.unit_bytes))
    yield from proved(
        slot.meta, spans, nothing, checksum=checksum, expected=expected, where=slot.key
    )
