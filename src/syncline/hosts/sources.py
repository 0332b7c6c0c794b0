"""The hosts of one version, seen together: who has which tensors, and plans made from that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

from syncline.errors import ConfigError, CoverageError, TransportError, TransportTimeoutError
from syncline.hosts.offer import Catalog, Offer, load_offer
from syncline.hosts.roads import Roads
from syncline.layouts import Block, Layout, LocalTensor, Placement, plain
from syncline.layouts.blocks import row_major
from syncline.peers.streams import Deadline
from syncline.plan import Piece, Plan, Transfer
from syncline.types import TensorMeta
from syncline.version import HeldVersion


@dataclass(frozen=True, slots=True)
class Source:
    """One host that has the version, or a share of it."""

    offer: Offer
    catalog: Catalog


@dataclass(frozen=True, slots=True)
class Sources:
    """All hosts of one version, by name, that could be read; and those that could not, with the reason."""

    held: HeldVersion
    hosts: tuple[Source, ...]
    lost: tuple[tuple[str, str], ...]

    def holders(self, name: str) -> tuple[int, ...]:
        """Return the numbers of the hosts that have a tensor."""
        return tuple(n for n, host in enumerate(self.hosts) if name in host.catalog.tensors)

    def layout(self) -> Layout:
        """Return what the hosts have as a layout, for `plan.make_plan`."""
        metas = [entry.meta for entry in self.held.manifest.tensors]
        copies = {meta.name: len(self.holders(meta.name)) for meta in metas}
        placements = tuple(
            Placement(
                number,
                tuple(LocalTensor(m.name, m.dtype, m.shape) for m in metas if m.name in has),
                tuple(_whole(m, copies[m.name]) for m in metas if m.name in has),
            )
            for number, has in enumerate(host.catalog.tensors for host in self.hosts)
        )
        return Layout({meta.name: plain(meta) for meta in metas}, placements)


def find_sources(offers: Sequence[bytes], roads: Roads, deadline: Deadline) -> Sources:
    """Read the catalogs of all hosts; those that are gone or have moved on are left out.

    Raises:
        ConfigError: no offer, or offers of different versions.
        TransportError: no host could be read; names each.
        CoverageError: together they do not have every tensor of the version.
    """
    parsed = sorted((load_offer(raw) for raw in offers), key=lambda offer: offer.host)
    versions = sorted({(offer.version, offer.sha256) for offer in parsed})
    if len(versions) != 1 or len({offer.host for offer in parsed}) != len(parsed):
        raise ConfigError(
            f"offers: expected one version on hosts of different names, found versions {versions} on "
            f"{[offer.host for offer in parsed]}"
        )
    hosts, lost, kinds = [], [], set()
    for offer in parsed:
        try:
            hosts.append(Source(offer, roads.catalog(offer, deadline.left_s())))
        except (TransportError, TimeoutError) as error:
            lost.append((offer.host, str(error)))
            kinds.add(type(error))
    if not hosts:
        listed = "; ".join(f"{name}: {reason}" for name, reason in lost)
        kind = kinds.pop() if len(kinds) == 1 else TransportError
        kind = kind if issubclass(kind, TransportError) else TransportTimeoutError
        raise kind(f"version {versions[0][0]}: none of its hosts can be read: {listed}")
    sources = Sources(hosts[0].catalog.held, tuple(hosts), tuple(lost))
    missing = [
        e.meta.name for e in sources.held.manifest.tensors if not sources.holders(e.meta.name)
    ]
    if missing:
        raise CoverageError(
            f"version {sources.held.version}: no host has {len(missing)} of its tensors, among them "
            f"{missing[0]!r}; hosts that could not be read: {[name for name, _ in lost]}"
        )
    return sources


def flat_plan(sources: Sources, receivers: int, limit_bytes: int) -> Plan:
    """Return the plan that gives every receiver all of a version, tensor after tensor in its order.

    Pieces are stretches of flat tensors, so that every dtype moves, packed ones included.
    """
    buckets: list[list[Transfer]] = [[]]
    room = limit_bytes
    for entry in sources.held.manifest.tensors:
        for piece in _stretches(entry.meta, sources.holders(entry.meta.name), limit_bytes):
            if piece.nbytes > room and buckets[-1]:
                buckets.append([])
                room = limit_bytes
            room -= piece.nbytes
            buckets[-1].append(Transfer(piece, piece.sources[:1] * receivers))
    kept = tuple(tuple(bucket) for bucket in buckets if bucket)
    plan = Plan(receivers, len(sources.hosts), 1, limit_bytes, kept, "")
    return replace(plan, digest=sha256(repr((sources.held.sha256, plan)).encode()).hexdigest())


def _stretches(meta: TensorMeta, holders: tuple[int, ...], limit_bytes: int) -> Iterator[Piece]:
    units = max(1, limit_bytes // meta.unit_bytes)
    grid = (meta.unit_count,)
    for start in range(0, max(1, meta.unit_count), units):
        count = min(units, meta.unit_count - start)
        yield Piece(meta.name, (start,), (count,), grid, count * meta.unit_bytes, holders, (0,))


def _whole(meta: TensorMeta, copies: int) -> Block:
    start = tuple(0 for _ in meta.shape)
    return Block(meta.name, start, meta.shape, meta.name, 0, row_major(meta.shape), copies)
