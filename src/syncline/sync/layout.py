"""Which layout a store is in, as asked for or as found."""

from __future__ import annotations

from syncline import interchange
from syncline.abc import Interchange, Store
from syncline.errors import ConfigError, FormatError, TransportError, TransportUnavailableError
from syncline.format import head as head_format
from syncline.format import names
from syncline.format.rules import INTERCHANGE_ENCODINGS
from syncline.sync.history import History, read_head
from syncline.version import Manifest

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
        if read_head(store) is not None or not _keys(store):
            return None
        name = interchange.recognise(store)
    return None if name == interchange.SYNCLINE else interchange.get(name)


def _keys(store: Store) -> list[str]:
    """Return the store's keys; none where it cannot list, so that it can only hold a run of our own."""
    try:
        return [info.key for info in store.list()]
    except TransportUnavailableError:
        return []


def lacks(store: Store, name: str = AUTO) -> str | None:
    """Return what a store lacks to be pulled from, whether it can be read or not; None if it has a version."""
    try:
        layout = foreign_layout(store, name)
        if layout is not None:
            return None if layout.versions(store) else f"none in layout {layout.name}"
        raw = read_head(store)
        if raw is None:
            return f"no {names.HEAD}"
        return None if head_format.load(raw).version is not None else "a run without a version"
    except (TransportError, FormatError) as error:
        return str(error)


def own_history(store: Store) -> History:
    """Return the history of a run of our own.

    Raises:
        ConfigError: the store is in a foreign layout, whose versions have no numbers.
        StoreError: it is empty, or cannot be read.
    """
    if read_head(store) is None:
        layout = foreign_layout(store)
        if layout is not None:
            raise ConfigError(
                f"the store is in layout {layout.name!r} and has no HEAD.json, so its versions have no "
                "numbers that could be ordered; make a run of it with syncline convert SRC DST --to "
                "syncline, and use that"
            )
    return History.open(store)


def check_slime_run(store: Store) -> None:
    """Check that slime-family readers can take every version that a store has so far.

    Raises:
        ConfigError: one is coded otherwise; what follows it could not be followed.

    Cost: reads every manifest of the run once.
    """
    if read_head(store) is None:
        return
    for at in History.open(store).back():
        if not _is_slime(at.manifest):
            raise ConfigError(
                f"layout 'slime': version {at.version} of this run was published with encoding "
                f"{at.manifest.encoding!r}, which its readers cannot take; begin a run in another directory"
            )


def _is_slime(manifest: Manifest) -> bool:
    if manifest.kind == "delta":
        return manifest.encoding in INTERCHANGE_ENCODINGS
    return all(entry.encoding == "full" for entry in manifest.tensors)
