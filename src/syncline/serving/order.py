"""What a client asks a replica to load, checked against what the store says of it."""

from __future__ import annotations

from dataclasses import dataclass

from syncline.abc import Store
from syncline.errors import BaseVersionError, FormatError
from syncline.hotload.client import Reset
from syncline.hotload.identity import Spelling
from syncline.sync.layout import own_history
from syncline.version import HeldVersion


@dataclass(frozen=True, slots=True)
class Order:
    """A version to load.

    Attributes:
        version: its number; None for the store's current one.
        previous: number of the version that a delta is said to be made on; None for a full version.
        reset: whether the prompt cache is reset with it; None: the replica's own way, which is to reset.
        spelling: how the client spells identities.
    """

    version: int | None
    previous: int | None = None
    reset: Reset | None = None
    spelling: Spelling = "directory"


class UnknownVersionError(BaseVersionError):
    """The store's run has no such version: HTTP 404."""


class LineageError(BaseVersionError):
    """A delta is not made on what the client says, or cannot be reached: HTTP 409."""


def check(order: Order, store: Store, held: HeldVersion | None) -> None:
    """Check that the order can be followed from `held`: manifests are read, and nothing else.

    Raises:
        UnknownVersionError: the run has no such version.
        LineageError: the version is not a delta on `order.previous`, the replica follows another run, or
            no chain of versions leads to it.
        TransportError, VerifyError: the store could not be read, or is damaged.
    """
    history = own_history(store)
    if held is not None and held.manifest.run_id != history.head.run_id:
        raise LineageError(
            f"the replica follows run {held.manifest.run_id} at version {held.version}, the store is "
            f"now run {history.head.run_id}; start the replica with an empty directory",
            version=order.version,
        )
    try:
        target = history.target(order.version)
    except BaseVersionError as error:
        raise UnknownVersionError(str(error), version=error.version) from error
    base = target.manifest.base_version if target.manifest.kind == "delta" else None
    if order.previous is not None and order.previous != base:
        found = "a full version" if base is None else f"a delta on version {base}"
        raise LineageError(
            f"version {target.version} was announced as a delta on version {order.previous}, in the "
            f"store it is {found}; announce it so",
            version=target.version,
        )
    try:
        history.path(held, target)
    except FormatError as error:
        serves = "nothing yet" if held is None else f"version {held.version}"
        raise LineageError(
            f"the replica holds {serves}: {error}", version=target.version
        ) from error
