"""Processes that join together find each other through a directory: an all-gather of small files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from itertools import count
from os import PathLike
from pathlib import Path

from syncline import durable
from syncline.errors import ConfigError, TransportTimeoutError
from syncline.types import check_seconds

_POLL_S = 0.05
_OWN = 0o700


def meet_in_directory(
    directory: str | PathLike[str], name: str, names: Sequence[str], *, timeout_s: float
) -> Callable[[bytes], Sequence[bytes]]:
    """Return an exchange for `join` among processes of one user that see one directory.

    Args:
        directory: new for every join, and nothing else's; made if it is not there, for this user alone, since
            what is exchanged holds the transports' keys. Its files stay, for the caller to delete.
        name: this process's; names: everyone's, the same list everywhere.
        timeout_s: the longest wait for the others, each time.

    Raises (when called):
        TransportTimeoutError: somebody did not come; names them.
        ConfigError: the directory was used before.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     meet_in_directory(directory, "e0", ["e0"], timeout_s=1.0)(b"here")
        [b'here']
    """
    if name not in names or len(set(names)) != len(names) or any("/" in one for one in names):
        raise ConfigError(
            f"names: expected {name!r} and others, each once, without /; found {list(names)}"
        )
    check_seconds("timeout_s", timeout_s)
    rounds = count()

    def exchange(mine: bytes) -> Sequence[bytes]:
        place = Path(directory) / str(next(rounds))
        place.mkdir(_OWN, parents=True, exist_ok=True)
        if (place / name).exists():
            raise ConfigError(f"{directory} was used before; take a new one")
        durable.create(place / f".{name}", mine)
        os.replace(place / f".{name}", place / name)  # noqa: PTH105 - whole, or not there
        ends = time.monotonic() + timeout_s
        while missing := [one for one in names if not (place / one).exists()]:
            if time.monotonic() > ends:
                raise TransportTimeoutError(
                    f"{directory}: {', '.join(missing)} did not come in {timeout_s} s"
                )
            time.sleep(_POLL_S)
        return [(place / one).read_bytes() for one in names]

    return exchange
