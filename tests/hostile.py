"""Ways to damage bytes: edits that know nothing of them, lengths that lie, and JSON with one thing wrong."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from syncline.codecs.payload import varint

VALUES: list[Any] = [
    *(None, True, False, "", "\x00", "../x", "\ud800", "9" * 40, 0, -1, 1.5, 1e308),
    *(2**31, 2**32, 2**53, 2**63, 2**64, 10**40, [], {}, [[]], [1] * 70, {"format": {}}),
]
NUMBERS = [
    0,
    1,
    0x7F,
    0x80,
    0xFFFF,
    1 << 24,
    (1 << 24) + 1,
    1 << 31,
    1 << 32,
    1 << 63,
    (1 << 64) - 1,
]


def edited(data: bytes, rng: np.random.Generator) -> bytes:
    """Return the bytes after one to three edits: cut, flipped, overwritten, moved, with other lengths."""
    out = bytearray(data)
    for _ in range(rng.integers(1, 4)):
        at = int(rng.integers(0, len(out) + 1))
        size = int(rng.integers(1, 9))
        match rng.integers(0, 8):
            case 0:
                del out[at:]
            case 1 if at < len(out):
                out[at] ^= 1 << rng.integers(0, 8)
            case 2:
                out[at : at + size] = rng.bytes(size)
            case 3:
                out[at:at] = rng.bytes(size)
            case 4:
                del out[at : at + size]
            case 5:
                out[at:at] = out[at : at + 8 * size]
            case 6:
                out[at : at + 1] = varint(NUMBERS[rng.integers(len(NUMBERS))])
            case _:
                out[at : at + size] = NUMBERS[rng.integers(len(NUMBERS))].to_bytes(8, "little")[
                    :size
                ]
    return bytes(out)


def edited_json(data: bytes, rng: np.random.Generator) -> bytes:
    """Return a JSON document with one value replaced, one member removed, added or repeated."""
    document = json.loads(data)
    places = list(_places(document))
    holder, key = places[rng.integers(len(places))]
    match rng.integers(0, 4):
        case 0 if isinstance(holder, dict):
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder["unknown"] = holder[key]
        case 2 if isinstance(holder, list):
            holder.append(holder[key])
        case _:
            holder[key] = VALUES[rng.integers(len(VALUES))]
    return json.dumps(document, separators=(",", ":")).encode("utf-8", "surrogatepass")


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the holder and the key of everything inside a document."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield value, key
        if isinstance(inner, dict | list):
            yield from _places(inner)


def refusals(
    read: Callable[[bytes], object],
    inputs: Iterable[bytes],
    allowed: tuple[type[Exception], ...],
    limit_bytes: int,
) -> list[str]:
    """Return the message of every refusal; any error that is not allowed comes through.

    Fails if a reader holds more than `limit_bytes` at any time; numpy's and zstandard's results count.
    """
    said = []
    tracemalloc.start()
    try:
        for data in inputs:
            tracemalloc.reset_peak()
            before_bytes = tracemalloc.get_traced_memory()[0]
            try:
                read(data)
            except allowed as error:
                said.append(str(error))
            taken_bytes = tracemalloc.get_traced_memory()[1] - before_bytes
            assert taken_bytes <= limit_bytes, f"{taken_bytes} bytes taken for {data[:200]!r}"
    finally:
        tracemalloc.stop()
    return said
