"""Every error that Syncline raises, in one tree.

    SynclineError
    ├─ ConfigError (ValueError)            the caller's fault, found before any I/O
    ├─ LayoutError (ValueError)            a name, dtype or shape does not fit
    ├─ PlanError                           shards cannot be moved as asked
    │  ├─ CoverageError                    a gap, an overlap, an unknown or unused name; lists the boxes
    │  └─ PlanDisagreementError            two sides computed different plans
    ├─ FormatError (ValueError)            bytes are not a legal manifest, part or payload
    ├─ CodecError (ValueError)             legal bytes that cannot be encoded or decoded
    ├─ TransportError                      bytes could not be moved
    │  ├─ TransportUnavailableError        a package, device or permission is missing
    │  ├─ TransportTimeoutError (TimeoutError)
    │  ├─ PeerLostError (ConnectionError)
    │  ├─ MovedOnError                     a peer's memory holds another version by now
    │  ├─ EndpointError                    an HTTP endpoint refused a request, or cannot serve it
    │  └─ StoreError (OSError)             a store refused or failed
    │     ├─ ObjectNotFoundError           no object has this key
    │     └─ ObjectExistsError             a create-only put met an object
    ├─ VerifyError                         a digest or fingerprint is not what it should be
    └─ CommitError
       ├─ BaseVersionError                 the base is not the one that the version was made from
       ├─ VersionConflictError             another publisher got there first
       ├─ OutcomeUnknownError              it is not known whether a version was committed
       ├─ ForeignDirectoryError            a directory is not Syncline's, so it is left alone
       └─ TornUpdateError                  the engine holds a mix; only a full version repairs it

After any of them except `TornUpdateError` the engine still serves the last committed version.
A message says what was expected, what was found, where, and what to do.
"""

from __future__ import annotations


class SynclineError(Exception):
    """Root of the tree: catch this to catch everything that Syncline raises on purpose.

    Args:
        message: what was expected, what was found, where, and what to do.
        tensor: canonical name of the tensor concerned, if one is.
        version: number of the version concerned, if one is.
    """

    def __init__(
        self, message: str, *, tensor: str | None = None, version: int | None = None
    ) -> None:
        super().__init__(message)
        self.tensor = tensor
        self.version = version


class ConfigError(SynclineError, ValueError):
    """An argument or setting is wrong; nothing was read or written."""


class LayoutError(SynclineError, ValueError):
    """A tensor's name, dtype or shape is not the one that the base declares."""


class PlanError(SynclineError):
    """A plan for moving shards cannot be made or followed; no byte has moved."""


class CoverageError(PlanError):
    """Blocks do not tile what they should: a gap, an overlap, or an unknown or unused name."""


class PlanDisagreementError(PlanError):
    """Two sides computed different plans; the message carries both digests."""


class FormatError(SynclineError, ValueError):
    """Bytes at rest are not a legal manifest, index, part, journal or payload header."""


class CodecError(SynclineError, ValueError):
    """A payload is well formed but cannot be decoded against this base, or not be encoded."""


class TransportError(SynclineError):
    """Bytes could not be moved from one side to the other."""


class TransportUnavailableError(TransportError):
    """A package, a device or a permission that the transport needs is missing."""


class TransportTimeoutError(TransportError, TimeoutError):
    """The other side did not answer before the deadline."""


class PeerLostError(TransportError, ConnectionError):
    """The other side went away."""


class MovedOnError(TransportError):
    """A peer's memory does not hold what it offered any more; nothing that was read is used."""


class EndpointError(TransportError):
    """An HTTP endpoint refused a request, or could not serve it before the deadline.

    Attributes:
        status: the HTTP status that it answered.
    """

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class StoreError(TransportError, OSError):
    """A store refused or failed an operation."""

    # OSError.__str__ would drop a lone message on some paths; keep the message as it was given.
    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class ObjectNotFoundError(StoreError):
    """No object has this key."""


class ObjectExistsError(StoreError):
    """A create-only put met an object that is already there; nothing was changed."""


class VerifyError(SynclineError):
    """A digest or fingerprint is not the one that the manifest names."""


class CommitError(SynclineError):
    """A version could not be made current."""


class BaseVersionError(CommitError):
    """A delta's base is not what the engine, or the publisher, holds."""


class VersionConflictError(CommitError):
    """The store moved on since it was read: another publisher committed or took over."""


class OutcomeUnknownError(CommitError):
    """Whether a version was committed is not known; a new publisher, or the follower's next look, finds out.

    A store is never torn by it; a live engine may be, and then stays paused.
    """


class ForeignDirectoryError(CommitError):
    """A directory or store was not made by Syncline, so nothing in it is touched."""


class TornUpdateError(CommitError):
    """An update failed and could not be undone: the engine holds a mix of two versions."""
