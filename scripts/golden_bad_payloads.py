"""Bad payloads: cut short, lying about lengths, out of order, out of range, or bombs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import zstandard
from golden_payloads import windows_of

from syncline import codecs
from syncline.codecs import streams
from syncline.codecs.payload import varint
from syncline.format import strict_json, zstd
from syncline.types import TensorMeta

Write = Callable[[str, str, bytes, str], object]


def write_payloads(write: Write) -> None:
    """Write bad payloads of a BF16 tensor of 100 elements whose base is 0, 1, 2 and so on."""
    meta = TensorMeta("w", "BF16", (100,))
    base = np.arange(100, dtype=np.uint16)

    def add(name: str, payload: bytes, says: str) -> None:
        encoding = name.split("-", maxsplit=1)[0]
        document = {"dtype": meta.dtype, "shape": [100], "encoding": encoding}
        document["payload"] = payload.hex()
        write("payload", f"{name}.json", strict_json.dump(document), says)

    new = base + np.where(base % 9, 0, 1).astype(np.uint16)
    for encoding in codecs.NAMES:
        good = b"".join(codecs.get(encoding).encode(meta, windows_of(meta, base, new, 64)))
        add(f"{encoding}-cut-short", good[:-1], "")
        add(f"{encoding}-too-long", good + b"\0", "")
        add(f"{encoding}-empty", b"", "")
    _frames(add)
    _planes_and_packed(add)


def _frames(add: Callable[[str, bytes, str], None]) -> None:
    def overwrite(count: int, places: list[int], values: bytes) -> bytes:
        return zstd.compress(np.array([count, *places], "<u4").tobytes() + values)

    unsized = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(bytes(200))
    add(
        "xor-other-size",
        zstd.compress(bytes(202)),
        "200 bytes must be in the zstd frame, it says 202",
    )
    add("xor-no-content-size", unsized, "must say its content size")
    add("xor-two-frames", zstd.compress(bytes(100)) * 2, "the zstd frame ends at offset")
    add("xor-bomb", zstd.compress(bytes(1 << 24)), "200 bytes must be in the zstd frame")
    add("overwrite-descending", overwrite(2, [5, 4], b"ab"), "which is not above the one before it")
    add("overwrite-repeated", overwrite(2, [5, 5], b"ab"), "which is not above the one before it")
    add("overwrite-out-of-range", overwrite(2, [5, 200], b"ab"), "which is not below")
    add("overwrite-count-too-small", overwrite(1, [5, 6], b"ab"), "count must be 2, found 1")
    add("overwrite-count-too-large", overwrite(9, [5, 6], b"ab"), "count must be 2, found 9")
    add("overwrite-half-a-change", overwrite(2, [5, 6], b"a"), "5 for each of")
    add(
        "overwrite-too-many", overwrite(201, [*range(201)], bytes(201)), "at most 200 changed bytes"
    )
    add("overwrite-bomb", zstd.compress(bytes(4 + 5 * (1 << 20))), "at most 200 changed bytes")


def _planes_and_packed(add: Callable[[str, bytes, str], None]) -> None:
    def window(head: list[int], *contents: bytes) -> bytes:
        found = [np.frombuffer(content, np.uint8) for content in contents]
        return b"\x01\x02\x64\x64" + bytes(head) + streams.pack(found)

    raw = bytes(range(100))
    bomb = zstd.compress(bytes(1 << 24))
    entry = varint(len(bomb) << 2 | streams.ZSTD)
    add("planes-flag", b"\2\2\x64\x64" + streams.pack([]), "flag must be one of (0, 1)")
    add("planes-unit-bytes", b"\1\4\x64\x64", "unit bytes must be one of (2,)")
    add("planes-unit-count", b"\1\2\x64\x63", "unit count must be a number from 100 to 100")
    add("planes-window-0", b"\1\2\0\x64", "window units must be a number from 1")
    add(
        "planes-window-huge",
        b"\1\2\x81\x80\x80\x08\x64",
        "window units must be a number from 1 to 16777216",
    )
    add("planes-long-varint", b"\1\2\xe4\0\x64", "in its shortest form")
    add("planes-short-plane", window([], raw, raw[:99]), "must be 100 to 100 bytes long, found 99")
    add("planes-coding-3", b"\1\2\x64\x64\x07\x07ab", "must be coded 0 (raw)")
    add(
        "planes-bomb",
        b"\1\2\x64\x64" + entry * 2 + bomb * 2,
        "at most 100 bytes may be in the zstd frame",
    )
    add("packed-flag", b"\2\2\x64\x64\0", "flag must be one of (0, 1)")
    add("packed-count", window([101, 0, 1, 0], raw), "change count must be a number from 0 to 100")
    add("packed-low-bytes", window([2, 3, 4, 0], b"\5\6", b"\1"), "low bytes must be one of")
    add("packed-symbol-bits", window([2, 0, 5, 0], b"\5\6", b"\1"), "symbol bits must be one of")
    add("packed-out-of-range", window([2, 0, 4, 0], b"\5\x5e", b"\1"), "which is not below")
    add("packed-open-gap", window([2, 0, 4, 0], b"\5\xff", b"\1"), "end inside a gap")
    add("packed-too-many-gaps", window([2, 0, 4, 0], b"\5\6\7", b"\1"), "must be 2 to 2 bytes long")
    add("packed-escapes", window([2, 0, 4, 0], b"\5\6", b"\xf1"), "0 of 2 symbols must be 15")
    add(
        "packed-escaped-too-many",
        window([2, 0, 4, 3], b"\5\6", b"\xff"),
        "escaped count must be a number",
    )
    add("packed-left-over-bits", window([1, 0, 4, 0], b"\5", b"\x11"), "bits after the last 0")
    excess = window([2, 0, 4, 1], b"\5\6", b"\xf1", b"\xf0", b"\xff")
    add("packed-excess", excess, "an excess must be at most 65519, found 65520")
    head = b"\1\2\x64\x64\2\0\4\0"
    add(
        "packed-bomb",
        head + entry + b"\4" + bomb + b"\1",
        "at most 2 bytes may be in the zstd frame",
    )
