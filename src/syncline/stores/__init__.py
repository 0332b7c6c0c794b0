"""Where versions lie: objects by key, create-only, with compare-and-swap on one small object.

A store never changes an object that is there, except through compare-and-swap, and never shows a part
of one. `open_store` chooses the kind by path or URL.
"""

from __future__ import annotations

from syncline.stores.filesystem import FilesystemStore
from syncline.stores.hooked import HookedStore
from syncline.stores.http import HttpStore
from syncline.stores.hub import HubStore
from syncline.stores.lagging import LaggingStore
from syncline.stores.memory import MemoryStore
from syncline.stores.object_store import ObjectStore
from syncline.stores.opening import open_store

__all__ = [
    "FilesystemStore",
    "HookedStore",
    "HttpStore",
    "HubStore",
    "LaggingStore",
    "MemoryStore",
    "ObjectStore",
    "open_store",
]
