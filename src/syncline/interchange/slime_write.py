"""Write one version in the slime layout: parts spooled, put under their final names, the index last."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack

from syncline import codecs
from syncline.abc import Store
from syncline.errors import ConfigError
from syncline.format import checksum as checksums
from syncline.format import index as index_format
from syncline.format import names
from syncline.format.part import Spool, metadata_for
from syncline.format.rules import INTERCHANGE_ENCODINGS
from syncline.interchange.slime_index import RAW
from syncline.types import TensorMeta, Window
from syncline.version import ForeignVersion

PART_BYTES = 4 << 30
"""A part is closed once it has so many bytes; readers of the hot-load kind take less than 5 GB."""


def write(
    store: Store,
    version: ForeignVersion,
    tensors: Iterable[tuple[TensorMeta, Iterable[Window]]],
    files: Mapping[str, bytes],
) -> str:
    """Put one version; return the name of its directory. See `Interchange.write`."""
    _check(version, files)
    directory = directory_of(version.identity)
    with ExitStack() as opened:
        parts = _Parts(version, opened)
        for meta, windows in tensors:
            parts.add(meta, windows)
        weight_map: dict[str, str] = {}
        for number, part in enumerate(parts.closed()):
            path = names.part_name(number, parts.count)
            metadata = metadata_for(version.kind, version.encoding, part.digests)
            if version.kind == "full":
                metadata = {**(metadata or {}), **part.digests}
            store.put(f"{directory}/{path}", part.spool.chunks(metadata))
            weight_map |= dict.fromkeys(part.names, path)
    for name, content in sorted(files.items()):
        names.check_file(name, "a file of a full version")
        store.put(f"{directory}/{name}", [content])
    store.put(f"{directory}/{names.INDEX}", [_index(version, weight_map, parts.raw_bytes)])
    return directory


def directory_of(identity: str) -> str:
    """Return the directory in which a version of this identity lies.

    Example:
        >>> directory_of("7"), directory_of("snapshot-7f3a")
        ('weight_v000007', 'snapshot-7f3a')
    """
    return f"weight_v{int(identity):06d}" if identity.isdecimal() else identity


class _Part:
    """A part that is being filled: payloads, their names and the digests of their new bytes."""

    def __init__(self, opened: ExitStack) -> None:
        self.spool = opened.enter_context(Spool())
        self.names: list[str] = []
        self.digests: dict[str, str] = {}


class _Parts:
    """All parts of a version."""

    def __init__(self, version: ForeignVersion, opened: ExitStack) -> None:
        self._version = version
        self._opened = opened
        self._parts = [_Part(opened)]
        self.raw_bytes = 0

    @property
    def count(self) -> int:
        """How many parts hold a payload."""
        return len(self.closed())

    def closed(self) -> list[_Part]:
        """Return the parts that hold a payload."""
        return [part for part in self._parts if part.names]

    def add(self, meta: TensorMeta, windows: Iterable[Window]) -> None:
        """Take one tensor; one that did not change leaves no trace in a delta."""
        if self._parts[-1].spool.size_bytes >= PART_BYTES:
            self._parts.append(_Part(self._opened))
        part, passing = self._parts[-1], _Passing(windows, self._version.checksum)
        is_full = self._version.kind == "full"
        codec = codecs.get("full" if is_full else self._version.encoding)
        part.spool.add(meta.name, codec.encode(meta, passing), meta if is_full else None)
        if not is_full and not passing.changed:
            part.spool.drop(meta.name)
            return
        part.names.append(meta.name)
        self.raw_bytes += meta.nbytes
        if passing.digest is not None:
            part.digests[meta.name] = passing.digest.hexdigest()


class _Passing:
    """Windows on their way into a codec: counted, and digested."""

    def __init__(self, windows: Iterable[Window], checksum: str | None) -> None:
        self._windows = windows
        self.digest = None if checksum is None else checksums.new(checksum)
        self.changed = 0

    def __iter__(self) -> Iterator[Window]:
        for window in self._windows:
            self.changed += window.offsets.size
            if self.digest is not None:
                checksums.update(self.digest, window.new)
            yield window


def _check(version: ForeignVersion, files: Mapping[str, bytes]) -> None:
    allowed = (RAW,) if version.kind == "full" else INTERCHANGE_ENCODINGS
    if "/" in version.identity or not version.identity:
        raise ConfigError(
            f"identity: in the slime layout it names a directory, found {version.identity!r}"
        )
    if version.encoding not in allowed:
        raise ConfigError(
            f"encoding: a {version.kind} version in the slime layout has one of {allowed}, found "
            f"{version.encoding!r}"
        )
    if version.checksum is not None:
        checksums.new(version.checksum)
    if version.kind == "delta" and (version.checksum is None or not version.base or files):
        raise ConfigError(
            f"version {version.identity!r}: a delta in the slime layout has a checksum, a base and no "
            f"further files; found {version.checksum!r}, {version.base!r} and {len(files)} files"
        )


def _index(version: ForeignVersion, weight_map: Mapping[str, str], raw_bytes: int) -> bytes:
    if version.kind == "full":
        return index_format.dump_full(weight_map, raw_bytes, version.checksum)
    return index_format.dump_delta(
        weight_map,
        version=version.identity,
        base_version=str(version.base),
        encoding=version.encoding,
        checksum=str(version.checksum),
    )
