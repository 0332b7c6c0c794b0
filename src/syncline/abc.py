"""The seams: the interfaces that a user may implement, each with at most five methods.

Every live seam has a public in-memory implementation, and one contract suite in `tests/contracts/` that runs
over all implementations. Arguments are validated by the caller of a seam; what a seam promises is in
its docstrings. All of them are synchronous, and none is collective unless it says so.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from syncline.errors import ConfigError
from syncline.types import (
    Bits,
    Changes,
    DeviceBits,
    ObjectInfo,
    Probe,
    Read,
    Record,
    Scores,
    Span,
    Step,
    TensorMeta,
    Window,
)
from syncline.version import ForeignVersion, HeldVersion, Kind

_PIECE_BYTES = 8 << 20

Buffer = bytes | bytearray | memoryview
ByteArray = NDArray[np.uint8]
Observe = Callable[[Step], None]

Base = Callable[[str], tuple[TensorMeta, Bits]]
"""Looks a tensor of the base version up: its meta, and (meta.unit_count,) bits that are only read.

Raises `LayoutError` where the base has no tensor of that name.
"""


Send = Callable[[Sequence[tuple[int, Bits | DeviceBits]]], None]
"""Hands one bucket over: offsets in it, ascending, and what lies there, not to be written to until the round ends."""


def ignore(step: Step) -> None:
    """Observe nothing: what observers are where none is given."""


class WeightSource(ABC):
    """Where a publisher's weights come from; yields canonical tensors one by one.

    Attributes:
        is_stable: bits that were yielded stay as they are until the last tensor has been yielded, so that
            several tensors may be worked on at once. A source that fills one buffer again and again
            leaves this False.
    """

    is_stable: bool = False

    @abstractmethod
    def tensors(self) -> Iterator[tuple[TensorMeta, Bits]]:
        """Yield each tensor once: its meta and its bits, flat, `meta.unit_count` long.

        Aliasing: the bits may be a view of live memory; they stay unchanged until the next one is
        asked for, or longer, see `is_stable`. Names never repeat. Bits that lie in GPU memory may be
        yielded as they are there (`DeviceBits`).
        """

    def files(self) -> Mapping[str, bytes]:
        """Return the checkpoint's other files (config, tokenizer) by file name; none by default."""
        return {}


class Codec(ABC):
    """Bytes to bytes for one tensor: windows of changes in, payload out, and back.

    Class attributes:
        name: what the manifest calls it.
        needs_base: decoding reads the base's bits, so a wrong base gives wrong bits.
        is_idempotent: decoding against a base that already holds some of the changes gives the
            same result.
        is_full: the payload carries every unit, whatever the base was.
    """

    name: ClassVar[str]
    needs_base: ClassVar[bool]
    is_idempotent: ClassVar[bool]
    is_full: ClassVar[bool]

    @abstractmethod
    def encode(self, meta: TensorMeta, windows: Iterable[Window]) -> Iterator[Buffer]:
        """Yield the payload in pieces; `decode` of their concatenation gives the new bits.

        Args:
            windows: consecutive windows that tile the tensor; a full codec reads only `.new`.

        Raises:
            CodecError: this tensor cannot be expressed in this encoding.
        """

    @abstractmethod
    def decode(self, meta: TensorMeta, payload: Buffer, base: Bits) -> Iterator[Changes | Span]:
        """Yield what to overwrite, in ascending order, each place at most once.

        Every length, count and position is checked before anything is allocated or yielded, so no
        change lies outside the tensor. Memory: O(one window) beside the payload.

        Args:
            base: (meta.unit_count,) bits of the tensor at the base version; only read. Codecs with
                `needs_base` False never look at it.

        Raises:
            CodecError, FormatError: the payload is not one that `encode` makes; says the offset.
        """

    @abstractmethod
    def predict_bytes(self, meta: TensorMeta, changed: int) -> int:
        """Return about how many bytes `encode` makes of a tensor with `changed` changed units."""


class Store(ABC):
    """Objects by key, with compare-and-swap on small ones. Keys are relative POSIX paths.

    `str(store)` says where it is, for messages; it never shows a secret.

    Attributes:
        visible_within_s: how long after a write returned others may still not see it; 0: they do at once.
        is_remote: each call costs a round trip to a service, and several at once are answered together.
    """

    visible_within_s: float = 0.0
    is_remote: bool = False

    @property
    def puts_at_once(self) -> int:
        """How many puts at once pay; 1: they wait for each other, so that fewer and larger objects are better."""
        return 1

    def turn(self) -> AbstractContextManager[None]:
        """Return a context for writes that follow each other; nothing else about them changes.

        Where writers take turns a store may keep its own until the context ends: others wait meanwhile, so hold
        none while you wait for another writer. May be entered many times, from many threads.
        """
        return nullcontext()

    def __str__(self) -> str:
        return type(self).__name__

    @abstractmethod
    def put(self, key: str, chunks: Iterable[Buffer]) -> None:
        """Create the object from the chunks; it is durable and whole, or absent, when this returns.

        Raises:
            ObjectExistsError: the key is taken (nothing is changed).
            StoreError: the store failed; no reader ever sees a part of the object.
        """

    @abstractmethod
    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes `start:stop` of the object (all of it by default), clipped to its size.

        Raises:
            ObjectNotFoundError: no object has this key.
        """

    def pieces(self, key: str, size_bytes: int) -> Iterator[bytes]:
        """Yield the object's first `size_bytes` bytes in order, in pieces of a few MiB.

        Raises: as `get`, at the piece that failed; a shorter object ends early.
        Memory: a few pieces. A store that many requests at once serve faster overrides this.
        """
        for start in range(0, size_bytes, _PIECE_BYTES):
            yield self.get(key, start, min(start + _PIECE_BYTES, size_bytes))

    @abstractmethod
    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """Return the objects whose key begins with `prefix`, sorted by key."""

    @abstractmethod
    def compare_and_swap(self, key: str, expected: bytes | None, new: bytes) -> None:
        """Replace the object's content `expected` (None: no object) by `new`, atomically and durably.

        Raises:
            VersionConflictError: the content is something else; nothing was changed.
        """

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove the object; harmless if there is none."""


class Channel(ABC):
    """A live path between two sides, for messages of opaque bytes in order."""

    @abstractmethod
    def send(self, message: Buffer, *, timeout_s: float | None = None) -> None:
        """Hand one message over; the caller may reuse the memory when this returns.

        Args:
            timeout_s: the longest wait for a side that takes nothing; None: what the channel was made with.

        Raises:
            PeerLostError: the other side has closed.
            TransportTimeoutError: it took nothing for so long that it must be stuck; the channel is dead.
        """

    @abstractmethod
    def receive(self, timeout_s: float) -> bytes:
        """Return the next message.

        Raises:
            TransportTimeoutError: none came in `timeout_s` seconds.
            PeerLostError: the other side has closed and nothing is left.
        """

    @abstractmethod
    def close(self) -> None:
        """Tell the other side that nothing more comes; harmless when called again."""


class Outlet(ABC):
    """The trainer's end of a live path: buckets to all engines that joined, messages to and from each.

    In a round the same buckets go to all its members, in order. A bucket lies in one of two buffers, which is
    filled again only when every member has released it. Any error ends the round on all sides, and the next
    one begins from nothing.

    Class attributes:
        name: what reports call the transport.
        kinds: what may travel on it; a `delta` only where it saves something.
        bucket_bytes: how long buckets are where nobody says otherwise.
    """

    name: ClassVar[str]
    kinds: ClassVar[tuple[Kind, ...]]
    bucket_bytes: ClassVar[int]

    @property
    def address(self) -> str:
        """Where engines join; what `Inlet.lane` takes of an engine that joined another rank of this trainer.

        Raises:
            ConfigError: the transport has no such thing, so that one trainer rank alone can send on it.
        """
        raise ConfigError(
            f"{self.name}: expected a trainer of one rank; engines cannot find others"
        )

    @abstractmethod
    def members(self) -> Mapping[str, Channel]:
        """Return the channels to the engines that joined, by the engine's name; those that left are gone.

        Closing a channel makes its engine leave.
        """

    @abstractmethod
    def round(
        self, members: Sequence[str], sizes: Sequence[int], timeout_s: float
    ) -> AbstractContextManager[Send]:
        """Begin a round with exactly these members, who call `Inlet.buckets`; the context yields `Send`.

        The context ends when the trainer's part is done and what was sent may be written to again; whether a
        member has all, it says itself. With an error it ends at once, and the round is over for the members, too.

        Args:
            sizes: bytes of every bucket that will come, each at least 1.
            timeout_s: how long a member may take to come, and to release a bucket.

        Raises:
            PeerLostError, TransportTimeoutError: a member is gone, or late; names it where the transport can
                tell.
        """

    @abstractmethod
    def reset(self) -> None:
        """Let the next round begin from nothing; harmless when called again.

        For when a member did not take what came: it may have left a round that was over here.
        """

    @abstractmethod
    def close(self) -> None:
        """Give all memory, ports and files back, and let every member go; harmless when called again."""


class Inlet(ABC):
    """An engine's end of a live path; see `Outlet`.

    Attributes:
        name: what reports call the transport; the outlet's.
        timeout_s: how long the engine waits for the next version, and for each step of its delivery.
    """

    name: ClassVar[str]
    timeout_s: float

    @abstractmethod
    def channel(self) -> Channel:
        """Return the channel to the trainer; join (again) if there is none.

        Raises:
            TransportTimeoutError: no trainer was there in `timeout_s`.
            TransportUnavailableError: a package that the transport needs is missing here.
            ConfigError: the trainer refused this engine; says why.
        """

    @abstractmethod
    def buckets(self, sizes: Sequence[int]) -> Generator[Bits | DeviceBits, None, None]:
        """Take part in a round; return what yields each bucket, (its size,) uint8, read-only, until the next.

        The round is open when this returns. Closing the generator before its end, or an error in it, ends the
        round for everybody.

        Args:
            sizes: those that the trainer begins the round with.

        Raises:
            PeerLostError, TransportTimeoutError: the trainer is gone, late, or has ended the round; or this
                inlet was closed by another thread.
        """

    def lane(self, address: str) -> Inlet:
        """Return the inlet by which this engine joins another rank of the same trainer; always the same one.

        It has this one's settings, and is closed with it.

        Args:
            address: the `Outlet.address` of that rank.

        Raises:
            ConfigError: the transport cannot.
        """
        raise ConfigError(
            f"{self.name}: this trainer sends from several ranks, also from {address}, which the inlet cannot join"
        )

    @abstractmethod
    def close(self) -> None:
        """Leave: give memory and connections back; harmless when called again."""


class PeerMemory(ABC):
    """Memory that other processes may read without asking this one's program, and reads of theirs.

    Class attributes:
        name: what offers, settings and messages call it.

    A read says nothing of what the peer's program does with its memory at that moment: what was read is
    to be checked (`syncline.peers.generation`, and fingerprints). What `describe` returns is to be handed
    to readers over a way that is trusted: who has it can read what is registered.
    """

    name: ClassVar[str]

    @abstractmethod
    def register(self, region: str, memory: ByteArray) -> None:
        """Make memory readable by peers, and a place for reads of this side, under a name.

        Args:
            memory: (n,) uint8, contiguous, writable; kept alive until `unregister` or `close`, never copied.

        Raises:
            ConfigError: the name is taken (what is registered under it stays so), or the memory is not such.
            TransportError: the transport refused it.
        """

    @abstractmethod
    def unregister(self, region: str) -> None:
        """Take a region back; a later read of it fails, where the transport can tell. Harmless if there is none.

        A read by a peer that is under way, or over a transport that cannot tell, sees what the memory holds next.
        """

    @abstractmethod
    def describe(self) -> bytes:
        """Return what a peer needs to read the regions that are registered now."""

    @abstractmethod
    def read(self, peer: bytes, reads: Sequence[Read], timeout_s: float) -> None:
        """Fill places in regions of this side from regions of a peer; when this returns all are filled.

        Reads of one call are in no order; a call begins after the one before it has ended. After an error the
        places hold anything, and nothing writes to them any more (`TransportTimeoutError`: see the
        implementation).

        Args:
            peer: what the peer's `describe` returned.
            reads: any number; no more than 1,024 are under way at a time.

        Raises:
            ConfigError: a region of this side is unknown or too small; nothing was read.
            FormatError: `peer` is no description of this transport.
            MovedOnError: the peer has no such region any more, or a read reaches beyond it.
            PeerLostError: the peer is gone; says where it was.
            TransportTimeoutError: it did not answer in `timeout_s` seconds.
        """

    @abstractmethod
    def close(self) -> None:
        """Take all regions back and end what serves them; harmless when called again."""


class Engine(ABC):
    """Something that serves weights and can take a new version, all of it or none of it."""

    @abstractmethod
    def tensors(self) -> Mapping[str, TensorMeta]:
        """Return the canonical tensors that the engine holds by name; empty if it holds none yet.

        Where several names share one memory (tied weights) the mapping lists one of them and finds them
        all: ask it with `in` and `[]` for a version's names, and iterate for what a version must have.
        """

    @abstractmethod
    def held(self) -> HeldVersion | None:
        """Return the committed version that the engine holds, or None if it does not know.

        A crash in the middle of `apply` is repaired here or before: the answer is always whole.
        """

    @abstractmethod
    def view(self, name: str) -> Bits:
        """Return the bits that the engine holds for this tensor, flat, read-only.

        Aliasing: usually a view of the live weights; valid until the next `apply` or `create`.
        """

    def resident(self, name: str) -> Bits | DeviceBits:
        """Return the same bits where they lie, to be fingerprinted there; `view`, unless overridden."""
        return self.view(name)

    @abstractmethod
    def apply(self, records: Iterable[Record], held: HeldVersion) -> None:
        """Overwrite what the records list, check that it stands there, and hold `held` from now on.

        The records are drained into a journal before the first bit is written: an error out of the
        caller's iterator, which decodes and verifies as it goes, leaves everything as it was.

        Raises:
            TornUpdateError: the update failed and undoing it failed too.
            SynclineError: the update failed; every bit is as it was before.
        Memory: O(changes), or on disk where the engine keeps its journal there.
        """

    @abstractmethod
    def create(
        self,
        held: HeldVersion,
        spans: Iterable[tuple[TensorMeta, Iterable[Span]]],
        files: Mapping[str, bytes],
    ) -> None:
        """Fill an engine that holds nothing yet with a whole version, and hold it from now on.

        Each tensor comes once, its spans tile it in ascending order. The caller's iterator verifies as
        it goes: an error out of it leaves the engine as empty as it was.

        Raises:
            LayoutError: the engine cannot take tensors that it does not already have.
        """


class Interchange(ABC):
    """One layout of versions at rest that other projects write and read.

    Class attributes:
        name: what reports, the command line and `ForeignVersion.layout` call it.
        writes: `write` works; False where no released receiver of the layout exists.
        is_concurrent: what `read` yields of several tensors may be drained at the same time, each on a
            thread of its own.
    """

    name: ClassVar[str]
    writes: ClassVar[bool]
    is_concurrent: ClassVar[bool] = False

    @abstractmethod
    def evidence(self, store: Store, keys: Sequence[str]) -> str | None:
        """Return a key that no other layout would have so, or None if the store is not in this layout.

        Args:
            keys: all of the store's keys, sorted. Names decide where they can; else the smallest read.
        """

    @abstractmethod
    def versions(self, store: Store, seen: Sequence[ForeignVersion] = ()) -> list[ForeignVersion]:
        """Return the versions that are whole, each after its base where the layout says the base.

        Reads indexes and headers, never whole payloads.

        Args:
            seen: what an earlier call returned. A version whose objects are still listed with the same
                sizes may be taken from there, so that following a long run stays cheap.

        Raises:
            FormatError: a version breaks a rule of the layout; names the file and the field.
        """

    @abstractmethod
    def read(
        self, store: Store, version: ForeignVersion, base: Base | None
    ) -> Iterator[tuple[TensorMeta, Iterator[Changes | Span]]]:
        """Yield every tensor that the version carries, and what to overwrite in it, in ascending order.

        Every length, count, position, name and digest is checked: no change lies outside its tensor, and
        an iterator that comes to its end has proved the tensor's digest, if there is one. So nothing may
        be used before the last one has. Each iterator must be drained before the next tensor is asked for,
        unless the layout `is_concurrent`.

        Args:
            base: looks the bits at the base version up; None for a full version, whose tensors come as
                spans that tile them.

        Raises:
            FormatError, CodecError: the version breaks a rule of the layout; names file and field.
            VerifyError: a digest is not that of the new bits.
            LayoutError: a tensor is not in the base, or is another one there.
        """

    def write(
        self,
        store: Store,
        version: ForeignVersion,
        tensors: Iterable[tuple[TensorMeta, Iterable[Window]]],
        files: Mapping[str, bytes] = MappingProxyType({}),
    ) -> ForeignVersion:
        """Write one version so that the layout's own readers take it; return what was written.

        Objects go in such an order that no reader takes an unfinished version for a whole one.

        Args:
            version: says `identity`, `base`, `kind`, `encoding` and `checksum`; nothing else is read.
            tensors: for a delta every tensor with all its windows, changed or not; for a full version
                windows of which only `.new` counts. Each is drained before the next is asked for.
            files: a full version's further files (config, tokenizer) by name.

        Raises:
            ConfigError: the layout has no such encoding or checksum, or `writes` is False.
            CodecError: a tensor cannot be expressed in it.
        """
        raise ConfigError(
            f"layout {self.name}: expected one that Syncline writes; no released receiver reads this one"
        )

    def files(self, store: Store, version: ForeignVersion) -> Mapping[str, bytes]:
        """Return a full version's further files (config, tokenizer) by name; none by default."""
        return {}


class Scorer(ABC):
    """Says how probable a model finds given texts: the trainer's model, or the one that an engine serves.

    Attributes:
        name: what it is, in a few words, for reports.
    """

    name: str

    @abstractmethod
    def score(self, probes: Sequence[Probe], top: int) -> list[Scores]:
        """Return the scores of every probe, in order, by the weights that the model holds now.

        The scores are of these very tokens: a scorer that is told of other ones, of fewer, or of
        none for a place raises. What the model itself computed wrong (NaN) is returned as it is.

        Args:
            top: how many of the most probable tokens to return at each place, from 0.

        Raises:
            FormatError: the answer does not have the tokens that were asked for.
            ConfigError: a probe is longer than the model takes, or has a token that it does not have.
            TransportError: the engine cannot be reached, refused, or did not answer in time.
        """
