"""A second reader of a run at rest, written from the page `format.md` alone.

It shares no code with the project and its author saw none of it (of section 6.7, which is in
`second_reader_tight.py`, only the first is true): if this file and the project
disagree about a run, then the page is wrong, or incomplete, or one of the two does not follow it.
So it is the page's test. It is plain and slow, holds every version of the run in memory, and
raises ValueError for everything that the page forbids. Numbers of sections are the page's.

    read_run(path) -> {version: {name: (dtype, shape, bytes)}}
    decode(encoding, dtype, shape, payload, base) -> bytes
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zstandard

from second_reader_tight import new_units

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]
Check = Callable[[Any], bool]

MIB = 1 << 20
INT_MAX = (1 << 63) - 1
MASK64 = (1 << 64) - 1
ENCODINGS = ("full", "indices", "overwrite", "packed", "planes", "tight", "xor")
NEEDS_BASE = ("indices", "overwrite", "packed", "tight", "xor")
# The page says "a name that safetensors knows"; this is that list, with the bits of an element.
DTYPE_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
DTYPE_BITS |= dict.fromkeys(
    ["BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"], 8
)
DTYPE_BITS |= dict.fromkeys(["I16", "U16", "F16", "BF16"], 16)
DTYPE_BITS |= dict.fromkeys(["I32", "U32", "F32"], 32)
DTYPE_BITS |= dict.fromkeys(["I64", "U64", "F64", "C64"], 64)


def need(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


# ---- JSON (the page's introduction) --------------------------------------------------------------


def load_json(raw: bytes, what: str) -> Any:
    """Parse strict JSON. No number on the page may be negative or have a fraction."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(items)
        need(len(result) == len(items), f"{what}: a repeated key")
        return result

    def integer(text: str) -> int:
        need(text.isdigit() and len(text) <= 19 and int(text) <= INT_MAX, f"{what}: bad {text:.30}")
        return int(text)

    def refuse(text: str) -> None:
        raise ValueError(f"{what}: {text:.30} is not an integer")

    try:
        text = raw.decode("utf-8")
        return json.loads(
            text,
            object_pairs_hook=pairs,
            parse_int=integer,
            parse_float=refuse,
            parse_constant=refuse,
        )
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{what}: not strict JSON: {error}") from error


def whole(low: int, high: int = INT_MAX) -> Check:
    return lambda v: type(v) is int and low <= v <= high


def hexadecimal(digits: int) -> Check:
    return lambda v: type(v) is str and re.fullmatch(f"[0-9a-f]{{{digits}}}", v) is not None


def text_to(limit: int) -> Check:
    """A string of 1 to `limit` bytes of UTF-8 without lone surrogates (legal JSON, not UTF-8)."""
    return lambda v: (
        type(v) is str
        and not re.search("[\ud800-\udfff]", v)
        and 1 <= len(v.encode("utf-8")) <= limit
    )


def one_of(*words: str) -> Check:
    return lambda v: type(v) is str and v in words


def list_of(check: Check) -> Check:
    return lambda v: type(v) is list and all(check(item) for item in v)


def or_null(check: Check) -> Check:
    return lambda v: v is None or check(v)


def anything(value: Any) -> bool:
    return True


def fields(value: Any, spec: dict[str, Check], what: str) -> list[Any]:
    """The values of an object that has exactly these keys and passes their checks, in order."""
    need(type(value) is dict, f"{what}: not an object")
    need(value.keys() == spec.keys(), f"{what}: keys {sorted(value)}, not {sorted(spec)}")
    for key, check in spec.items():
        need(check(value[key]), f"{what}: {key} is {value[key]!r:.60}")
    return [value[key] for key in spec]


# ---- Units and fingerprints (section 5) ----------------------------------------------------------


def layout(dtype: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """(unit_bytes, unit_count) of a tensor; their product is its size in bytes."""
    need(dtype in DTYPE_BITS, f"dtype {dtype!r} is unknown")
    need(len(shape) <= 64, "more than 64 sides")
    bits = DTYPE_BITS[dtype]
    total = bits * math.prod(shape)
    need(total % 8 == 0, "the tensor does not end on a whole byte")
    unit_bytes = max(bits // 8, 1)  # F4 and F6 count in bytes
    return unit_bytes, total // 8 // unit_bytes


def splitmix(x: np.ndarray) -> np.ndarray:
    z = x + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def fingerprint(name: str, unit_bytes: int, data: bytes) -> str:
    """The fingerprint of one tensor, 32 hex digits."""
    digits = np.frombuffer(data, f"<u{min(unit_bytes, 4)}")
    columns = splitmix(np.arange(1024, dtype=np.uint64))
    x_keys = (columns & np.uint64(0xFFFFFFFF), columns >> np.uint64(32))
    digest = hashlib.sha256(name.encode("utf-8")).digest()
    lanes = []
    for lane, x_key in enumerate(x_keys):
        seed = np.uint64(int.from_bytes(digest[8 * lane : 8 * lane + 8], "little"))
        total = 0
        for start in range(0, digits.size, 1 << 20):  # 1024 rows at a time
            piece = digits[start : start + (1 << 20)].astype(np.uint64)
            piece = np.pad(piece, (0, -piece.size % 1024)).reshape(-1, 1024)
            rows = np.arange(len(piece), dtype=np.uint64) + np.uint64(start >> 10)
            y_key = splitmix(rows * np.uint64(0xD1342543DE82EF95) + seed) | np.uint64(1)
            sums = (piece * piece * (x_key | np.uint64(1))).sum(axis=1, dtype=np.uint64)
            total += int((y_key * sums).sum(dtype=np.uint64))
        lanes.append(total & MASK64)
    return f"{lanes[0]:016x}{lanes[1]:016x}"


def add_fingerprints(values: list[str]) -> str:
    lanes = [sum(int(v[i : i + 16], 16) for v in values) & MASK64 for i in (0, 16)]
    return f"{lanes[0]:016x}{lanes[1]:016x}"


# ---- Payloads (section 6) ------------------------------------------------------------------------


def unzstd(frame: bytes, low: int, high: int, what: str) -> bytes:
    """The content of one zstd frame, whose size is from `low` to `high`."""
    try:
        need(frame[:4] == b"\x28\xb5\x2f\xfd", f"{what}: not a zstd frame")
        header = zstandard.get_frame_parameters(frame)
        size = header.content_size
        need(size != zstandard.CONTENTSIZE_UNKNOWN, f"{what}: a zstd frame without content size")
        need(header.dict_id == 0, f"{what}: a zstd frame with a dictionary")
        need(header.window_size <= 8 * MIB, f"{what}: a zstd window above 8 MiB")
        need(low <= size <= high, f"{what}: zstd content of {size} bytes, not {low} to {high}")
        decoder = zstandard.ZstdDecompressor(max_window_size=8 * MIB).decompressobj()
        content = bytearray()
        for start in range(0, len(frame), 1024):  # small steps: a lie about the size stays small
            need(not decoder.eof, f"{what}: bytes after the zstd frame")
            content += decoder.decompress(frame[start : start + 1024])
            need(len(content) <= size, f"{what}: more zstd content than the frame says")
    except zstandard.ZstdError as error:
        raise ValueError(f"{what}: {error}") from error
    need(decoder.eof and len(content) == size, f"{what}: the zstd frame is cut short")
    need(not decoder.unused_data, f"{what}: bytes after the zstd frame")
    return bytes(content)


class Cursor:
    """Reads a payload from its begin to its end."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        need(count <= len(self.data) - self.at, "the payload is cut short")
        self.at += count
        return self.data[self.at - count : self.at]

    def u8(self) -> int:
        return self.take(1)[0]

    def varint(self) -> int:
        value = 0
        for i in range(10):
            byte = self.u8()
            value |= (byte & 127) << (7 * i)
            if byte < 128:
                need(byte != 0 or i == 0, "a varint is longer than it needs to be")
                return value
        raise ValueError("a varint has more than 10 bytes")

    def streams(self, bounds: list[tuple[int, int]]) -> list[np.ndarray]:
        """Section 6.4: a table, then the streams; stream i is bounds[i] bytes long."""
        table = [divmod(self.varint(), 4) for _ in bounds]
        result = []
        for (stored, coding), (low, high) in zip(table, bounds, strict=True):
            need(coding <= 2, "a stream has the coding 3")
            raw = self.take(stored)
            if coding == 0:
                need(low <= stored <= high, f"a stream of {stored} bytes, not {low} to {high}")
            elif coding == 1:
                raw = unzstd(raw, low, high, "stream")
            else:
                need(stored == 1, "a constant stream is not stored as one byte")
                raw = raw * low
            result.append(np.frombuffer(raw, np.uint8))
        return result

    def header(self, unit_bytes: int, unit_count: int) -> tuple[int, list[tuple[int, int]]]:
        """(flag, the first and the last unit + 1 of each window)."""
        flag = self.u8()
        need(flag <= 1, f"flag {flag}")
        need(self.u8() == unit_bytes, "unit_bytes is not the tensor's")
        step = self.varint()
        need(1 <= step <= 1 << 24, f"window_units {step}")
        need(self.varint() == unit_count, "unit_count is not the tensor's")
        windows = -(-unit_count // step)
        need(windows <= len(self.data) - self.at, "the payload is too short for its windows")
        return flag, [(i * step, min((i + 1) * step, unit_count)) for i in range(windows)]

    def end(self) -> None:
        need(self.at == len(self.data), "bytes after the end of the payload")


def decode_xor(payload: bytes, base: bytes) -> bytes:
    change = unzstd(payload, len(base), len(base), "xor")
    return (np.frombuffer(change, np.uint8) ^ np.frombuffer(base, np.uint8)).tobytes()


def decode_overwrite(payload: bytes, base: bytes) -> bytes:
    need(len(base) < 1 << 32, "overwrite of a tensor of 2^32 bytes or more")
    content = unzstd(payload, 4, 4 + 5 * len(base), "overwrite")
    count = int.from_bytes(content[:4], "little")
    need(len(content) == 4 + 5 * count, "overwrite: the count does not fit the content")
    positions = np.frombuffer(content, "<u4", count, 4).astype(np.int64)
    need(bool((np.diff(positions) > 0).all()), "overwrite: positions do not rise")
    need(count == 0 or int(positions[-1]) < len(base), "overwrite: a position beyond the tensor")
    new = np.frombuffer(base, np.uint8).copy()
    new[positions] = np.frombuffer(content, np.uint8, count, 4 + 4 * count)
    return new.tobytes()


def decode_planes(payload: bytes, unit_bytes: int, unit_count: int) -> bytes:
    cursor = Cursor(payload)
    flag, windows = cursor.header(unit_bytes, unit_count)
    result = bytearray()
    for first, stop in windows:
        streams = cursor.streams([(stop - first, stop - first)] * unit_bytes)
        units = np.stack(streams, axis=1).reshape(-1).view(f"<u{unit_bytes}")
        if flag == 1:
            units = (units >> 1) | (units << (8 * unit_bytes - 1))
        result += units.tobytes()
    cursor.end()
    return bytes(result)


def decode_indices(payload: bytes, unit_bytes: int, unit_count: int, base: bytes) -> bytes:
    cursor = Cursor(payload)
    flag, windows = cursor.header(unit_bytes, unit_count)
    need(flag == 0, f"indices: flag {flag}")
    new = np.frombuffer(base, f"<u{unit_bytes}").copy()
    for first, stop in windows:
        k = cursor.varint()
        need(k <= stop - first, "indices: more changes than units")
        offsets = np.frombuffer(cursor.take(4 * k), "<u4").astype(np.int64)
        need(not (np.diff(offsets) <= 0).any(), "indices: offsets do not rise")
        need(k == 0 or offsets[-1] < stop - first, "indices: an offset beyond the window")
        new[first + offsets] = np.frombuffer(cursor.take(unit_bytes * k), new.dtype)
    cursor.end()
    return new.tobytes()


def decode_packed(payload: bytes, unit_bytes: int, unit_count: int, base: bytes) -> bytes:
    cursor = Cursor(payload)
    flag, windows = cursor.header(unit_bytes, unit_count)
    new = np.frombuffer(base, f"<u{unit_bytes}").copy()
    for first, stop in windows:
        k = cursor.varint()
        need(k <= stop - first, "packed: more changes than units")
        if k == 0:
            continue
        offsets, values = packed_window(cursor, k, stop - first, unit_bytes)
        units = new[first:stop]  # a view
        if flag == 0:
            units[offsets] ^= values.astype(units.dtype)
        else:
            # 2s -> s and -2s - 1 -> s, modulo 2^64, and then modulo the unit
            steps = (values >> np.uint64(1)) ^ (~(values & np.uint64(1)) + np.uint64(1))
            units[offsets] = (units[offsets].astype(np.uint64) + steps).astype(units.dtype)
    cursor.end()
    return new.tobytes()


def packed_window(c: Cursor, k: int, units: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """The offsets and the values v of the k changes in one window."""
    low_bytes, symbol_bits, m = c.u8(), c.u8(), c.varint()
    need(low_bytes <= 2, f"packed: low_bytes {low_bytes}")
    need(symbol_bits in (1, 2, 4, 8), f"packed: symbol_bits {symbol_bits}")
    need(m <= k, "packed: more escapes than changes")
    bounds = [(k, k)] * low_bytes + [(k, k + units // (255 << (8 * low_bytes)))]
    bounds += [(-(-k * symbol_bits // 8),) * 2]
    bounds += [(m, m)] * (width if m else 0)
    streams = c.streams(bounds)

    gap = streams[low_bytes]
    ends = np.flatnonzero(gap != 255)
    need(ends.size == k and gap[-1] != 255, "packed: stream gap does not hold as many gaps")
    gaps = np.diff(np.cumsum(gap, dtype=np.int64)[ends], prepend=0) << (8 * low_bytes)
    for b in range(low_bytes):
        gaps += streams[b].astype(np.int64) << (8 * b)
    offsets = np.cumsum(gaps + 1) - 1
    need(int(offsets[-1]) < units, "packed: an offset beyond the window")

    escape = (1 << symbol_bits) - 1
    shifts = np.arange(0, 8, symbol_bits, dtype=np.uint8)
    symbols = ((streams[low_bytes + 1][:, None] >> shifts) & np.uint8(escape)).reshape(-1)
    need(not symbols[k:].any(), "packed: left over bits are not 0")
    escaped = np.flatnonzero(symbols[:k] == escape)
    need(escaped.size == m, "packed: not as many escapes as it says")
    values = symbols[:k].astype(np.uint64) + np.uint64(1)
    if m:
        excess = np.zeros(m, np.uint64)
        for b, stream in enumerate(streams[low_bytes + 2 :]):
            excess |= stream.astype(np.uint64) << np.uint64(8 * b)
        need(int(excess.max()) <= (1 << (8 * width)) - 2 - escape, "packed: an excess is too large")
        values[escaped] += excess
    return offsets, values


def decode_tight(
    payload: bytes, dtype: str, unit_bytes: int, unit_count: int, base: bytes
) -> bytes:
    cursor = Cursor(payload)
    flag, windows = cursor.header(unit_bytes, unit_count)
    need(flag == 0, f"tight: flag {flag}")
    new = np.frombuffer(base, f"<u{unit_bytes}").copy()
    for first, stop in windows:
        size = cursor.varint()
        if size:
            units = new[first:stop].tolist()
            new[first:stop] = new_units(dtype, unit_bytes, cursor.take(size), units)
    cursor.end()
    return new.tobytes()


def decode(
    encoding: str, dtype: str, shape: tuple[int, ...], payload: bytes, base: bytes | None = None
) -> bytes:
    """The bits of a tensor from its payload and, where the encoding needs it, its base."""
    unit_bytes, unit_count = layout(dtype, shape)
    size = unit_bytes * unit_count
    if encoding in NEEDS_BASE:
        need(base is not None, f"{encoding} needs a base")
        need(len(base) == size, f"a base of {len(base)} bytes for a tensor of {size}")
    if encoding == "full":
        need(len(payload) == size, f"full: {len(payload)} bytes, not {size}")
        return bytes(payload)
    if encoding == "planes":
        return decode_planes(payload, unit_bytes, unit_count)
    if encoding == "xor":
        return decode_xor(payload, base)
    if encoding == "overwrite":
        return decode_overwrite(payload, base)
    if encoding == "indices":
        return decode_indices(payload, unit_bytes, unit_count, base)
    if encoding == "tight":
        return decode_tight(payload, dtype, unit_bytes, unit_count, base)
    need(encoding == "packed", f"encoding {encoding!r} is unknown")
    return decode_packed(payload, unit_bytes, unit_count, base)


# ---- The manifest (section 3) --------------------------------------------------------------------


FILE: dict[str, Check] = {"path": text_to(255), "size_bytes": whole(0), "sha256": hexadecimal(64)}
ENTRY: dict[str, Check] = {
    "name": text_to(4096),
    "dtype": one_of(*DTYPE_BITS),
    "shape": list_of(whole(0)),
    "fingerprint": hexadecimal(32),
    "encoding": or_null(one_of(*ENCODINGS)),
    "part": or_null(whole(0)),
    "changed": or_null(whole(1)),
}
MANIFEST: dict[str, Check] = {
    "format": one_of("syncline-manifest"),
    "format_version": whole(1, 1),
    "run_id": hexadecimal(32),
    "epoch": whole(1),
    "version": whole(1),
    "kind": one_of("full", "delta"),
    "base_version": or_null(whole(1)),
    "base_sha256": or_null(hexadecimal(64)),
    "encoding": one_of("auto", *ENCODINGS),
    "parts": list_of(anything),
    "files": list_of(anything),
    "tensors": anything,
    "fingerprint_before": or_null(hexadecimal(32)),
    "fingerprint": hexadecimal(32),
}
OWN_FILES = {"HEAD.json", "manifest.json", "tensors.json.zst", "model.safetensors.index.json"}


class File(NamedTuple):
    path: str
    size: int
    sha256: str

    def read(self, directory: Path) -> bytes:
        raw = read_file(directory / self.path, self.size, self.size)
        digest = hashlib.sha256(raw).hexdigest()
        need(digest == self.sha256, f"{directory / self.path}: the digest is {digest}")
        return raw


class Entry(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    fingerprint: str
    encoding: str | None
    part: int | None
    changed: int | None


class Manifest(NamedTuple):
    epoch: int
    version: int
    kind: str
    base_version: int | None
    base_sha256: str | None
    encoding: str
    parts: list[File]
    files: list[File]
    table: list[Entry]
    fingerprint_before: str | None
    fingerprint: str


def read_file(path: Path, low: int, high: int) -> bytes:
    """A file of `low` to `high` bytes; its size is looked at before it is read."""
    need(path.is_file(), f"{path}: no such file")
    size = path.stat().st_size
    need(low <= size <= high, f"{path}: {size} bytes, not {low} to {high}")
    raw = path.read_bytes()
    need(len(raw) == size, f"{path}: the size changed")
    return raw


def parse_file(value: Any, what: str) -> File:
    file = File(*fields(value, FILE, what))
    bad = file.path[0] == "." or re.search(r"[/\\\x00-\x1f\x7f-\x9f]", file.path)
    need(not bad, f"{what}: {file.path!r} is not a file name")
    return file


def parse_entry(value: Any, kind: str, asked: str, parts: int, what: str) -> Entry:
    t = Entry(*fields(value, ENTRY, what))
    t = t._replace(shape=tuple(t.shape))
    need(t.name != "__metadata__", f"{what}: the name is __metadata__")
    _, unit_count = layout(t.dtype, t.shape)
    if kind == "delta" and t.encoding is None:
        need(t.part is None and t.changed is None, f"{t.name}: not all three null")
        return t
    need(t.part is not None and t.part < parts, f"{t.name}: there is no part {t.part}")
    if kind == "full":
        need(t.encoding in ("full", "planes"), f"{t.name}: encoding {t.encoding} in a full version")
        need(t.changed is None, f"{t.name}: changed in a full version")
    else:
        good = asked not in ("xor", "overwrite") or t.encoding == asked
        need(good, f"{t.name}: encoding {t.encoding} in a delta of {asked}")
        good = t.changed is not None and t.changed <= unit_count
        need(good, f"{t.name}: {t.changed} changes in {unit_count} units")
    return t


def parse_manifest(raw: bytes, directory: Path, run_id: str) -> Manifest:
    what = str(directory / "manifest.json")
    values = fields(load_json(raw, what), MANIFEST, what)
    _, _, run, epoch, version, kind, base, base_digest, asked, *values = values
    raw_parts, raw_files, tensors, before, mark = values
    need(run == run_id, f"{what}: run_id {run} is not that of HEAD.json")
    if base is None:
        need(kind == "full", f"{what}: a delta without a base")
    else:
        need(base < version, f"{what}: base_version {base} is not smaller than {version}")
    same = (base is None) == (base_digest is None) == (before is None)
    need(same, f"{what}: base_version, base_sha256 and fingerprint_before are not null together")

    parts = [parse_file(v, f"{what}: part") for v in raw_parts]
    for i, part in enumerate(parts):
        name = f"model-{i:05d}-of-{len(parts):05d}.safetensors"
        need(part.path == name, f"{what}: part {i} is {part.path!r}, not {name!r}")
    files = [parse_file(v, f"{what}: file") for v in raw_files]
    names = [f.path for f in files]
    need(names == sorted(set(names)), f"{what}: files are not sorted, or not unique")
    bad = OWN_FILES & set(names) or any(n.endswith(".safetensors") for n in names)
    need(not bad, f"{what}: files name a file of the format")
    need(kind == "full" or not files, f"{what}: files in a delta")

    if type(tensors) is dict:
        sidecar = parse_file(tensors, f"{what}: tensors")
        need(sidecar.path == "tensors.json.zst", f"{what}: the sidecar is {sidecar.path!r}")
        need(sidecar.size <= 64 * MIB, f"{what}: the sidecar is above 64 MiB")
        content = unzstd(sidecar.read(directory), 0, 128 * MIB, f"{directory / sidecar.path}")
        tensors = load_json(content, f"{directory / sidecar.path}")
        need(type(tensors) is list and len(tensors) > 64, f"{what}: a sidecar for a short table")
    else:
        good = type(tensors) is list and len(tensors) <= 64
        need(good, f"{what}: tensors are no list of at most 64")
    table = [
        parse_entry(v, kind, asked, len(parts), f"{what}: tensor {i}")
        for i, v in enumerate(tensors)
    ]
    names = [t.name for t in table]
    need(names == sorted(set(names)), f"{what}: tensors are not sorted, or not unique")
    for i, part in enumerate(parts):
        plain = [t for t in table if t.part == i and t.encoding == "full"]
        least = 16 + sum(math.prod(layout(t.dtype, t.shape)) for t in plain)
        need(part.size >= least, f"{what}: part {i} is too small for its tensors")
    total = add_fingerprints([t.fingerprint for t in table])
    need(total == mark, f"{what}: the table's fingerprints add up to {total}")
    values = [parts, files, table, before, mark]
    return Manifest(epoch, version, kind, base, base_digest, asked, *values)


# ---- Parts (section 4) ---------------------------------------------------------------------------

PART_ENTRY: dict[str, Check] = {
    "dtype": one_of(*DTYPE_BITS),
    "shape": list_of(whole(0)),
    "data_offsets": list_of(whole(0)),
}


def parse_part(raw: bytes, entries: list[Entry], m: Manifest, what: str) -> dict[str, bytes]:
    """The payload of every tensor of a part."""
    need(len(raw) >= 8, f"{what}: no header")
    length = int.from_bytes(raw[:8], "little")
    need(length <= min(64 * MIB, len(raw) - 8), f"{what}: a header of {length} bytes")
    need(length % 8 == 0, f"{what}: the data do not begin at a multiple of 8")
    text = raw[8 : 8 + length]
    good = text.startswith(b"{") and text.rstrip(b" ").endswith(b"}")
    need(good, f"{what}: the header does not begin with {{ or is not padded with spaces")
    header = load_json(text, what)
    wanted = {t.name: t for t in entries}
    check_metadata(header.pop("__metadata__", None), wanted, m, what)
    need(header.keys() == wanted.keys(), f"{what}: not exactly the tensors of the table")
    data, at = memoryview(raw)[8 + length :], 0
    payloads = {}
    for name, value in header.items():
        dtype, shape, offsets = fields(value, PART_ENTRY, f"{what}: {name}")
        good = len(offsets) == 2 and at == offsets[0] <= offsets[1] <= len(data)
        need(good, f"{what}: {name}: the data do not follow each other")
        payload, at = bytes(data[at : offsets[1]]), offsets[1]
        t = wanted[name]
        expected = (t.dtype, [*t.shape]) if t.encoding == "full" else ("U8", [len(payload)])
        need((dtype, shape) == expected, f"{what}: {name}: {dtype} {shape}, not {expected}")
        payloads[name] = payload
    need(at == len(data), f"{what}: data that belong to no tensor")
    return payloads


def check_metadata(value: Any, wanted: dict[str, Entry], m: Manifest, what: str) -> None:
    if m.kind == "full":
        need(value == {"format": "pt"}, f"{what}: __metadata__ is not the one of a full version")
    elif m.encoding in ("xor", "overwrite"):
        # The digests are XXH3-128, which this file cannot compute and the page does not ask for.
        value = {} if value is None and not wanted else value
        fields(value, dict.fromkeys(wanted, hexadecimal(32)), f"{what}: __metadata__")
    else:
        need(value is None, f"{what}: __metadata__ in a delta")


# ---- The run (sections 1, 2 and 7) ---------------------------------------------------------------


HEAD: dict[str, Check] = {
    "format": one_of("syncline-head"),
    "format_version": whole(1, 1),
    "run_id": hexadecimal(32),
    "epoch": whole(1),
    "version": or_null(whole(1)),
    "manifest_sha256": or_null(hexadecimal(64)),
}


def read_chain(run: Path) -> list[Manifest]:
    """The manifests from the first version to the one that HEAD.json names."""
    what = str(run / "HEAD.json")
    head = load_json(read_file(run / "HEAD.json", 0, 16 * MIB), what)
    _, _, run_id, epoch, version, digest = fields(head, HEAD, what)
    need((version is None) == (digest is None), f"{what}: a version without a digest, or reverse")
    chain: list[Manifest] = []
    while version is not None:
        directory = run / f"weight_v{version:06d}"
        path = directory / "manifest.json"
        raw = read_file(path, 0, 16 * MIB)
        need(hashlib.sha256(raw).hexdigest() == digest, f"{path}: not the digest that names it")
        m = parse_manifest(raw, directory, run_id)
        need(m.version == version, f"{path}: version {m.version}")
        need(m.epoch <= epoch, f"{path}: epoch {m.epoch} is above the next one, {epoch}")
        chain.append(m)
        version, digest, epoch = m.base_version, m.base_sha256, m.epoch
    return chain[::-1]


def read_version(run: Path, m: Manifest, before: Tensors) -> Tensors:
    """The tensors of a version from those of its base."""
    directory = run / f"weight_v{m.version:06d}"
    if m.kind == "delta":
        now = [(t.name, t.dtype, t.shape) for t in m.table]
        then = [(name, dtype, shape) for name, (dtype, shape, _) in before.items()]
        need(now == then, f"{directory}: not the tensors of the base")
    extra = {path.name for path in directory.glob("*.safetensors")} - {p.path for p in m.parts}
    need(not extra, f"{directory}: {sorted(extra)} are not in the manifest")
    for file in m.files:
        file.read(directory)
    payloads: dict[str, bytes] = {}
    for i, part in enumerate(m.parts):
        entries = [t for t in m.table if t.part == i]
        what = str(directory / part.path)
        payloads |= parse_part(part.read(directory), entries, m, what)

    after: Tensors = {}
    for t in m.table:
        what = f"{directory}: {t.name}"
        unit_bytes, _ = layout(t.dtype, t.shape)
        old = before[t.name][2] if m.kind == "delta" else None
        data = old
        if t.encoding is not None:
            try:
                data = decode(t.encoding, t.dtype, t.shape, payloads[t.name], old)
            except ValueError as error:
                raise ValueError(f"{what}: {error}") from error
        if t.changed is not None:
            unit = f"<u{unit_bytes}"
            differ = int((np.frombuffer(data, unit) != np.frombuffer(old, unit)).sum())
            need(differ == t.changed, f"{what}: {differ} units differ, not {t.changed}")
        mark = fingerprint(t.name, unit_bytes, data)
        need(mark == t.fingerprint, f"{what}: the fingerprint is {mark}, not {t.fingerprint}")
        after[t.name] = (t.dtype, t.shape, data)
    return after


def read_run(path: str | Path) -> dict[int, Tensors]:
    """Check and rebuild every version that HEAD.json reaches; none before the first commit."""
    run = Path(path)
    versions: dict[int, Tensors] = {}
    tensors: Tensors = {}
    mark = None
    for m in read_chain(run):
        need(m.fingerprint_before == mark, f"version {m.version}: not the base's fingerprint")
        tensors = read_version(run, m, tensors)
        versions[m.version] = tensors
        mark = m.fingerprint
    return versions
