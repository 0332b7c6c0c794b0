"""Every reader of bytes that others wrote, on damaged ones: refused in our own words, or harmless; never more.

Payloads begin as the golden ones of every dtype and encoding; manifests, heads, states, parts, tables, journals and
checkpoints as small legal ones. `make test-long` does five times as many.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from contracts.codecs import apply
from hostile import edited, edited_json, refusals
from manifest_samples import DELTA, FULL, with_sum
from syncline import codecs
from syncline.commit.journal import Journal, JournalWriter
from syncline.errors import CodecError, FormatError, VerifyError
from syncline.format import checkpoint, head, manifest, part, state, table, zstd
from syncline.types import ZERO, Record, TensorMeta, unsigned
from syncline.version import Head, HeldVersion

PAYLOADS = sorted((Path(__file__).parents[1] / "golden" / "payloads").glob("*.json"))
ROUNDS = 500 if os.environ.get("HYPOTHESIS_PROFILE") == "long" else 100
OURS = (FormatError, CodecError)
KIB, MIB = 1 << 10, 1 << 20

FULL_TEXT, _ = manifest.dump(FULL)
HELD = HeldVersion(DELTA, "5a" * 32)
METAS = [TensorMeta("a", "BF16", (4, 3)), TensorMeta("b", "U8", (5,))]
SIZES = {meta.name: meta.nbytes for meta in METAS}
PART = b"".join(
    bytes(piece)
    for piece in part.encode(METAS, lambda name: [bytes(SIZES[name])], {"format": "pt"})
)


def journal_bytes() -> bytes:
    file = io.BytesIO()
    writer = JournalWriter(file)
    places, bits = np.array([1, 5, 9], np.uint32), np.arange(3, dtype=np.uint16)
    writer.add(Record("a", 0, places, bits, bits + np.uint16(1)))
    writer.add(Record("b", 1 << 40, None, bits, bits + np.uint16(1)))
    writer.finish()
    return file.getvalue()


def read_part(data: bytes) -> object:
    return part.read_header(data, len(data), "part")


READERS: dict[str, tuple[bytes, Callable[[bytes], object]]] = {
    "head": (head.dump(Head("00112233445566778899aabbccddeeff", 2, 5, "5a" * 32)), head.load),
    "manifest": (FULL_TEXT, manifest.load),
    "wanted sidecar": (FULL_TEXT, manifest.wanted_sidecar),
    "table": (table.pack(FULL.tensors), lambda data: table.unpack(data, "table")),
    "state": (state.dump(state.DirectoryState("creating", HELD)), state.load),
    "part": (PART, read_part),
    "journal": (journal_bytes(), lambda data: list(Journal(io.BytesIO(data), "journal"))),
    "zstd": (
        zstd.compress(bytes(range(256)) * 9),
        lambda data: zstd.decompress(data, "frame", limit_bytes=10 * KIB),
    ),
    "zstd in pieces": (
        zstd.compress(bytes(range(256)) * 9),
        lambda data: [zstd.Reader(data, "frame", 2304).read(768) for _ in range(3)],
    ),
}


@pytest.mark.parametrize("name", READERS)
def test_edited_bytes_are_refused_or_read(name: str) -> None:
    legal, read = READERS[name]
    read(legal)
    rng = np.random.default_rng(len(name))
    said = refusals(read, (edited(legal, rng) for _ in range(10 * ROUNDS)), OURS, 2 * MIB)
    assert len(said) > ROUNDS
    assert all(len(message) > 20 for message in said)


# How many of a hundred are refused at least; the sidecar's reader looks only at what names it.
REFUSED_OF_100 = {"head": 80, "manifest": 80, "state": 80, "wanted sidecar": 5}


@pytest.mark.parametrize("name", REFUSED_OF_100)
def test_documents_with_one_thing_wrong_are_refused(name: str) -> None:
    legal, read = READERS[name]
    rng = np.random.default_rng(1)
    said = refusals(read, (edited_json(legal, rng) for _ in range(10 * ROUNDS)), OURS, 2 * MIB)
    assert len(said) > ROUNDS * REFUSED_OF_100[name] / 10


def test_tables_with_one_thing_wrong_are_refused() -> None:
    legal = json.dumps(table.document(FULL.tensors)).encode()
    rng = np.random.default_rng(2)
    packed = (zstd.compress(edited_json(legal, rng)) for _ in range(10 * ROUNDS))
    assert (
        len(refusals(lambda data: table.unpack(data, "table"), packed, OURS, 2 * MIB)) > 7 * ROUNDS
    )


def test_a_sidecar_that_is_not_the_named_one_is_told_by_its_digest() -> None:
    first = replace(DELTA.tensors[1], fingerprint=ZERO)
    metas = [TensorMeta(f"{index:03}", "BF16", (4, 3)) for index in range(70)]
    many = with_sum(replace(DELTA, parts=(), tensors=tuple(replace(first, meta=m) for m in metas)))
    text, sidecar = manifest.dump(many)
    assert sidecar is not None
    assert manifest.load(text, sidecar) == many
    rng = np.random.default_rng(3)
    others = [data for data in (edited(sidecar, rng) for _ in range(ROUNDS)) if data != sidecar]
    said = refusals(
        lambda data: manifest.load(text, data), others, (FormatError, VerifyError), 2 * MIB
    )
    assert len(said) == len(others)


@pytest.mark.parametrize("is_json", [False, True])
def test_headers_of_checkpoints(tmp_path: Path, is_json: bool) -> None:
    length = int.from_bytes(PART[:8], "little")
    path = tmp_path / "model.safetensors"
    rng = np.random.default_rng(4)

    def read(data: bytes) -> object:
        path.write_bytes(data)
        return checkpoint.read_places(path)

    def damaged() -> bytes:
        if not is_json:
            return edited(PART, rng)
        text = edited_json(PART[8 : 8 + length], rng)
        return len(text).to_bytes(8, "little") + text + PART[8 + length :]

    read(PART)
    said = refusals(read, (damaged() for _ in range(3 * ROUNDS)), OURS, 2 * MIB)
    assert len(said) > ROUNDS


@pytest.mark.parametrize("path", PAYLOADS, ids=lambda path: path.stem)
def test_golden_payloads_edited(path: Path) -> None:
    document = json.loads(path.read_bytes())
    meta = TensorMeta("w", document["dtype"], tuple(document["shape"]))
    base = np.frombuffer(bytes.fromhex(document["base"]), unsigned(meta.unit_bytes))
    rng = np.random.default_rng(5)
    for name, text in document["payloads"].items():
        payload, codec = bytes.fromhex(text), codecs.get(name)

        def read(data: bytes, codec: codecs.Codec = codec) -> object:
            return apply(base, codec.decode(meta, data, base))

        # What a decoder may take: its buffers, and some copies of the tensor as wide as positions are. The
        # lengths that the edits write are 16 MiB and more.
        said = refusals(
            read, (edited(payload, rng) for _ in range(ROUNDS)), OURS, MIB + 100 * meta.nbytes
        )
        assert all("byte" in message or "must be" in message for message in said)
        assert said or not payload


def test_a_coder_whose_tables_are_damaged_is_refused_or_gives_as_many_bytes() -> None:
    rng = np.random.default_rng(6)
    symbols = np.minimum(rng.geometric(0.3, 5000), 100).astype(np.uint8)
    frame = zstd.compress_noise(symbols.data)
    assert len(frame) < symbols.size // 2
    read, refused = 0, 0
    # The frame's and the block's headers, the description of the code, and the first of what is coded.
    for bit in range(8 * 90):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            assert len(zstd.decompress_exactly(damaged, "frame", 5000)) == 5000
            read += 1
        except CodecError:
            refused += 1
    assert refused > 100
    assert read + refused == 720


BOMBS = """
import resource, sys, zstandard
import numpy as np
from syncline import codecs, kernels
from syncline.codecs.payload import varint
from syncline.errors import CodecError, FormatError
from syncline.format import table, zstd
from syncline.types import TensorMeta

content = bytes(64 << 20)
honest = zstandard.ZstdCompressor(level=19).compress(content)
unsized = zstandard.ZstdCompressor(write_content_size=False).compress(content)
# The same blocks below a header that says 80 bytes.
lying = zstandard.ZstdCompressor(level=19).compress(bytes(80))[:6] + honest[9:]
del content
# The library and a decoder take some of their memory with their first frame.
zstd.decompress(zstd.compress(bytes(1 << 20)), "frame", limit_bytes=1 << 20)
meta, base = TensorMeta("w", "BF16", (40,)), np.zeros(40, np.uint16)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (24 << 20),) * 2)
try:
    bytearray(32 << 20)
except MemoryError:
    pass
else:
    sys.exit("the limit does not hold")
refused = 0
for bomb in (honest, unsized, lying):
    stream = varint(len(bomb) << 2 | 1)
    header = bytes((1, 2)) + varint(40) + varint(40)
    payloads = {
        "planes": header + stream * 2 + bomb * 2,
        "packed": header + varint(3) + bytes((0, 8)) + varint(0) + stream * 2 + bomb * 2,
        "xor": bomb,
        "overwrite": bomb,
    }
    for name, payload in payloads.items():
        try:
            list(codecs.get(name).decode(meta, payload, base))
        except (CodecError, FormatError):
            refused += 1
    for read in (
        lambda: zstd.decompress(bomb, "frame", limit_bytes=1 << 20),
        lambda: zstd.Reader(bomb, "frame", 80).read(80),
    ):
        try:
            read()
        except (CodecError, FormatError):
            refused += 1
print(refused)
"""


def test_frames_that_expand_without_end_are_refused_without_the_memory() -> None:
    """In a process of its own that may not take 24 MiB more: also what numpy and zstd take is counted."""
    done = subprocess.run(
        [sys.executable, "-c", BOMBS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 3 * 6
