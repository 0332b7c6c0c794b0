"""Write one version into a store: parts first, then index and table, the manifest last."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from syncline.abc import Buffer, Observe, Store
from syncline.errors import FormatError, ObjectExistsError
from syncline.format import index as index_format
from syncline.format import manifest as manifest_format
from syncline.format import names
from syncline.format.digest import Tally
from syncline.sync.fetch import check_objects, object_names
from syncline.sync.kept import Kept
from syncline.sync.phases import Phases
from syncline.threads import Background
from syncline.types import ZERO, Fingerprint, Step
from syncline.version import HeldVersion, Manifest, PartEntry, TensorEntry

STEPS = (
    "publish.part_written",
    "publish.file_written",
    "publish.index_written",
    "publish.table_written",
    "publish.manifest_written",
)


class VersionWriter:
    """Puts the objects of one version; nothing of it exists for readers until HEAD names it.

    Args:
        check_owner: raises if another publisher has taken the store over; called for every object when its
            last byte has been written, before it exists.
        kept: keeps a copy of every part, too.
    """

    def __init__(
        self,
        store: Store,
        version: int,
        phases: Phases,
        observe: Observe,
        check_owner: Callable[[], None],
        kept: Kept | None = None,
    ) -> None:
        self._store = store
        self._version = version
        self._phases = phases
        self._observe = observe
        self._check_owner = check_owner
        self._kept = kept

    @property
    def at_once(self) -> int:
        """How many objects to put at once."""
        return self._store.puts_at_once

    def put(self, path: str, chunks: Iterable[Buffer], step: str) -> PartEntry:
        """Put one object, digest it on the way, and return its entry."""
        if self._kept is not None and names.is_part(path):
            chunks = self._kept.copying(path, chunks)
        tally = Tally(self._owned(chunks))
        with self._phases("put"):
            try:
                self._store.put(names.key(self._version, path), tally)
            except ObjectExistsError:
                self._check_owner()  # if another publisher put it, that is what is to be said
                raise
        entry = tally.entry(path)
        self._observe(Step(step, entry.size_bytes))
        return entry

    def finish(self, manifest: Manifest, checksum: str) -> HeldVersion:
        """Put index, table and manifest; return what identifies the version."""
        index = index_format.dump(manifest, checksum)
        raw, table = manifest_format.dump(manifest)
        with Background(self.at_once) as puts:
            puts.run(partial(self.put, names.INDEX, [index], "publish.index_written"))
            if table is not None:
                puts.run(partial(self.put, names.SIDECAR, [table], "publish.table_written"))
        entry = self.put(names.MANIFEST, [raw], "publish.manifest_written")
        try:
            check_objects(self._store, manifest)
        except FormatError:
            self._remove_strays(manifest)
            check_objects(self._store, manifest)
        return HeldVersion(manifest, entry.sha256)

    def _owned(self, chunks: Iterable[Buffer]) -> Iterator[Buffer]:
        """Pass the chunks on; a large object takes long, so that the owner is asked for again at the end."""
        yield from chunks
        self._check_owner()

    def _remove_strays(self, manifest: Manifest) -> None:
        """Remove what an older publisher was still writing into this version when it lost the store."""
        wanted = object_names(manifest)
        prefix = names.version_dir(self._version) + "/"
        for info in self._store.list(prefix):
            if info.key.removeprefix(prefix) not in wanted:
                self._check_owner()
                self._store.delete(info.key)


def model_fingerprint(table: Iterable[TensorEntry]) -> Fingerprint:
    """Return the sum of the tensors' fingerprints."""
    total = ZERO
    for entry in table:
        total += entry.fingerprint
    return total
