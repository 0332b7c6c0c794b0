"""Bring parts and files of a version to this host: bounded memory, digest checked before use."""

from __future__ import annotations

import mmap
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import IO

from syncline.abc import Buffer, Store
from syncline.errors import FormatError, ObjectNotFoundError, TransportUnavailableError, VerifyError
from syncline.format import names
from syncline.format.digest import Tally
from syncline.format.part import temporary_file
from syncline.format.table import MAX_INLINE_TENSORS
from syncline.sync.history import History
from syncline.sync.phases import Phases
from syncline.version import HeldVersion, Manifest, PartEntry

_LOOK_AGAIN_S = 0.2
IN_MEMORY_BYTES = 64 << 20


def check_objects(store: Store, manifest: Manifest) -> None:
    """Check that the version directory holds exactly the objects that the manifest names, by size.

    What is missing is waited for as long as the store says that writes may stay unseen. A store that
    cannot list is asked for each object, so that nothing extra can be noticed there.

    Raises:
        FormatError: an object is missing, extra, or of another size; all of them are listed.
    """
    wanted = object_names(manifest)
    prefix = names.version_dir(manifest.version) + "/"
    end = time.monotonic() + store.visible_within_s
    while True:
        found = _sizes(store, prefix, wanted)
        missing = [f"missing {path}" for path in sorted(wanted.keys() - found.keys())]
        if not missing or time.monotonic() >= end:
            break
        time.sleep(min(_LOOK_AGAIN_S, store.visible_within_s))
    faults = missing + [f"extra {path}" for path in sorted(found.keys() - wanted.keys())]
    for path in sorted(wanted.keys() & found.keys()):
        size = wanted[path]
        if size is not None and size != found[path]:
            faults.append(f"{path} has {found[path]} bytes instead of {size}")
    if faults:
        raise FormatError(
            f"{prefix}: the objects are not the ones that its manifest names: {'; '.join(faults)}; "
            "syncline fsck tells what else is damaged",
            version=manifest.version,
        )


def _sizes(store: Store, prefix: str, wanted: Mapping[str, int | None]) -> dict[str, int]:
    """Return the sizes of the objects there; where the store cannot list, only of those wanted by size."""
    try:
        return {info.key[len(prefix) :]: info.size_bytes for info in store.list(prefix)}
    except TransportUnavailableError:
        return {
            path: size
            for path, size in wanted.items()
            if size is not None and _has_size(store, prefix + path, size)
        } | {path: 0 for path, size in wanted.items() if size is None}


def _has_size(store: Store, key: str, size_bytes: int) -> bool:
    last = max(0, size_bytes - 1)
    try:
        return len(store.get(key, last, size_bytes + 1)) == size_bytes - last
    except ObjectNotFoundError:
        return False


def object_names(manifest: Manifest) -> dict[str, int | None]:
    """Return the names of a version's objects, with their sizes where the manifest says them."""
    entries = (*manifest.parts, *manifest.files)
    wanted: dict[str, int | None] = {entry.path: entry.size_bytes for entry in entries}
    wanted |= {names.MANIFEST: None, names.INDEX: None}
    if len(manifest.tensors) > MAX_INLINE_TENSORS:
        wanted[names.SIDECAR] = None
    return wanted


def fetched(
    store: Store,
    manifest: Manifest,
    entry: PartEntry,
    on_bytes: Callable[[int], None],
    phases: Phases,
) -> Buffer:
    """Return the whole object, verified; a large one is a map of a temporary file, not memory.

    Args:
        on_bytes: told the size of each piece as it arrives.

    Raises:
        VerifyError: size or SHA-256 differ from the manifest's.
    """
    if entry.size_bytes <= IN_MEMORY_BYTES:
        memory = _Memory(entry.size_bytes)
        _fill(store, manifest, entry, memory, on_bytes, phases)
        return memory.content
    with tempfile.TemporaryFile() as file:
        _fill(store, manifest, entry, _File(file), on_bytes, phases)
        # Not closed by hand: decoders may still hold views, and the last of them frees the map.
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


class _Memory:
    """Room for an object that is small enough, filled piece by piece, so that it is there only once."""

    def __init__(self, size_bytes: int) -> None:
        self._content = bytearray(size_bytes)
        self._used_bytes = 0

    @property
    def content(self) -> memoryview:
        """All of it, read-only."""
        return memoryview(self._content).toreadonly()

    def start_over(self) -> None:
        """Forget what was added."""
        self._used_bytes = 0

    def add(self, piece: Buffer) -> None:
        """Add bytes; those that find no room are left out, as the object's size tells."""
        room = memoryview(self._content)[self._used_bytes :][: len(piece)]
        room[:] = piece[: len(room)]
        self._used_bytes += len(piece)


class _File:
    """A temporary file that is filled piece by piece."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def start_over(self) -> None:
        """Forget what was added."""
        self._file.seek(0)
        self._file.truncate()

    def add(self, piece: Buffer) -> None:
        """Add bytes; they are in the file when this returns."""
        with temporary_file():
            self._file.write(piece)
            self._file.flush()


def _fill(
    store: Store,
    manifest: Manifest,
    entry: PartEntry,
    room: _Memory | _File,
    on_bytes: Callable[[int], None],
    phases: Phases,
) -> None:
    """Put the object there, hashed as it arrives; a second time if it is not what the manifest names.

    Raises:
        VerifyError: it is not then either.
    """
    key = names.key(manifest.version, entry.path)
    with phases("fetch"):
        found = _copied(store, key, entry, room, on_bytes)
        if found != entry:
            # Damaged on the way or where it lies: the second time tells.
            found = _copied(store, key, entry, room, ignore_bytes)
    if found != entry:
        raise VerifyError(
            f"{key}: expected {entry.size_bytes} bytes with sha256 {entry.sha256}, found "
            f"{found.size_bytes} bytes with sha256 {found.sha256}, fetched twice; the object is damaged",
            version=manifest.version,
        )


def _copied(
    store: Store,
    key: str,
    entry: PartEntry,
    room: _Memory | _File,
    on_bytes: Callable[[int], None],
) -> PartEntry:
    room.start_over()
    tally = Tally(store.pieces(key, entry.size_bytes))
    for piece in tally:
        room.add(piece)
        on_bytes(len(piece))
    return tally.entry(entry.path)


def manifest_bytes(store: Store, held: HeldVersion) -> tuple[bytes, bytes | None]:
    """Return a version's `manifest.json` as it was written, and its table where that is a file of its own."""
    raw = store.get(names.key(held.version, names.MANIFEST))
    if len(held.manifest.tensors) <= MAX_INLINE_TENSORS:
        return raw, None
    return raw, store.get(names.key(held.version, names.SIDECAR))


def files_of(history: History) -> dict[str, bytes]:
    """Return the checkpoint files of the newest full version; none if there is no version."""
    for at in history.back():
        if at.manifest.kind == "full":
            return fetch_files(history.store, at.manifest, ignore_bytes, Phases())
    return {}


def fetch_files(
    store: Store, manifest: Manifest, on_bytes: Callable[[int], None], phases: Phases
) -> dict[str, bytes]:
    """Return the content of a full version's further files by name, verified."""
    files = {}
    for entry in manifest.files:
        files[entry.path] = bytes(fetched(store, manifest, entry, on_bytes, phases))
    return files


def ignore_bytes(nbytes: int) -> None:
    """Take no notice of progress."""
