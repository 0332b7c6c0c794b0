"""The seams: five interfaces that a user may implement, each with at most five methods.

Every seam has a public in-memory implementation and one contract suite in `tests/contracts/` that runs
over all implementations. Arguments are validated by the caller of a seam; what a seam promises is in
its docstrings. All of them are synchronous, and none is collective unless it says so.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import ClassVar

from syncline.types import (
    Bits,
    Changes,
    ObjectInfo,
    Record,
    Span,
    Step,
    TensorMeta,
    Window,
)
from syncline.version import HeldVersion

Buffer = bytes | bytearray | memoryview
Observe = Callable[[Step], None]


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
        asked for, or longer, see `is_stable`. Names never repeat.
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
    """Objects by key, with compare-and-swap on small ones. Keys are relative POSIX paths."""

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
    def send(self, message: Buffer) -> None:
        """Hand one message over; the caller may reuse the memory when this returns.

        Raises:
            PeerLostError: the other side has closed.
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
