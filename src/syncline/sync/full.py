"""Write a full version from the publisher's snapshot: an ordinary Hugging Face checkpoint directory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial

import numpy as np

from syncline.abc import Buffer
from syncline.codecs.full import Full
from syncline.codecs.planes import Planes
from syncline.format import names
from syncline.format import part as part_format
from syncline.sync.base import Base
from syncline.sync.encode import encode_all
from syncline.sync.options import PublisherOptions
from syncline.sync.phases import Phases
from syncline.sync.slices import by_tensor
from syncline.sync.writer import VersionWriter
from syncline.threads import Background
from syncline.types import WINDOW_UNITS, TensorMeta
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
        self._codec = Planes()
        self._metadata = part_format.metadata_for("full", self._encoding, {})
        self._part_bytes = options.part_bytes
        self._memory_bytes = options.memory_bytes
        self._phases = phases

    def write(
        self, table: Mapping[str, TensorEntry], files: Mapping[str, bytes]
    ) -> tuple[list[PartEntry], list[PartEntry], list[TensorEntry]]:
        """Put parts and files; return their entries and the table with every tensor in its part."""
        groups = list(_groups(table, self._part_bytes))
        put = self._put_raw if self._encoding == Full.name else self._put_encoded
        parts = put([[entry.meta for entry in group] for group in groups])
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

    def _put_raw(self, groups: list[list[TensorMeta]]) -> list[PartEntry]:
        return [
            self._put(i, len(groups), part_format.encode(group, self._chunks, self._metadata))
            for i, group in enumerate(groups)
        ]

    def _put_encoded(self, groups: list[list[TensorMeta]]) -> list[PartEntry]:
        """Encode one part while the one before is being put."""
        parts: list[PartEntry] = []

        def put(index: int, spool: part_format.Spool) -> None:
            with spool:
                parts.append(self._put(index, len(groups), spool.chunks(self._metadata)))

        with Background() as puts:
            for i, group in enumerate(groups):
                spool = self._spooled(group)
                try:
                    puts.finish()
                except BaseException:
                    spool.close()
                    raise
                puts.run(partial(put, i, spool))
        return parts

    def _spooled(self, group: list[TensorMeta]) -> part_format.Spool:
        spool = part_format.Spool(self._memory_bytes)
        tensors = ((meta, self._snapshot.bits(meta.name)) for meta in group)
        try:
            with closing(encode_all(tensors, self._codec, self._phases)) as encoded:
                for meta, pieces in by_tensor(encoded):
                    with self._phases("spool"):
                        spool.add(meta.name, (chunk for piece in pieces for chunk in piece.chunks))
        except BaseException:
            spool.close()
            raise
        return spool

    def _put(self, index: int, count: int, chunks: Iterable[Buffer]) -> PartEntry:
        return self._writer.put(names.part_name(index, count), chunks, "publish.part_written")

    def _chunks(self, name: str) -> Iterator[Buffer]:
        bits = self._snapshot.bits(name)
        for start in range(0, bits.size, WINDOW_UNITS):
            yield bits[start : start + WINDOW_UNITS].view(np.uint8).data


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
