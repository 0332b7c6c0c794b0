"""Which layout a store is in, as asked for or as found."""

from __future__ import annotations

from syncline import interchange
from syncline.abc import Interchange, Store
from syncline.sync.history import read_head

AUTO = "auto"
"""Take the layout that lies in the store."""

CHOICES = (AUTO, interchange.SYNCLINE, *interchange.NAMES)


def foreign_layout(store: Store, name: str = AUTO) -> Interchange | None:
    """Return the foreign layout that a store is in; None if it is a run of our own, or empty.

    Args:
        name: `auto`, `syncline`, or a foreign layout to take the store for.

    Raises:
        ConfigError: there is no layout of this name.
        FormatError: with `auto`: what lies there is in no layout that is known, or in several.
    """
    if name == AUTO:
        if read_head(store) is not None or not store.list():
            return None
        name = interchange.recognise(store)
    return None if name == interchange.SYNCLINE else interchange.get(name)
