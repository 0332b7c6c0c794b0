"""Layouts that other projects write and read, found here by name or by what lies in a store.

Each module implements `syncline.abc.Interchange` for one layout. Nothing here needs pickle, and nothing
that a file says is believed before it is checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from syncline.abc import Interchange, Store
from syncline.errors import ConfigError, FormatError
from syncline.format import names
from syncline.interchange.fireworks import Fireworks
from syncline.interchange.grail import Grail
from syncline.interchange.skyrl import SkyRL
from syncline.interchange.slime import Slime
from syncline.interchange.trl import Trl

SYNCLINE = "syncline"
"""What `recognise` calls a run of our own, which is read through its manifests."""

LAYOUTS: Mapping[str, Interchange] = MappingProxyType(
    {layout.name: layout for layout in (Slime(), Trl(), Grail(), SkyRL(), Fireworks())}
)
"""Every foreign layout by name; all are stateless, so one instance serves all threads."""

NAMES = tuple(LAYOUTS)


def get(name: str) -> Interchange:
    """Return the foreign layout of this name.

    Raises:
        ConfigError: there is none.
    """
    if name not in LAYOUTS:
        raise ConfigError(f"layout must be one of {NAMES}, found {name!r}")
    return LAYOUTS[name]


def recognise(store: Store) -> str:
    """Return the name of the layout that a store is in; `SYNCLINE` for a run of our own.

    A run that Syncline wrote in a foreign layout has `HEAD.json` too, and is its own first of all.

    Raises:
        FormatError: the store is empty, in no layout that is known, or in more than one.
    """
    keys = [info.key for info in store.list()]
    if names.HEAD in keys:
        return SYNCLINE
    found = {
        name: key
        for name, layout in LAYOUTS.items()
        if (key := layout.evidence(store, keys)) is not None
    }
    if len(found) == 1:
        return next(iter(found))
    known = ", ".join((SYNCLINE, *NAMES))
    if found:
        seen = ", ".join(f"{name} by {key!r}" for name, key in found.items())
        raise FormatError(
            f"the store mixes layouts: expected one, found {seen}; keep each in a directory of its own, "
            "or name the one to follow"
        )
    seen = f"{len(keys)} objects such as {keys[0]!r}" if keys else "nothing"
    raise FormatError(f"expected versions in one of the layouts {known}; found {seen}")
