"""Write one Fireworks snapshot: parts that mirror the base's files, the request's fields last."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack

from syncline import codecs
from syncline.abc import Store
from syncline.errors import ConfigError
from syncline.format import checksum as checksums
from syncline.format import names, strict_json
from syncline.format.part import Spool
from syncline.interchange import headers
from syncline.interchange.fireworks_snapshot import ARC_V2, CHECKSUM, REQUEST
from syncline.types import TensorMeta, Window
from syncline.version import ForeignVersion

PART_BYTES = 4 << 30
"""A part of a checkpoint with no model to mirror is closed at so many bytes; receivers take less than 5 GB."""

_SPOOLED_BYTES = 64 << 20
_NEW = "model-{:05d}-of-{:05d}" + names.PART_SUFFIX


def write(
    store: Store,
    version: ForeignVersion,
    tensors: Iterable[tuple[TensorMeta, Iterable[Window]]],
    files: Mapping[str, bytes],
    places: Mapping[str, str],
) -> None:
    """Put one snapshot; see `Interchange.write`.

    Args:
        places: file name by tensor name, which goes before that of the base in the store.
    """
    _check(version, files)
    if not places and version.base is not None:
        places = _places_of(store, version.base)
    with ExitStack() as opened:
        parts = _Parts(version, places, opened)
        for meta, windows in tensors:
            parts.add(meta, windows)
        named = parts.named()
        for path, part in sorted(named.items()):
            metadata = (
                {"format": "pt"} if version.kind == "full" else dict(sorted(part.digests.items()))
            )
            store.put(f"{version.identity}/{path}", part.spool.chunks(metadata))
    for name, content in sorted(files.items()):
        names.check_file(name, "a file of a full version")
        store.put(f"{version.identity}/{name}", [content])
    weight_map = {name: path for path, part in named.items() for name in part.names}
    index = strict_json.dump(
        {"metadata": {"total_size": parts.raw_bytes}, "weight_map": weight_map}
    )
    store.put(f"{version.identity}/{names.INDEX}", [index])
    if version.kind == "delta":
        request = {
            "previous_snapshot_identity": version.base,
            "compression_format": ARC_V2,
            "checksum_format": CHECKSUM,
        }
        store.put(f"{version.identity}/{REQUEST}", [strict_json.dump(request)])


class _Part:
    """A part that is being filled: payloads, their names, and the digests of their new bytes."""

    def __init__(self, spool: Spool) -> None:
        self.spool = spool
        self.names: list[str] = []
        self.digests: dict[str, str] = {}


class _Parts:
    """The parts of a snapshot, under the names that they mirror, or numbered at the end."""

    def __init__(
        self, version: ForeignVersion, places: Mapping[str, str], opened: ExitStack
    ) -> None:
        self._version = version
        self._places = places
        self._opened = opened
        self._memory_bytes = _SPOOLED_BYTES // max(1, len(set(places.values())))
        self._parts: dict[str, _Part] = {}
        self.raw_bytes = 0

    def add(self, meta: TensorMeta, windows: Iterable[Window]) -> None:
        """Take one tensor; a delta carries it also if it did not change."""
        part = self._part(meta)
        is_full = self._version.kind == "full"
        passing = _Passing(windows)
        codec = codecs.get("full" if is_full else "xor")
        part.spool.add(meta.name, codec.encode(meta, passing), meta if is_full else None)
        part.names.append(meta.name)
        part.digests[meta.name] = str(int(passing.digest.hexdigest(), 16))
        self.raw_bytes += meta.nbytes

    def named(self) -> dict[str, _Part]:
        """Return the parts by file name."""
        if self._places:
            return self._parts
        count = len(self._parts)
        if count == 1:
            return {"model" + names.PART_SUFFIX: next(iter(self._parts.values()))}
        return {
            _NEW.format(number, count): part for number, part in enumerate(self._parts.values(), 1)
        }

    def _part(self, meta: TensorMeta) -> _Part:
        if self._places:
            if meta.name not in self._places:
                raise ConfigError(
                    f"tensor {meta.name!r} is in no file of the base, so no receiver would look for it"
                )
            path = self._places[meta.name]
        else:
            path = str(len(self._parts))
            last = self._parts.get(str(len(self._parts) - 1))
            if last is not None and last.spool.size_bytes + meta.nbytes <= PART_BYTES:
                return last
        if path not in self._parts:
            spool = self._opened.enter_context(Spool(self._memory_bytes))
            self._parts[path] = _Part(spool)
        return self._parts[path]


class _Passing:
    """Windows on their way into a codec, digested."""

    def __init__(self, windows: Iterable[Window]) -> None:
        self._windows = windows
        self.digest = checksums.new("adler32")

    def __iter__(self) -> Iterator[Window]:
        for window in self._windows:
            checksums.update(self.digest, window.new)
            yield window


def _check(version: ForeignVersion, files: Mapping[str, bytes]) -> None:
    if "/" in version.identity or not version.identity:
        raise ConfigError(
            f"identity: in the fireworks layout it names a directory, found {version.identity!r}"
        )
    allowed = "raw" if version.kind == "full" else ARC_V2
    if version.encoding != allowed:
        raise ConfigError(
            f"encoding: a {version.kind} version in the fireworks layout has {allowed!r}, found "
            f"{version.encoding!r}"
        )
    if version.kind == "delta" and (version.checksum != "adler32" or not version.base or files):
        raise ConfigError(
            f"version {version.identity!r}: a delta in the fireworks layout has checksum 'adler32', a base "
            f"and no further files; found {version.checksum!r}, {version.base!r} and {len(files)} files"
        )


def _places_of(store: Store, identity: str) -> dict[str, str]:
    """Return in which file of a version in the store every tensor lies; nothing if it is not there."""
    found: dict[str, str] = {}
    for info in store.list(f"{identity}/"):
        name = info.key.partition("/")[2]
        if name.endswith(names.PART_SUFFIX):
            found |= dict.fromkeys(headers.read(store, info).slots, name)
    return found
