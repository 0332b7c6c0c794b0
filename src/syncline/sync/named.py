"""Servers of other projects name the version that their answers are made by."""

from __future__ import annotations

from typing import Protocol

from syncline.errors import SynclineError
from syncline.version import HeldVersion

_TIMEOUT_S = 10.0


class Named(Protocol):
    """A server that can be asked for the name of its weights."""

    def label(self, timeout_s: float) -> str:
        """Return the name; raises a `SynclineError` if the server does not answer."""


def is_named(server: Named, held: HeldVersion | None) -> bool:
    """Tell whether a server answers, and names the version that it was brought to."""
    if held is None:
        return False
    try:
        return server.label(_TIMEOUT_S) == str(held.version)
    except SynclineError:
        return False
