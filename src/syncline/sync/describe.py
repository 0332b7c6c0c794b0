"""What a version's parts hold, from their headers alone."""

from __future__ import annotations

from collections.abc import Mapping

from syncline.abc import Store
from syncline.format import names
from syncline.format import part as part_format
from syncline.version import Manifest

_FIRST_BYTES = 1 << 16


def payload_sizes(store: Store, manifest: Manifest) -> Mapping[str, int]:
    """Return the payload's bytes of every tensor that has one; fetches no payload.

    Raises:
        FormatError: a part does not hold what the manifest puts there.
    """
    sizes: dict[str, int] = {}
    for index, part in enumerate(manifest.parts):
        key = names.key(manifest.version, part.path)
        start = store.get(key, 0, _FIRST_BYTES)
        needed_bytes = part_format.header_bytes(start, part.size_bytes, part.path)
        if needed_bytes > len(start):
            start = store.get(key, 0, needed_bytes)
        header = part_format.read_header(start, part.size_bytes, part.path)
        part_format.check_slots(header, manifest, index)
        sizes |= {name: slot.stop - slot.start for name, slot in header.slots.items()}
    return sizes
