"""Write a full version from the publisher's snapshot: an ordinary Hugging Face checkpoint directory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from syncline import codecs
from syncline.abc import Buffer
from syncline.format import names
from syncline.format import part as part_format
from syncline.sync.base import Base
from syncline.sync.detect import dense_windows
from syncline.sync.options import PublisherOptions
from syncline.sync.phases import Phases
from syncline.sync.writer import VersionWriter
from syncline.types import TensorMeta
from syncline.version import PartEntry, TensorEntry


class FullWriter:
    """Turns a snapshot into the parts, files and table of a full version.

    Args:
        options: `full_encoding`, the largest part (a larger tensor gets one of its own), memory.
    """

    def __init__(
        self,
        writer: VersionWriter,
        snapshot: Base,
        *,
        options: PublisherOptions,
        phases: Phases,
    ) -> None:
        self._writer = writer
        self._snapshot = snapshot
        self._encoding = options.full_encoding
        self._part_bytes = options.part_bytes
        self._memory_bytes = options.memory_bytes
        self._phases = phases

    def write(
        self, table: Mapping[str, TensorEntry], files: Mapping[str, bytes]
    ) -> tuple[list[PartEntry], list[PartEntry], list[TensorEntry]]:
        """Put parts and files; return their entries and the table with every tensor in its part."""
        groups = list(_groups(table, self._part_bytes))
        parts = [
            self._writer.put(
                names.part_name(i, len(groups)), self._part(group), "publish.part_written"
            )
            for i, group in enumerate(groups)
        ]
        entries = [
            replace(entry, encoding=self._encoding, part=i, changed=None)
            for i, group in enumerate(groups)
            for entry in group
        ]
        file_entries = [
            self._writer.put(path, [content], "publish.file_written")
            for path, content in sorted(files.items())
        ]
        return parts, file_entries, sorted(entries, key=lambda entry: entry.meta.name)

    def _part(self, group: list[TensorEntry]) -> Iterator[Buffer]:
        metas = {entry.meta.name: entry.meta for entry in group}
        metadata = part_format.metadata_for("full", self._encoding, {})
        if self._encoding == "full":
            yield from part_format.encode(
                list(metas.values()), lambda name: self._encode(metas[name]), metadata
            )
            return
        with part_format.Spool(self._memory_bytes) as spool:
            for meta in metas.values():
                with self._phases("encode"):
                    spool.add(meta.name, self._encode(meta))
            yield from spool.chunks(metadata)

    def _encode(self, meta: TensorMeta) -> Iterator[Buffer]:
        windows = dense_windows(self._snapshot.bits(meta.name))
        return codecs.get(self._encoding).encode(meta, windows)


def _groups(table: Mapping[str, TensorEntry], part_bytes: int) -> Iterator[list[TensorEntry]]:
    """Yield the entries in groups of at most `part_bytes`, in order of name; at least one group."""
    group: list[TensorEntry] = []
    group_bytes = 0
    for name in sorted(table):
        nbytes = table[name].meta.nbytes
        if group and group_bytes + nbytes > part_bytes:
            yield group
            group, group_bytes = [], 0
        group.append(table[name])
        group_bytes += nbytes
    yield group
