"""obstore's errors as Syncline's: one line, no secrets, and whether trying again may help."""

from __future__ import annotations

import re

from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    GenericError,
    NotSupportedError,
    PreconditionError,
)

from syncline.errors import (
    ObjectExistsError,
    ObjectNotFoundError,
    StoreError,
    TransportError,
    TransportUnavailableError,
    VersionConflictError,
)

FROM_OBSTORE = (BaseError, FileNotFoundError, NotImplementedError)
"""What obstore's functions raise."""

_USER = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s@]*@", re.IGNORECASE)
_QUERY = re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s?#]*)\?[^\s]*", re.IGNORECASE)
_STATUS = re.compile(r"status code: (\d{3})")
_PASSING_STATUS = ("408", "409", "429")
_HINTS = (
    (
        "builder error",
        "an endpoint without TLS (http://) must be allowed, for S3 with AWS_ALLOW_HTTP=true",
    ),
    ("169.254.169.254", "no credentials are in the environment, for S3 AWS_ACCESS_KEY_ID"),
    ("404 Not Found", "does the bucket exist?"),
    ("403 Forbidden", "may these credentials do that?"),
    ("error sending request", "is the address right, and can it be reached from here?"),
)
"""What in obstore's message stands for which everyday mistake; the first that is found."""
_WIRE = re.compile(
    r"HTTP error|error sending request|response body|connection|timed out", re.IGNORECASE
)


def without_secrets(text: str) -> str:
    """Return the text with user, password and query of every URL in it left out.

    Example:
        >>> without_secrets("GET https://me:pw@host/a?sig=abc failed")
        'GET https://host/a failed'
    """
    return _QUERY.sub(r"\1", _USER.sub(r"\1", text))


def is_passing(error: Exception) -> bool:
    """Tell whether the same request may succeed later: a cut connection, a busy or failing service."""
    if type(error) is not GenericError:
        return False
    status = _STATUS.search(str(error))
    if status is None:
        text = str(error)
        return _WIRE.search(text) is not None and "builder error" not in text
    return status[1].startswith("5") or status[1] in _PASSING_STATUS


def mapped(doing: str, error: Exception) -> TransportError | VersionConflictError:
    """Return the error to raise instead of one of obstore's."""
    # obstore adds many lines for its own developers; the first one is the message.
    reason = without_secrets(str(error).partition("\n")[0])
    if isinstance(error, FileNotFoundError):
        return ObjectNotFoundError(f"{doing}: nothing was found there: {reason}")
    if isinstance(error, AlreadyExistsError):
        return taken(doing)
    if isinstance(error, PreconditionError):
        return moved_on(doing)
    if isinstance(error, NotImplementedError | NotSupportedError):
        return TransportUnavailableError(
            f"{doing}: this object store lacks a conditional operation that Syncline needs; "
            f"configure it, or use another store: {reason}"
        )
    hint = next((f"; {hint}" for sign, hint in _HINTS if sign in reason), "")
    return StoreError(f"{doing}: {reason}{hint}")


def taken(doing: str) -> ObjectExistsError:
    """Return the error of a put that met an object."""
    return ObjectExistsError(f"{doing}: the key is taken; nothing was changed")


def moved_on(doing: str) -> VersionConflictError:
    """Return the error of a swap that came too late."""
    return VersionConflictError(
        f"{doing}: the object is not what it was when it was read; another writer got there first; "
        "read it again"
    )
