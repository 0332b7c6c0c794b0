"""What a listing tells: which objects lie together, and a cheap digest that shows when they were rewritten."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable

from syncline.abc import Store
from syncline.types import ObjectInfo

_HEAD_BYTES = 1 << 20
_STRIP_BYTES = 1 << 16


def digest(store: Store, objects: Iterable[ObjectInfo]) -> str:
    """Return a SHA-256 over names, sizes and the beginning, middle and end of some objects, in hex.

    The beginning holds indexes and safetensors headers, with the digests that they list; the strips tell
    versions without digests apart, since a training step changes bits all over a tensor. It proves no
    payload whole.

    Cost: at most 1.2 MB read of every object.
    """
    total = hashlib.sha256()
    for info in objects:
        total.update(f"{info.key}\0{info.size_bytes}\0".encode())
        total.update(store.get(info.key, 0, _HEAD_BYTES))
        for start in (info.size_bytes // 2, info.size_bytes - _STRIP_BYTES):
            if start > 0:
                total.update(store.get(info.key, start, start + _STRIP_BYTES))
    return total.hexdigest()


def by_directory(objects: Iterable[ObjectInfo]) -> dict[str, list[ObjectInfo]]:
    """Return the objects that lie in directories right below the store, by the directory's name."""
    found: dict[str, list[ObjectInfo]] = defaultdict(list)
    for info in objects:
        directory, _, name = info.key.partition("/")
        if name and "/" not in name:
            found[directory].append(info)
    return found
