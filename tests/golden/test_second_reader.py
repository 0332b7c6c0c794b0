"""The examples of `format.md`, and small runs built by hand from its text, for the second reader.

The page has no example of a fingerprint and none of a whole run; what is below for these was made
from the page's words, with plain Python integers, and not with the reader.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from second_reader import Cursor, add_fingerprints, decode, fingerprint, read_run, splitmix

PLANES = bytes.fromhex("01020203 0808 0001 7f80 0404 00 7e")
PACKED = bytes.fromhex("0102e807e807 03000401 14080404 0300ffffb9 010f 4000")
PACKED_512 = bytes.fromhex("01028004e807 02000101 08040404 0300 01 0000 01010800 040404 bc 00 4f")


def u16(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}H", *values)


def thousand() -> tuple[bytes, bytes]:
    base = [0x3CA3] * 1000
    new = list(base)
    new[3], new[4], new[700] = 0x3CA4, 0x3CA2, 0x3CCB
    return u16(*base), u16(*new)


def zstd(content: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(content)


# ---- The page's examples -------------------------------------------------------------------------


def test_varints() -> None:
    assert Cursor(bytes.fromhex("03")).varint() == 3
    assert Cursor(bytes.fromhex("8005")).varint() == 640
    for bad in ("8000", "80", "ff" * 9 + "8001", ""):
        with pytest.raises(ValueError):
            Cursor(bytes.fromhex(bad)).varint()


def test_planes_example() -> None:
    assert decode("planes", "BF16", (3,), PLANES) == u16(0x3F80, 0xC000, 0x3F00)


@pytest.mark.parametrize("payload", [PACKED, PACKED_512])
def test_packed_examples(payload: bytes) -> None:
    base, new = thousand()
    assert decode("packed", "BF16", (1000,), payload, base) == new


def test_packed_example_with_flag_xor() -> None:
    base, _ = thousand()
    new = decode("packed", "BF16", (1000,), b"\0" + PACKED[1:], base)
    units = np.frombuffer(base, "<u2").copy()
    units[[3, 4, 700]] ^= np.array([2, 1, 80], "<u2")
    assert new == units.tobytes()


@pytest.mark.parametrize("example", [PLANES, PACKED, PACKED_512])
def test_no_example_may_be_cut_or_longer(example: bytes) -> None:
    encoding, count = ("planes", 3) if example is PLANES else ("packed", 1000)
    base = u16(*[0x3CA3] * count)
    for bad in [example[:i] for i in range(len(example))] + [example + b"\0"]:
        with pytest.raises(ValueError):
            decode(encoding, "BF16", (count,), bad, base)


@pytest.mark.parametrize(
    "old,new",
    [
        ("0102e807e807", "0202e807e807"),  # flag
        ("0102e807e807", "0104e807e807"),  # unit_bytes
        ("0102e807e807", "010200e807"),  # window_units 0
        ("0102e807e807", "010281808008e807"),  # window_units 2^24 + 1
        ("0102e807e807", "0102e807e707"),  # unit_count
        ("03000401", "00"),  # bytes after the end
        ("03000401", "e9070004 01"),  # more changes than units
        ("03000401", "03030401"),  # low_bytes
        ("03000401", "03000301"),  # symbol_bits
        ("03000401", "03000404"),  # more escapes than changes
        ("14080404", "17080404"),  # coding 3
        ("14080404", "18080404"),  # stream gap longer than it can be
        ("0300ffffb9", "0300ffffff"),  # the last gap has no end
        ("0300ffffb9", "0300ff00b9"),  # four gaps
        ("010f", "011f"),  # left over bits
        ("010f", "010e"),  # no symbol is the escape
        ("010f", "0f0f"),  # two symbols are
        ("4000", "f0ff"),  # an excess that is too large
    ],
)
def test_packed_refusals(old: str, new: str) -> None:
    payload = bytes.fromhex(PACKED.hex().replace(old, new.replace(" ", "")))
    assert payload != PACKED
    base, _ = thousand()
    with pytest.raises(ValueError):
        decode("packed", "BF16", (1000,), payload, base)


def test_packed_largest_excess() -> None:
    base, _ = thousand()
    payload = bytes.fromhex(PACKED.hex().replace("4000", "efff"))  # v 65535 is the step -32768
    new = np.frombuffer(decode("packed", "BF16", (1000,), payload, base), "<u2")
    assert new[700] == 0x3CA3 ^ 0x8000


def test_packed_offset_beyond_window() -> None:
    base, _ = thousand()
    payload = bytes.fromhex(PACKED.hex().replace("0300ffffb9", "03feffffe5"))  # unit 3 + 255 + 740
    assert decode("packed", "BF16", (1000,), payload, base)[-4:-2] != base[-4:-2]  # unit 998
    payload = bytes.fromhex(PACKED.hex().replace("0300ffffb9", "03feffffe7"))  # unit 1000
    with pytest.raises(ValueError, match="beyond the window"):
        decode("packed", "BF16", (1000,), payload, base)


# ---- The other encodings, from the text ----------------------------------------------------------


def test_streams_of_every_coding() -> None:
    frame = zstd(bytes(range(100)))
    table = bytes([4 * 1 + 2]) + varint(4 * len(frame) + 1)
    payload = b"\0\2" + varint(100) + varint(100) + table + b"\x3f" + frame
    expected = b"".join(bytes([0x3F, i]) for i in range(100))
    assert decode("planes", "F16", (10, 10), payload) == expected


def varint(value: int) -> bytes:
    out = []
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def test_empty_tensors() -> None:
    assert decode("full", "F32", (0, 7), b"") == b""
    assert decode("planes", "F32", (0,), b"\1\4\1\0") == b""
    assert decode("packed", "F32", (0,), b"\1\4\1\0", b"") == b""
    assert decode("xor", "F32", (0,), zstd(b""), b"") == b""
    assert decode("overwrite", "F32", (0,), zstd(b"\0" * 4), b"") == b""


def test_xor_and_overwrite() -> None:
    base, new = thousand()
    change = bytes(a ^ b for a, b in zip(base, new, strict=True))
    assert decode("xor", "BF16", (1000,), zstd(change), base) == new
    at = [i for i, byte in enumerate(change) if byte]
    content = struct.pack(f"<I{len(at)}I", len(at), *at) + bytes(new[i] for i in at)
    assert decode("overwrite", "BF16", (1000,), zstd(content), base) == new
    assert decode("overwrite", "BF16", (1000,), zstd(content), new) == new  # idempotent
    for bad in (zstd(change) + b"\0", zstd(change[:-1]), zstd(change)[:-1], change):
        with pytest.raises(ValueError):
            decode("xor", "BF16", (1000,), bad, base)
    for positions in ([5, 5], [6, 5], [5, 2000]):
        content = struct.pack("<3I", 2, *positions) + b"ab"
        with pytest.raises(ValueError):
            decode("overwrite", "BF16", (1000,), zstd(content), base)
    streamed = zstandard.ZstdCompressor(level=1).compressobj()  # a frame without content size
    with pytest.raises(ValueError, match="without content size"):
        decode("xor", "BF16", (1000,), streamed.compress(change) + streamed.flush(), base)


@pytest.mark.parametrize("dtype,width", [("I8", 1), ("BF16", 2), ("F32", 4), ("I64", 8)])
@pytest.mark.parametrize("low_bytes", [0, 1, 2])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("flag", [0, 1])
def test_packed_of_every_kind(dtype: str, width: int, low_bytes: int, bits: int, flag: int) -> None:
    """A plain encoder in Python integers, and extreme values in it."""
    units, top = 200_000, 1 << (8 * width)
    base = [(i * 2654435761) % top for i in range(units)]
    new = list(base)
    steps = [1, top - 1, top // 2, top // 2 - 1, top // 2 + 1, 2, 3, 7, 8, 100]
    offsets = [0, 1, 2, 257, 300, 900, 70_000, 70_001, 140_000, units - 1]
    for offset, step in zip(offsets, steps, strict=True):
        new[offset] = base[offset] ^ step if flag == 0 else (base[offset] + step) % top
    k, e = len(offsets), (1 << bits) - 1
    values = []
    for step in steps:
        signed = step if step < top // 2 else step - top
        values.append(step if flag == 0 else 2 * signed if signed >= 0 else -2 * signed - 1)
    gaps = [b - a - 1 for a, b in zip([-1, *offsets], offsets, strict=False)]
    streams = [bytes(gap >> (8 * b) & 255 for gap in gaps) for b in range(low_bytes)]
    high = [gap >> (8 * low_bytes) for gap in gaps]
    streams.append(b"".join(b"\xff" * (h // 255) + bytes([h % 255]) for h in high))
    symbols = [min(v - 1, e) for v in values]
    number = sum(symbol << (bits * i) for i, symbol in enumerate(symbols))
    streams.append(number.to_bytes(-(-k * bits // 8), "little"))
    excess = [v - 1 - e for v in values if v - 1 >= e]
    if excess:
        streams += [bytes(x >> (8 * b) & 255 for x in excess) for b in range(width)]
    payload = bytes([flag, width]) + varint(units) * 2 + varint(k)
    payload += bytes([low_bytes, bits]) + varint(len(excess))
    payload += b"".join(varint(4 * len(s)) for s in streams) + b"".join(streams)
    raw = [b"".join(u.to_bytes(width, "little") for u in side) for side in (base, new)]
    assert decode("packed", dtype, (units,), payload, raw[0]) == raw[1]


# ---- Fingerprints --------------------------------------------------------------------------------


def plain_fingerprint(name: str, digits: list[int]) -> str:
    """Section 5 once more, digit by digit."""
    mask = (1 << 64) - 1

    def mix(x: int) -> int:
        z = (x + 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    digest = hashlib.sha256(name.encode()).digest()
    a = b = 0
    for j, d in enumerate(digits):
        r, c = divmod(j, 1024)
        ya, yb = (
            mix((int.from_bytes(digest[i : i + 8], "little") + r * 0xD1342543DE82EF95) & mask) | 1
            for i in (0, 8)
        )
        a += ya * (mix(c) & 0xFFFFFFFF | 1) * d * d
        b += yb * (mix(c) >> 32 | 1) * d * d
    return f"{a & mask:016x}{b & mask:016x}"


def test_fingerprints() -> None:
    # The first number of the published generator splitmix64 with the seed 0.
    assert int(splitmix(np.zeros(1, np.uint64))[0]) == 0xE220A8397B1DCDAF
    data = bytes((i * i * 31 + 7) % 256 for i in range(24_000))
    for width in (1, 2, 4):
        digits = [int.from_bytes(data[i : i + width], "little") for i in range(0, len(data), width)]
        assert fingerprint("ä.weight", width, data) == plain_fingerprint("ä.weight", digits)
    assert fingerprint("x", 8, data) == fingerprint("x", 4, data)  # two digits, the low one first
    assert fingerprint("x", 2, b"") == "0" * 32
    # A tensor that is 0 up to the first digit of row 2048, and 9 there.
    row, data = 2048, bytes(4 << 21) + struct.pack("<I", 9)
    digest = hashlib.sha256(b"x").digest()
    lanes = []
    for lane in (0, 1):
        seed = int.from_bytes(digest[8 * lane : 8 * lane + 8], "little")
        y_seed = (seed + row * 0xD1342543DE82EF95) % (1 << 64)
        y = int(splitmix(np.array([y_seed], np.uint64))[0]) | 1
        x = (0xE220A8397B1DCDAF >> (32 * lane)) % (1 << 32) | 1
        lanes.append(y * x * 81 % (1 << 64))
    assert fingerprint("x", 4, data) == f"{lanes[0]:016x}{lanes[1]:016x}"


# ---- Whole runs ----------------------------------------------------------------------------------


def dump(value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace") + b"\n"  # a lone surrogate as an escape


def sha(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def part(entries: list[tuple[str, str, list[int], bytes]], metadata: Any) -> bytes:
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    at = 0
    for name, dtype, shape, data in entries:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(data for *_, data in entries)


class Run:
    """Writes versions of a model; `edit` may spoil a manifest before its digest is taken."""

    def __init__(self, path: Path) -> None:
        self.path, self.id = path, "0123456789abcdef" * 2
        self.last: dict[str, Any] = {"version": None, "sha256": None, "fingerprint": None}
        self.head()

    def head(self, **edit: Any) -> None:
        head = {"format": "syncline-head", "format_version": 1, "run_id": self.id, "epoch": 2}
        head |= {"version": self.last["version"], "manifest_sha256": self.last["sha256"]}
        (self.path / "HEAD.json").write_bytes(dump(head | edit))

    def add(
        self,
        version: int,
        kind: str,
        tensors: dict[str, tuple[str, list[int], bytes]],
        payloads: dict[str, tuple[str, bytes, int | None]],
        asked: str = "auto",
        metadata: Any = None,
        files: dict[str, bytes] | None = None,
        edit: Any = None,
    ) -> None:
        directory = self.path / f"weight_v{version:06d}"
        directory.mkdir()
        table, marks = [], []
        for name in sorted(tensors):
            dtype, shape, data = tensors[name]
            width = {"BF16": 2, "F32": 4, "I64": 8, "F4": 1}[dtype]
            mark = fingerprint(name, width, data)
            encoding, _, changed = payloads.get(name, (None, None, None))
            entry = {"name": name, "dtype": dtype, "shape": shape, "fingerprint": mark}
            entry |= {"encoding": encoding, "part": None if encoding is None else 0}
            table.append(entry | {"changed": changed})
            marks.append(mark)
        entries = []
        for name, (encoding, payload, _) in payloads.items():
            dtype, shape, _ = tensors[name]
            plain = encoding == "full"
            entries.append((name, *((dtype, shape) if plain else ("U8", [len(payload)])), payload))
        contents = {"model-00000-of-00001.safetensors": part(entries, metadata)}
        contents |= files or {}
        sidecar: Any = table
        if len(table) > 64:
            contents["tensors.json.zst"] = zstd(dump(table))
        listed = []
        for path, raw in contents.items():
            (directory / path).write_bytes(raw)
            listed.append({"path": path, "size_bytes": len(raw), "sha256": sha(raw)})
        if len(table) > 64:
            sidecar = listed.pop()
        manifest = {
            "format": "syncline-manifest",
            "format_version": 1,
            "run_id": self.id,
            "epoch": 1,
            "version": version,
            "kind": kind,
            "base_version": self.last["version"],
            "base_sha256": self.last["sha256"],
            "encoding": asked,
            "parts": listed[:1],
            "files": listed[1:],
            "tensors": sidecar,
            "fingerprint_before": self.last["fingerprint"],
            "fingerprint": add_fingerprints(marks),
        }
        if edit is not None:
            edit(manifest)
        raw = dump(manifest)
        (directory / "manifest.json").write_bytes(raw)
        self.last = {"version": version, "sha256": sha(raw), "fingerprint": manifest["fingerprint"]}
        self.head()


def model() -> dict[str, tuple[str, list[int], bytes]]:
    base, _ = thousand()
    return {
        "a": ("BF16", [10, 100], base),
        "b": ("BF16", [3], u16(0x3F80, 0xC000, 0x3F00)),
        "c": ("I64", [], b"\1" * 8),
        "d": ("F4", [2, 4], b"abcd"),
        "e": ("F32", [0, 5], b""),
    }


def add_full(run: Run, **more: Any) -> None:
    tensors = model()
    payloads = {name: ("full", data, None) for name, (_, _, data) in tensors.items()}
    payloads["b"] = ("planes", PLANES, None)
    more = {"metadata": {"format": "pt"}, "files": {"config.json": b"{}"}} | more
    run.add(1, "full", tensors, payloads, **more)


def add_delta(run: Run, **more: Any) -> None:
    tensors = model()
    tensors["a"] = ("BF16", [10, 100], thousand()[1])
    tensors["d"] = ("F4", [2, 4], b"abXd")
    content = struct.pack("<II", 1, 2) + b"X"
    payloads = {"a": ("packed", PACKED, 3), "d": ("overwrite", zstd(content), 1)}
    run.add(3, "delta", tensors, payloads, **more)


def as_read(tensors: dict[str, tuple[str, list[int], bytes]]) -> dict[str, Any]:
    return {name: (dtype, tuple(shape), data) for name, (dtype, shape, data) in tensors.items()}


def test_a_run(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert read_run(tmp_path) == {}
    add_full(run)
    add_delta(run)
    last = model()
    last["a"] = ("BF16", [10, 100], u16(*range(1000)))
    last["d"] = ("F4", [2, 4], b"abXd")
    change = np.frombuffer(last["a"][2], np.uint8) ^ np.frombuffer(thousand()[1], np.uint8)
    changed = int((change.view("<u2") != 0).sum())
    payloads = {"a": ("xor", zstd(change.tobytes()), changed)}
    run.add(4, "delta", last, payloads, asked="xor", metadata={"a": "0" * 32})
    (tmp_path / "weight_v000005").mkdir()  # not reached, so it does not exist
    versions = read_run(tmp_path)
    assert list(versions) == [1, 3, 4]
    assert versions[1] == as_read(model())
    assert versions[3]["a"][2] == thousand()[1] and versions[3]["d"][2] == b"abXd"
    assert versions[4] == as_read(last)


def test_a_run_with_a_sidecar(tmp_path: Path) -> None:
    tensors = {f"t{i:02d}": ("BF16", [1], u16(i)) for i in range(65)}
    payloads = {name: ("full", data, None) for name, (_, _, data) in tensors.items()}
    run = Run(tmp_path)
    run.add(1, "full", tensors, payloads, metadata={"format": "pt"})
    assert read_run(tmp_path) == {1: as_read(tensors)}
    path = tmp_path / "weight_v000001" / "tensors.json.zst"
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    with pytest.raises(ValueError, match="digest"):
        read_run(tmp_path)


BEFORE_DELTA: list[dict[str, Any]] = [
    {"format": "syncline-head"},
    {"format_version": True},
    {"format_version": 2},
    {"run_id": "0" * 32},
    {"epoch": 3},
    {"epoch": 1.0},
    {"epoch": -1},
    {"version": 4},
    {"kind": "Delta"},
    {"kind": "full"},
    {"base_version": None},
    {"base_version": 3},
    {"base_version": 2},
    {"base_sha256": "0" * 64},
    {"encoding": "none"},
    {"encoding": "xor"},
    {"parts": []},
    {"files": [{"path": "config.json", "size_bytes": 2, "sha256": sha(b"{}")}]},
    {"fingerprint_before": "0" * 32},
    {"fingerprint": "0" * 32},
    {"fingerprint": None},
    {"more": 1},
    {"tensors": []},
    {"tensors": {}},
]


@pytest.mark.parametrize("edit", BEFORE_DELTA, ids=str)
def test_spoiled_manifests(tmp_path: Path, edit: dict[str, Any]) -> None:
    run = Run(tmp_path)
    add_full(run)
    add_delta(run, edit=lambda manifest: manifest.update(edit))
    with pytest.raises(ValueError):
        read_run(tmp_path)


@pytest.mark.parametrize(
    "index,edit",
    [
        (0, {"changed": 2}),
        (0, {"changed": 0}),
        (0, {"changed": None}),
        (0, {"encoding": "xor"}),
        (0, {"part": 1}),
        (0, {"shape": [1000]}),
        (0, {"dtype": "F16"}),
        (0, {"name": "aa"}),
        (0, {"name": "z"}),
        (0, {"name": "\ud800"}),
        (1, {"part": 0}),
        (1, {"encoding": "full", "part": 0, "changed": 1}),
        (3, {"shape": [3]}),
    ],
)
def test_spoiled_tables(tmp_path: Path, index: int, edit: dict[str, Any]) -> None:
    run = Run(tmp_path)
    add_full(run)
    add_delta(run, edit=lambda manifest: manifest["tensors"][index].update(edit))
    with pytest.raises(ValueError):
        read_run(tmp_path)


@pytest.mark.parametrize(
    "name", ["", ".x", "a/b", "a\\b", "a\x85", "m.safetensors", "HEAD.json", "x" * 256, "\ud800"]
)
def test_bad_paths(tmp_path: Path, name: str) -> None:
    run = Run(tmp_path)
    file = {"path": name, "size_bytes": 2, "sha256": sha(b"{}")}
    add_full(run, edit=lambda manifest: manifest.update(files=[file]))
    with pytest.raises(ValueError, match="file|path"):
        read_run(tmp_path)


@pytest.mark.parametrize("name", ["model-00000-of-00001.safetensors", "config.json"])
def test_spoiled_files(tmp_path: Path, name: str) -> None:
    run = Run(tmp_path)
    add_full(run)
    path = tmp_path / "weight_v000001" / name
    raw = path.read_bytes()
    for bad in (raw[:-1], raw + b"\0", raw[:-1] + bytes([raw[-1] ^ 1])):
        path.write_bytes(bad)
        with pytest.raises(ValueError):
            read_run(tmp_path)
    path.unlink()
    with pytest.raises(ValueError):
        read_run(tmp_path)


@pytest.mark.parametrize(
    "metadata", [None, {}, {"format": "np"}, {"format": "pt", "more": "1"}, "pt"]
)
def test_metadata_of_a_full_version(tmp_path: Path, metadata: Any) -> None:
    add_full(Run(tmp_path), metadata=metadata)
    with pytest.raises(ValueError, match="__metadata__"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    "old,new",
    [
        (b'"epoch":2', b'"epoch":2,"epoch":2'),
        (b'"epoch":2', b'"epoch":2.0'),
        (b'"epoch":2', b'"epoch":NaN'),
        (b'"epoch":2', b'"epoch":9223372036854775808'),
        (b'"epoch":2', b'"epoch":true'),
        (b'"epoch":2', b'"epoch":0'),
        (b'"epoch":2', b'"Epoch":2'),
        (b'"epoch":2', b'"epoch":' + b"[" * 100_000),
        (b'"epoch":2,', b""),
        (b"{", b"\xef\xbb\xbf{"),
        (b"{", b"\xff{"),
        (b'"version":1', b'"version":null'),
    ],
)
def test_spoiled_heads(tmp_path: Path, old: bytes, new: bytes) -> None:
    run = Run(tmp_path)
    add_full(run)
    path = tmp_path / "HEAD.json"
    raw = path.read_bytes()
    assert old in raw
    path.write_bytes(raw.replace(old, new))
    with pytest.raises(ValueError):
        read_run(tmp_path)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda raw: raw[:4],
        lambda raw: (1 << 62).to_bytes(8, "little") + raw[8:],
        lambda raw: raw.replace(b'{"__', b' {"__'),
        lambda raw: raw.replace(b"[2014, 2022]", b"[2022, 2014]"),
        lambda raw: raw.replace(b'"I64"', b'"U64"'),
        lambda raw: raw.replace(b"[2000, ", b"[2001, "),
        lambda raw: raw.replace(b'"c"', b'"x"'),
        lambda raw: raw.replace(b'"c"', b'"a"'),
        lambda raw: raw.replace(b"}}  ", b"}}\t "),
        lambda raw: raw + b"\0",
        lambda raw: raw[:-1],
    ],
)
def test_spoiled_parts(tmp_path: Path, spoil: Any) -> None:
    """The manifest has the size and digest of the spoiled part."""
    path = tmp_path / "weight_v000001" / "model-00000-of-00001.safetensors"
    run = Run(tmp_path)

    def edit(manifest: dict[str, Any]) -> None:
        raw = spoil(path.read_bytes())
        path.write_bytes(raw)
        manifest["parts"][0] |= {"size_bytes": len(raw), "sha256": sha(raw)}

    add_full(run, edit=edit)
    with pytest.raises(ValueError) as error:
        read_run(tmp_path)
    assert "digest" not in str(error.value) and "bytes, not" not in str(error.value)
