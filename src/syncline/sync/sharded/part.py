"""One rank's part of a version: the tensors that it owns, encoded, and what the manifest says of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from syncline import codecs, kernels
from syncline.abc import Buffer
from syncline.codecs import choice
from syncline.errors import VerifyError
from syncline.format import names, strict_json, table
from syncline.format.part import Spool, encode, metadata_for
from syncline.layouts import Catalog
from syncline.sync.delta import dense_bytes
from syncline.sync.options import PublisherOptions
from syncline.sync.phases import Phases
from syncline.sync.sharded.changes import Moved, RankChanges, merge, windows
from syncline.sync.sharded.shard import Shard
from syncline.sync.sharded.shares import Copy, Shares
from syncline.sync.writer import VersionWriter
from syncline.types import WINDOW_UNITS, ZERO, Bits, Fingerprint, TensorMeta, Window
from syncline.version import PartEntry, TensorEntry

_KEYS = ("part", "tensors", "drifted", "payloads")
_PART_KEYS = ("path", "size_bytes", "sha256")
_COPY_KEYS = ("name", "box", "first", "second")
_LIMIT_BYTES = 1 << 28

SPARSE_ENCODINGS = ("packed", "indices")
"""Encodings of a tensor that no rank holds whole: they look at changed places alone. `auto` is the first."""


@dataclass(frozen=True, slots=True)
class Drift:
    """Two copies of one box that no longer hold the same: canonical name, number of box and copies."""

    name: str
    box: int
    first: int
    second: int

    @property
    def copies(self) -> tuple[Copy, Copy]:
        """The copies that differ."""
        return (self.name, self.box, self.first), (self.name, self.box, self.second)


@dataclass(frozen=True, slots=True)
class Result:
    """What a rank tells the leader: its part and the tensors in it, or what keeps it from writing one.

    Attributes:
        payloads: bytes of each payload, where these are to go to engines on a live path, too.
    """

    part: PartEntry | None = None
    tensors: tuple[TensorEntry, ...] = ()
    drifted: tuple[Drift, ...] = ()
    payloads: Mapping[str, int] = field(default_factory=dict)

    def dump(self) -> bytes:
        """Return the result as JSON."""
        part = self.part
        return strict_json.dump(
            {
                "part": None
                if part is None
                else {"path": part.path, "size_bytes": part.size_bytes, "sha256": part.sha256},
                "tensors": table.document(self.tensors),
                "drifted": [
                    {"name": d.name, "box": d.box, "first": d.first, "second": d.second}
                    for d in self.drifted
                ],
                "payloads": dict(self.payloads),
            }
        )

    @classmethod
    def load(cls, raw: bytes, where: str) -> Result:
        """Read what `dump` wrote.

        Raises:
            FormatError: it is not that.
        """
        fields = strict_json.Fields(
            strict_json.parse(raw, where, limit_bytes=_LIMIT_BYTES), where, _KEYS
        )
        part = None
        if fields["part"] is not None:
            row = strict_json.Fields(fields["part"], where, _PART_KEYS, "part")
            part = PartEntry(
                row.text("path"), row.integer("size_bytes"), row.hexadecimal("sha256", 64)
            )
        rows = (strict_json.Fields(row, where, _COPY_KEYS) for row in fields.items("drifted"))
        drifted = tuple(
            Drift(row.text("name"), row.integer("box"), row.integer("first"), row.integer("second"))
            for row in rows
        )
        told = strict_json.members(fields["payloads"], where)
        payloads = {
            name: strict_json.integer(size, f"{where}: payload of {name!r:.80}")
            for name, size in told.items()
        }
        return cls(part, table.entries_of(fields["tensors"], where), drifted, payloads)


WindowsOf = Callable[[TensorMeta], Iterator[Window]]


def full_order(metas: Iterable[TensorMeta]) -> list[TensorMeta]:
    """Return tensors in the order in which a part of a full version holds them."""
    return sorted(metas, key=lambda meta: (-meta.unit_bytes, meta.name))


def _proved(
    meta: TensorMeta, found: Iterator[Window], fingerprints: dict[str, Fingerprint]
) -> Iterator[Window]:
    """Pass windows on; afterwards the fingerprint of the whole tensor is in `fingerprints`."""
    seeds, total = kernels.seeds(meta.name), ZERO
    for window in found:
        total += kernels.fingerprint(window.new, window.start, seeds)
        yield window
    fingerprints[meta.name] = total


class PartWriter:
    """Writes what one rank owns into its part of a version.

    Args:
        entries: by name, the tensors that this rank owns as they are in the base; empty before there
            is one.
    """

    def __init__(
        self,
        catalog: Catalog,
        shares: Shares,
        rank: int,
        entries: Mapping[str, TensorEntry],
        shard: Shard,
        options: PublisherOptions,
    ) -> None:
        self._metas = [
            catalog[name].meta for name, owner in sorted(shares.owners.items()) if owner == rank
        ]
        self._copies = shares.copies
        self._index = shares.writers.index(rank)
        self._count = len(shares.writers)
        self._entries = entries
        self._shard = shard
        self._options = options

    @property
    def path(self) -> str:
        """File name of the part."""
        return names.part_name(self._index, self._count)

    def delta(self, told: Mapping[int, RankChanges], put: VersionWriter, phases: Phases) -> Result:
        """Merge what ranks found, encode and put it; nothing is put if copies have drifted.

        Args:
            told: by rank, the changes in tensors that this rank owns.

        Memory: O(changes in what the rank owns), and `memory_bytes` of payload.
        """
        drifted = tuple(self.drifts(told))
        if drifted:
            return Result(drifted=drifted)
        entries = []
        with Spool(self._options.memory_bytes) as spool:
            for meta in self._metas:
                with phases("encode"):
                    entries.append(self._delta(meta, told, spool))
            part = put.put(self.path, spool.chunks(None), "publish.part_written")
        return Result(part, tuple(entries))

    def full(self, windows_of: WindowsOf, put: VersionWriter, phases: Phases) -> Result:
        """Put whole tensors, window by window, and return what they are.

        Args:
            windows_of: yields a tensor's windows in order; called for each tensor once, in file order.

        Memory: one window; with `planes`, `memory_bytes` of payload beside it.
        """
        encoding, found = self._options.full_encoding, dict[str, Fingerprint]()
        metas = {meta.name: meta for meta in full_order(self._metas)}

        def payload(name: str) -> Iterator[Buffer]:
            proved = _proved(metas[name], windows_of(metas[name]), found)
            return codecs.get(encoding).encode(metas[name], proved)

        metadata = metadata_for("full", encoding, {})
        with Spool(self._options.memory_bytes) as spool:
            if encoding == "full":
                chunks = encode(list(metas.values()), payload, metadata)
            else:
                for name in metas:
                    with phases("encode"):
                        spool.add(name, payload(name))
                chunks = spool.chunks(metadata)
            part = put.put(self.path, chunks, "publish.part_written")
        entries = (
            TensorEntry(meta, found[meta.name], encoding, self._index, None) for meta in self._metas
        )
        return Result(part, tuple(entries))

    def _delta(
        self, meta: TensorMeta, told: Mapping[int, RankChanges], spool: Spool
    ) -> TensorEntry:
        moved, difference = merge(meta, told)
        before = self._entries[meta.name].fingerprint
        changed = moved.positions.size
        if not changed:
            return TensorEntry(meta, before, None, None, None)
        dense = self._shard.dense(meta.name)
        encoding = self._options.encoding
        if encoding == "auto":
            encoding = SPARSE_ENCODINGS[0] if dense is None else choice.smallest(meta)
        size_bytes = self._spooled(meta, encoding, moved, dense, spool)
        is_longer = dense is not None and size_bytes > dense_bytes(meta)
        if self._options.encoding == "auto" and is_longer:
            spool.drop(meta.name)
            encoding = "planes"
            self._spooled(meta, encoding, moved, dense, spool)
        return TensorEntry(meta, before + difference, encoding, self._index, changed)

    @staticmethod
    def _spooled(
        meta: TensorMeta, encoding: str, moved: Moved, dense: Bits | None, spool: Spool
    ) -> int:
        start_bytes = spool.size_bytes
        cut = windows(meta, moved, dense, WINDOW_UNITS)
        spool.add(meta.name, codecs.get(encoding).encode(meta, cut))
        return spool.size_bytes - start_bytes

    def drifts(self, told: Mapping[int, RankChanges]) -> Iterator[Drift]:
        """Yield copies of one box whose changes have not the same fingerprint."""
        found = {
            copy: change for changes in told.values() for copy, change in changes.copies.items()
        }
        for name, boxes in self._copies.items():
            for box, _, holders in boxes:
                first = found.get((name, box, 0), ZERO)
                for copy in range(1, len(holders)):
                    if found.get((name, box, copy), ZERO) != first:
                        yield Drift(name, box, 0, copy)


def drift_error(drift: Drift, ranks: Sequence[int], one: Moved, other: Moved) -> VerifyError:
    """Return the error that says where two copies differ.

    Args:
        ranks: who holds the two.
        one, other: what each has, at ascending places, beside what both had before.
    """
    common, at, there = np.intersect1d(
        one.positions, other.positions, assume_unique=True, return_indices=True
    )
    differs = common[one.new_bits[at] != other.new_bits[there]]
    places = np.sort(np.concatenate([differs, np.setxor1d(one.positions, other.positions)]))
    return VerifyError(
        f"{drift.name}: ranks {ranks[0]} and {ranks[1]} hold different copies; {places.size} elements "
        f"differ, first at canonical indices {places[:8].tolist()}; nothing was committed; bring the ranks "
        "to the same weights, then publish again",
        tensor=drift.name,
    )
