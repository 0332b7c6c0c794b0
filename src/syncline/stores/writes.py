"""Writes that must not meet another's: by the service's own conditions, or under a lease where it has none."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from obstore.exceptions import AlreadyExistsError, PreconditionError

from syncline.abc import Buffer
from syncline.errors import (
    ObjectExistsError,
    StoreError,
    TransportUnavailableError,
    VersionConflictError,
)
from syncline.format import digest
from syncline.stores.lease import Lease
from syncline.stores.obstore_errors import is_passing, moved_on, taken
from syncline.stores.service import Service
from syncline.stores.streams import PIECE_BYTES

HIDDEN = ".syncline-"
LEASE = HIDDEN + "lease"
_MET = (AlreadyExistsError, PreconditionError)


class Writes(Protocol):
    """How a store makes its three kinds of writes."""

    def create(self, key: str, content: Buffer) -> None:
        """Put an object where none is."""

    def swap(self, key: str, expected: bytes | None, new: bytes) -> None:
        """Replace `expected` by `new`."""

    def create_from(self, hidden: str, key: str, sha256: str) -> None:
        """Give a hidden object, whose digest is known, a key where none is."""

    def turn(self) -> AbstractContextManager[None]:
        """Return a context for writes that follow each other; see `Store.turn`."""


class Plain(Protocol):
    """What a service does without any condition, each call tried again where that may help."""

    def read(self, key: str) -> tuple[bytes, dict[str, str]] | None:
        """Return the object and what identifies its content; None if there is none."""

    def size_bytes(self, key: str) -> int:
        """Return the object's size."""

    def has(self, key: str) -> bool:
        """Tell whether there is such an object."""

    def write(self, key: str, content: Buffer) -> None:
        """Put an object whatever is there."""

    def copy(self, source: str, key: str) -> None:
        """Let the service copy an object whatever is there."""


class Conditional:
    """The service compares and writes in one step; no other writer comes between.

    Each put carries a mark of its own. Where the service says that a condition failed, the mark tells whether
    it was this very put that got there first and whose answer was lost on the way.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._swapped: dict[str, tuple[bytes, dict[str, str]]] = {}

    def create(self, key: str, content: Buffer) -> None:
        """Put an object where none is; see `Writes`."""
        mark = secrets.token_hex(8)

        def attempt() -> None:
            try:
                self._service.put_if(key, content, "create", mark)
            except _MET:
                if self._service.mark(key) != mark:
                    raise taken(f"put {key}") from None

        self._service.conditionally(f"put {key}", attempt)

    def swap(self, key: str, expected: bytes | None, new: bytes) -> None:
        """Replace `expected` by `new`; see `Writes`.

        A swap whose answer was lost, and which another one followed since, raises although it happened.
        """
        mark = secrets.token_hex(8)

        def attempt() -> None:
            known = self._swapped.pop(key, None)
            try:
                mode = "create" if expected is None else self._condition(key, expected, known)
                if mode is not None:
                    self._swapped[key] = new, self._service.put_if(key, new, mode, mark)
                    return
            except _MET:
                pass
            except FileNotFoundError:
                if expected is None:  # not the object is missing then, but the bucket
                    raise
            if self._service.mark(key) == mark:
                return
            if known is None:
                raise moved_on(f"swap {key}")
            attempt()  # it may have been written anew with the very content that is expected

        self._service.conditionally(f"swap {key}", attempt)

    def create_from(self, hidden: str, key: str, sha256: str) -> None:
        """Give a hidden object a key where none is; see `Writes`.

        A copy carries no mark: where its answer may have been lost, an object with the very same content
        counts as the copy.
        """

        def attempt() -> None:
            try:
                self._service.copy_if_free(hidden, key)
            except _MET:
                if not is_same(self._service, hidden, key, sha256):
                    raise taken(f"put {key}") from None

        self._service.conditionally(f"put {key}", attempt)

    def turn(self) -> AbstractContextManager[None]:
        """Nobody waits for anybody; see `Writes`."""
        return nullcontext()

    def _condition(
        self, key: str, expected: bytes, known: tuple[bytes, dict[str, str]] | None
    ) -> dict[str, str] | None:
        """Return the condition under which the object is still the expected one; None if it is not now.

        What this store is known to have written last is not read: if it is no longer there, the condition fails.
        """
        if known is not None and known[0] == expected and known[1]:
            return known[1]
        found = self._service.read(key)
        if found is None or found[0] != expected:
            return None
        if not found[1]:
            raise TransportUnavailableError(
                f"swap {key}: this service tells no entity tag, so a swap cannot be made safe; "
                "use one that does (S3, GCS, Azure), or open the store with writes='lease'"
            )
        return found[1]


class Leased:
    """One writer at a time holds a lease, looks, and writes.

    What that guarantees is less than a condition: see `Lease`.
    """

    def __init__(self, service: Plain, lease: Lease) -> None:
        self._service = service
        self._lease = lease

    def create(self, key: str, content: Buffer) -> None:
        """Put an object where none is; see `Writes`."""
        with self._lease.held() as check:
            self._check_free(key)
            check()
            self._service.write(key, content)

    def swap(self, key: str, expected: bytes | None, new: bytes) -> None:
        """Replace `expected` by `new`; see `Writes`."""
        with self._lease.held() as check:
            found = self._service.read(key)
            if (None if found is None else found[0]) != expected:
                raise moved_on(f"swap {key}")
            check()
            self._service.write(key, new)

    def create_from(self, hidden: str, key: str, sha256: str) -> None:
        """Give a hidden object a key where none is; see `Writes`."""
        with self._lease.held() as check:
            self._check_free(key)
            check()
            self._service.copy(hidden, key)

    def turn(self) -> AbstractContextManager[None]:
        """Keep the lease from one write to the next; see `Writes`."""
        return self._lease.kept()

    def _check_free(self, key: str) -> None:
        if self._service.has(key):
            raise taken(f"put {key}")


def lease_on(service: Plain, *, lasts_s: float = 30.0, settle_s: float = 1.0) -> Lease:
    """Return the lease that all writers of a store share; timing as for `Lease`."""

    def read() -> bytes | None:
        found = service.read(LEASE)
        return None if found is None else found[0]

    return Lease(
        read, lambda record: service.write(LEASE, record), lasts_s=lasts_s, settle_s=settle_s
    )


def honours_conditions(service: Service) -> bool:
    """Find out on hidden objects whether the service writes and copies under conditions, and refuses under them.

    A service that ignores a condition says nothing: it overwrites. Where a lease has been used before, the
    answer is no, so that all writers of a store go by the same rule. Cost: about ten small requests.
    """
    if service.has(LEASE):
        return False
    # Three times no: an answer that was lost on the way can make one look like it.
    return any(_probe(service) for _ in range(3))


def _probe(service: Service) -> bool:
    probe, copied = (f"{HIDDEN}probe-{secrets.token_hex(8)}" for _ in range(2))
    service.write(probe, b"first")
    try:
        found = service.read(probe)
        if found is None or not found[1]:
            return False

        def swap(content: bytes) -> None:
            service.put_if(probe, content, found[1], secrets.token_hex(8))

        return (
            _is_refused(service, lambda: service.put_if(probe, b"other", "create", "probe"))
            and _is_done(service, lambda: swap(b"second"))
            and _is_refused(service, lambda: swap(b"third"))
            and _is_done(service, lambda: service.copy_if_free(probe, copied))
            and _is_refused(service, lambda: service.copy_if_free(probe, copied))
        )
    finally:
        service.remove(probe)
        service.remove(copied)


def _is_done(service: Service, attempt: Callable[[], object]) -> bool:
    try:
        service.conditionally("probe", attempt)
    except (VersionConflictError, ObjectExistsError, TransportUnavailableError):
        return False
    except StoreError as error:
        if isinstance(error.__cause__, Exception) and is_passing(error.__cause__):
            raise
        return False
    return True


def _is_refused(service: Service, attempt: Callable[[], object]) -> bool:
    try:
        service.conditionally("probe", attempt)
    except (VersionConflictError, ObjectExistsError):
        return True
    except TransportUnavailableError:
        return False
    return False


def is_same(service: Service, hidden: str, key: str, sha256: str) -> bool:
    """Tell whether the object is the hidden one: its size, then its digest."""
    size_bytes = service.size_bytes(hidden)
    if service.size_bytes(key) != size_bytes:
        return False
    tally = digest.Tally(
        service.get(key, start, min(start + PIECE_BYTES, size_bytes))
        for start in range(0, size_bytes, PIECE_BYTES)
    )
    for _ in tally:
        pass
    return tally.entry(key).sha256 == sha256
