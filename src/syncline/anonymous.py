"""Memory without a name: an open file that others map when they are handed it, and that goes with its last user.

So nothing is left behind, whoever is killed when.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from contextlib import suppress

from syncline.errors import TransportUnavailableError


def anonymous_file(nbytes: int) -> int:
    """Return an open file of zeros in memory, sealed at this size where the system can; the caller closes it.

    Raises:
        TransportUnavailableError: the system has no descriptor or memory left.
    """
    try:
        return _sealed_file(nbytes) if hasattr(os, "memfd_create") else _temporary_file(nbytes)
    except OSError as error:
        raise TransportUnavailableError(
            f"{nbytes} bytes of shared memory: {error.strerror}"
        ) from error


def is_sealed(fd: int) -> bool:
    """Tell whether nobody can shrink an open file, so that reading a map of it cannot fail."""
    if not hasattr(fcntl, "F_GET_SEALS"):
        return True
    with suppress(OSError):
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    return False


def _sealed_file(nbytes: int) -> int:
    fd = os.memfd_create("syncline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _temporary_file(nbytes: int) -> int:
    with tempfile.TemporaryFile() as file:
        os.ftruncate(file.fileno(), nbytes)
        return os.dup(file.fileno())
