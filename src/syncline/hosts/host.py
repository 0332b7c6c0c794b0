"""A host: has versions in memory that its local workers share and other machines read."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from syncline.abc import ByteArray, Engine, PeerMemory
from syncline.errors import BaseVersionError, ConfigError, VerifyError
from syncline.hosts.offer import Catalog, Offer, Stored, Way
from syncline.peers import SharedPeer
from syncline.peers.generation import HEADER_BYTES, Header
from syncline.peers.shared import machine
from syncline.sync.fingerprints import fingerprints
from syncline.types import Bits, TensorMeta, unsigned
from syncline.version import HeldVersion

_ALIGN = 64


@dataclass(frozen=True, slots=True, eq=False)
class Space:
    """Memory for one version at a time: its number, and the header that speaks for it, registered."""

    number: int
    header: Header
    data: ByteArray

    def region(self, what: str) -> str:
        """Return the name of a region of this space."""
        return f"{self.number}.{what}"


class VersionHost:
    """Has versions in memory and offers them.

    Args:
        name: what others call it in messages.
        memories: the transports to offer them over, one for each NIC; a `SharedPeer` among them serves the
            workers of this machine. The host closes them.
        pin: called with every new piece of memory, to page-lock it; see `syncline.hosts.pinning`.

    Memory of a version that was unregistered is kept for the next one that fits, so that nothing is pinned
    again. Who is still reading the old one finds out by its generation.

    Example:
        >>> from syncline import MemoryEngine, MemoryStore, Publisher, Receiver
        >>> store, engine = MemoryStore(), MemoryEngine()
        >>> _ = Publisher(store).publish({"w": np.arange(4, dtype=np.float32)})
        >>> _ = Receiver(store, engine).sync()
        >>> host = VersionHost("host-0", [SharedPeer()])
        >>> host.register(engine).version
        1
        >>> host.close()
    """

    def __init__(
        self,
        name: str,
        memories: Sequence[PeerMemory],
        *,
        pin: Callable[[ByteArray], None] | None = None,
    ) -> None:
        shared = [peer for peer in memories if isinstance(peer, SharedPeer)]
        if not memories or len(shared) > 1:
            raise ConfigError(
                "memories: expected transports such as TcpPeer(), one SharedPeer at most"
            )
        self.name = name
        self._memories = tuple(memories)
        self._shared = shared[0] if shared else None
        self._pin = pin
        self._free: list[Space] = []
        self._offers: dict[str, tuple[Space, Offer]] = {}
        self._listings: dict[str, ByteArray] = {}
        self._count = 0
        self._lock = threading.RLock()

    def allocate(self, nbytes: int) -> ByteArray:
        """Return zeros that all transports of this host can register; pinned if the host pins."""
        memory = self._plain(nbytes)
        if self._pin is not None:
            self._pin(memory)
        return memory

    def _plain(self, nbytes: int) -> ByteArray:
        return np.zeros(nbytes, np.uint8) if self._shared is None else self._shared.allocate(nbytes)

    def bits(self, meta: TensorMeta) -> Bits:
        """Allocate a tensor's bits where peers can read them: for `MemoryEngine(allocate=host.bits)`."""
        return self.allocate(meta.nbytes).view(unsigned(meta.unit_bytes))

    def register(
        self,
        engine: Engine,
        names: Collection[str] | None = None,
        files: Mapping[str, bytes] = MappingProxyType({}),
    ) -> Offer:
        """Copy the version that an engine holds, or a share of it, and offer the copy.

        Args:
            engine: a `MemoryEngine`, a `CheckpointDir` (whose files stay as they are) or any other.
            names: of the tensors that this host is to have; None: all.
            files: a checkpoint's further files, for engines that join with an empty directory.

        Raises:
            ConfigError: the version is registered already (and stays so), or a name is not in it.
            BaseVersionError: the engine does not know its version.
            VerifyError: a tensor is not the one that the manifest names; nothing is offered.

        Cost: one copy and one fingerprint of every bit.
        """
        held = require_held(engine)
        metas = _chosen(held, names)
        offsets, size = _laid_out(metas)
        with self._lock:
            self._refuse_twice(held)
            space = self._take(size)
            try:
                for meta in metas:
                    there = space.data[offsets[meta.name] :][: meta.nbytes]
                    there[:] = engine.view(meta.name).view(np.uint8)
                prove(held, metas, lambda meta: place_of(meta, space.data, offsets[meta.name]))
                region = space.region("data")
                stored = {m.name: Stored(m, region, offsets[m.name]) for m in metas}
                return self.announce(space, Catalog(held, stored, files))
            except BaseException:
                self._free.append(space)
                raise

    def offer(self, sha256: str) -> Offer:
        """Return the offer of a version again; raise `ConfigError` if it is not registered."""
        with self._lock:
            if sha256 not in self._offers:
                raise ConfigError(f"{self.name} has no version {sha256[:12]} registered")
            return self._offers[sha256][1]

    def unregister(self, sha256: str) -> None:
        """Offer a version no longer; who is reading it finds out. Its memory is kept for the next one."""
        self.offer(sha256)
        with self._lock:
            space = self.withdraw(sha256)
            self._free.append(space)

    def close(self) -> None:
        """Offer nothing any more and close the transports; harmless when called again."""
        with self._lock:
            for sha256 in list(self._offers):
                self.withdraw(sha256)
            for memory in self._memories:
                memory.close()

    def space(self, regions: Mapping[str, ByteArray]) -> Space:
        """Register memory that stays registered, with a header that says when it changes; for `LiveEngine`."""
        with self._lock:
            self._count += 1
            header = Header(self.allocate(HEADER_BYTES))
            header.begin()
            data = regions.get("data", header.memory)
            space = Space(self._count, header, data)
            for memory in self._memories:
                memory.register(space.region("header"), header.memory)
                for name, place in regions.items():
                    memory.register(space.region(name), place)
            return space

    def announce(self, space: Space, catalog: Catalog) -> Offer:
        """Say that a space holds a version from now on; for `LiveEngine`."""
        with self._lock:
            self._refuse_twice(catalog.held)
            raw = catalog.dump()
            listing = self._plain(len(raw))  # not pinned: every version has one of its own
            listing[:] = np.frombuffer(raw, np.uint8)
            for memory in self._memories:
                memory.register(space.region("catalog"), listing)
            space.header.settle()
            offer = Offer(
                host=self.name,
                machine=machine(),
                run_id=catalog.held.manifest.run_id,
                version=catalog.held.version,
                sha256=catalog.held.sha256,
                generation=space.header.generation,
                header=space.region("header"),
                catalog=space.region("catalog"),
                catalog_bytes=len(raw),
                catalog_sha256=hashlib.sha256(raw).hexdigest(),
                ways=tuple(Way(memory.name, memory.describe()) for memory in self._memories),
            )
            self._offers[offer.sha256] = space, offer
            self._listings[offer.sha256] = listing
            return offer

    def withdraw(self, sha256: str) -> Space:
        """Say that a version's memory is about to change; for `LiveEngine`. Return the memory."""
        with self._lock:
            space, _ = self._offers.pop(sha256)
            space.header.begin()
            for memory in self._memories:
                memory.unregister(space.region("catalog"))
            listing = self._listings.pop(sha256)
            if self._shared is not None:
                self._shared.free(listing)
            return space

    def _refuse_twice(self, held: HeldVersion) -> None:
        if held.sha256 in self._offers:
            raise ConfigError(
                f"version {held.version} is registered on {self.name} already, and stays so; unregister it first"
            )

    def _take(self, size: int) -> Space:
        """Return the smallest free space that is large enough, or a new one; its header says: changing."""
        fits = [space for space in self._free if space.data.size >= size]
        if not fits:
            return self.space({"data": self.allocate(size)})
        space = min(fits, key=lambda one: one.data.size)
        self._free.remove(space)
        return space


def require_held(engine: Engine) -> HeldVersion:
    """Return the version that an engine holds; raise `BaseVersionError` if it does not know."""
    held = engine.held()
    if held is None:
        raise BaseVersionError(
            "the engine does not know which version it holds; bring it to one with Receiver.sync()"
        )
    return held


def place_of(meta: TensorMeta, data: ByteArray, offset: int) -> Bits:
    """Return the bits of a tensor that lies in memory at an offset."""
    return data[offset : offset + meta.nbytes].view(unsigned(meta.unit_bytes))


def prove(
    held: HeldVersion, metas: Sequence[TensorMeta], bits_of: Callable[[TensorMeta], Bits]
) -> None:
    """Check that bits are those that a version's manifest names; raise `VerifyError` if not."""
    by_name = {meta.name: meta for meta in metas}
    for meta, found in fingerprints(metas, lambda name: bits_of(by_name[name])):
        expected = held.manifest.by_name[meta.name].fingerprint
        if found != expected:
            raise VerifyError(
                f"tensor {meta.name!r}: expected fingerprint {expected.hex()} in version {held.version}, found "
                f"{found.hex()}; nothing of it is offered or used",
                tensor=meta.name,
                version=held.version,
            )


def _chosen(held: HeldVersion, names: Collection[str] | None) -> list[TensorMeta]:
    metas = {entry.meta.name: entry.meta for entry in held.manifest.tensors}
    unknown = sorted(set(() if names is None else names) - metas.keys())
    if unknown:
        raise ConfigError(f"names: version {held.version} has no tensor {unknown[0]!r}")
    return [meta for name, meta in metas.items() if names is None or name in names]


def _laid_out(metas: Sequence[TensorMeta]) -> tuple[dict[str, int], int]:
    """Return where each tensor begins in one buffer, and the buffer's size."""
    offsets, size = {}, 0
    for meta in metas:
        offsets[meta.name] = size
        size += -(-meta.nbytes // _ALIGN) * _ALIGN
    return offsets, size
