from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from manifest_samples import DELTA, FULL, entry, with_sum
from syncline.errors import FormatError
from syncline.format import part
from syncline.types import TensorMeta
from syncline.version import Manifest

NAME = "model-00000-of-00001.safetensors"
METAS = [
    TensorMeta("odd", "U8", (3,)),
    TensorMeta("wide", "F64", (2,)),
    TensorMeta("scalar", "F32", ()),
    TensorMeta("none", "F16", (0, 4)),
    TensorMeta("é", "I16", (1, 2)),
]


def data_of(meta: TensorMeta) -> bytes:
    return bytes((meta.nbytes * 7 + place) % 256 for place in range(meta.nbytes))


def written(metas: list[TensorMeta], metadata: dict[str, str] | None = None) -> bytes:
    data = {meta.name: data_of(meta) for meta in metas}
    return b"".join(part.encode(metas, lambda name: [data[name][:2], data[name][2:]], metadata))


def test_other_tools_read_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / NAME
    path.write_bytes(written(METAS, {"format": "pt"}))
    found = load_file(path)
    assert {name: array.tobytes() for name, array in found.items()} == {
        meta.name: data_of(meta) for meta in METAS
    }
    assert found["wide"].dtype == np.float64
    assert found["scalar"].shape == ()
    with safe_open(path, "np") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_headers_read_back() -> None:
    data = written(METAS, {"format": "pt"})
    header = part.read_header(data, len(data), NAME)
    assert header.metadata == {"format": "pt"}
    assert {name: slot.meta for name, slot in header.slots.items()} == {m.name: m for m in METAS}
    for name, slot in header.slots.items():
        assert data[slot.start : slot.stop] == data_of(header.slots[name].meta)
        assert slot.start % slot.meta.unit_bytes == 0
    needed = part.header_bytes(data[:8], len(data), NAME)
    assert part.read_header(data[:needed], len(data), NAME) == header
    assert part.read_header(written([]), 16, NAME) == part.Header({}, None)


def test_chunks_must_be_as_long_as_the_tensor() -> None:
    for chunks in ([b"ab"], [b"ab", b"cd"], []):
        with pytest.raises(
            FormatError, match=rf"'odd' must be 3 bytes long, found {2 * len(chunks)}"
        ):
            list(part.encode([METAS[0]], lambda _, chunks=chunks: chunks))


@pytest.mark.parametrize("name", ["", "__metadata__", "odd"])
def test_illegal_names_are_not_written(name: str) -> None:
    with pytest.raises(FormatError, match=r"is in this part already|must be a tensor's name"):
        list(part.encode([METAS[0], TensorMeta(name, "U8", (0,))], lambda _: [], {"x": "y"}))


def test_chunks_are_passed_on_one_by_one() -> None:
    taken: list[str] = []

    def chunks_of(name: str) -> Iterator[bytes]:
        taken.append(name)
        yield data_of(next(meta for meta in METAS if meta.name == name))

    chunks = part.encode(METAS, chunks_of)
    next(chunks)
    assert taken == []
    next(chunks)
    assert taken == ["wide"]


@pytest.mark.parametrize("memory_bytes", [1, 1 << 20])
def test_a_spool_writes_the_same_part(memory_bytes: int) -> None:
    with part.Spool(memory_bytes) as spool:
        for meta in METAS:
            spool.add(meta.name, [data_of(meta)], meta)
        assert spool.size_bytes == sum(meta.nbytes for meta in METAS)
        assert b"".join(spool.chunks({"a": "b"})) == written(METAS, {"a": "b"})


def test_a_spool_writes_payloads_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part, "_SPOOL_PIECE_BYTES", 2)
    with part.Spool() as spool:
        spool.add("b", [b"1234", b"5"])
        spool.add("a", [])
        data = b"".join(spool.chunks())
    header = part.read_header(data, len(data), NAME)
    assert header.slots["a"].meta == TensorMeta("a", "U8", (0,))
    slot = header.slots["b"]
    assert (slot.meta, data[slot.start : slot.stop]) == (TensorMeta("b", "U8", (5,)), b"12345")


def test_a_spool_drops_a_payload_that_fails() -> None:
    def failing() -> Iterator[bytes]:
        yield b"half"
        raise RuntimeError

    with part.Spool() as spool:
        spool.add("a", [b"1"])
        with pytest.raises(RuntimeError):
            spool.add("b", failing())
        with pytest.raises(FormatError, match=r"'a' is in this part already"):
            spool.add("a", [b"2"])
        spool.add("b", [b"3"])
        assert b"".join(spool.chunks())[-2:] == b"13"


def test_a_spool_gives_the_last_payload_back() -> None:
    with part.Spool() as spool:
        spool.add("a", [b"1"])
        spool.add("b", [b"22"])
        for name in ("a", "c"):
            with pytest.raises(FormatError, match=f"tensor '{name}' is not the last one"):
                spool.drop(name)
        spool.drop("b")
        spool.add("b", [b"3"])
        assert b"".join(spool.chunks())[-2:] == b"13"


def test_metadata_follows_kind_and_encoding() -> None:
    digests = {"b": "0" * 32, "a": "1" * 32}
    assert part.metadata_for("full", "xor", digests) == {"format": "pt"}
    for encoding in ("xor", "overwrite"):
        metadata = part.metadata_for("delta", encoding, digests)
        assert metadata == digests
        assert metadata is not None
        assert list(metadata) == ["a", "b"]
    for encoding in ("auto", "packed", "planes", "full"):
        assert part.metadata_for("delta", encoding, digests) is None


def test_a_payload_of_a_version_is_found(tmp_path: Path) -> None:
    metas = [DELTA.tensors[0].meta, part.payload_meta("c", 5)]
    manifest = with_sum(
        replace(
            DELTA, tensors=(entry("a", "full", 0, 12), entry("b", None, None, None), entry("c"))
        )
    )
    data = written(metas)
    payloads = part.load(data, manifest, 0)
    assert {name: bytes(view) for name, view in payloads.items()} == {
        meta.name: data_of(meta) for meta in metas
    }
    assert part.load(written([]), manifest, 1) == {}
    path = tmp_path / NAME
    path.write_bytes(data)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        views = part.load(mapped, manifest, 0)
        assert views["a"] == payloads["a"]
        assert views["a"].readonly
        for view in views.values():
            view.release()


@pytest.mark.parametrize(
    ("metas", "message"),
    [
        ([part.payload_meta("a", 9)], "tensor 'c' is missing"),
        (
            [part.payload_meta(name, 9) for name in "abc"],
            "tensor 'b' is there, but not in the manifest",
        ),
        (
            [TensorMeta("a", "BF16", (4, 3)), part.payload_meta("c", 9)],
            r"tensor 'a' must be U8 \[24\], found BF16 \[4, 3\]",
        ),
        (
            [TensorMeta("a", "U8", (3, 3)), part.payload_meta("c", 9)],
            r"tensor 'a' must be U8 \[9\], found U8 \[3, 3\]",
        ),
    ],
)
def test_a_part_holds_exactly_what_the_manifest_says(metas: list[TensorMeta], message: str) -> None:
    manifest = with_sum(
        replace(DELTA, tensors=(entry("a"), entry("b", None, None, None), entry("c")))
    )
    with pytest.raises(FormatError, match=rf"^model-00000-of-00002.safetensors: {message}"):
        part.load(written(metas), manifest, 0)


def test_a_raw_tensor_has_its_own_dtype_and_shape() -> None:
    raw = TensorMeta("a", "BF16", (4, 3))
    manifest: Manifest = with_sum(replace(FULL, tensors=(entry("a", "full", 0, None),)))
    assert bytes(part.load(written([raw]), manifest, 0)["a"]) == data_of(raw)
    for other in (
        TensorMeta("a", "BF16", (3, 4)),
        TensorMeta("a", "I16", (4, 3)),
        part.payload_meta("a", 24),
    ):
        with pytest.raises(FormatError, match=r"'a' must be BF16 \[4, 3\], found"):
            part.load(written([other]), manifest, 0)


def with_header(header: Any, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def slot(start: int, stop: int, **members: object) -> dict[str, object]:
    return {"dtype": "U8", "shape": [stop - start], "data_offsets": [start, stop]} | members


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "has at least 8 bytes, found 0"),
        (b"\1\0\0\0\0\0\0\0", "header length must be at most 0, found 1"),
        (b"\xff" * 16, "header length must be at most 8, found 18446744073709551615"),
        ((8).to_bytes(8, "little") + b"      {}", "header must begin with '{'"),
        ((2).to_bytes(8, "little") + b"{}", "end on a multiple of 8"),
        (with_header(b"{}x", b""), "not JSON at character 2"),
        (with_header(b"{}\0", b""), "not JSON at character 2"),
        (with_header({"a": slot(0, 2)}, b"1"), r"data must end at byte \d+, it ends at"),
        (with_header({"a": slot(0, 2)}, b"123"), r"data must end at byte \d+, it ends at"),
        (
            with_header({"a": slot(1, 2)}, b"12"),
            r"'a'\.data_offsets must be \[0, 1\], without hole",
        ),
        (
            with_header({"a": slot(0, 1), "b": slot(2, 3)}, b"123"),
            r"'b'\.data_offsets must be \[1, 2\]",
        ),
        (
            with_header({"a": slot(0, 2), "b": slot(1, 3)}, b"123"),
            r"'b'\.data_offsets must be \[2, 4\]",
        ),
        (
            with_header({"b": slot(1, 2), "a": slot(0, 1)}, b"12"),
            r"'b'\.data_offsets must be \[0, 1\]",
        ),
        (
            with_header({"a": slot(0, 1, data_offsets=[0.0, 1.0])}, b"1"),
            "data_offsets must be an integer",
        ),
        (
            with_header({"a": slot(0, 1, data_offsets=[False, True])}, b"1"),
            "data_offsets must be an int",
        ),
        (
            with_header({"a": slot(0, 1, data_offsets=[0, 1, 1])}, b"1"),
            r"data_offsets must be \[0, 1\]",
        ),
        (with_header({"a": slot(0, 1, data_offsets=None)}, b"1"), "data_offsets must be a list"),
        (
            with_header({"a": slot(0, 1, shape=[1 << 64])}, b"1"),
            r"'a'\.shape\[0\] must be an integer",
        ),
        (with_header({"a": slot(0, 1, shape=[1] * 65)}, b"1"), "at most 64 sides, found 65"),
        (
            with_header({"a": slot(0, 1, shape=[1 << 40] * 2)}, b"1"),
            r"data_offsets must be \[0, 1208925",
        ),
        (with_header({"a": slot(0, 1, dtype="U9")}, b"1"), "dtype 'U9' is not one of"),
        (with_header({"a": slot(0, 1, extra=1)}, b"1"), "extra is not a known key"),
        (with_header({"a": {"dtype": "U8"}}, b""), "data_offsets is missing"),
        (with_header({"a": []}, b""), "'a' must be an object"),
        (with_header({"": slot(0, 0)}, b""), "a key of the header must be a tensor's name"),
        (with_header(b'{"a":{},"a":{}}', b""), "key 'a' is there twice"),
        (with_header({"__metadata__": None}, b""), "__metadata__ must be an object"),
        (with_header({"__metadata__": {"a": 1}}, b""), "__metadata__.a must be a string, found 1"),
    ],
)
def test_anything_else_is_no_part(data: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=rf"^{NAME}: .*{message}"):
        part.read_header(data, len(data), NAME)


def test_a_header_is_bounded() -> None:
    with pytest.raises(
        FormatError, match=r"header length must be at most 67108864, found 67108872"
    ):
        part.header_bytes(((1 << 26) + 8).to_bytes(8, "little"), 1 << 40, NAME)


def test_tensors_above_4_gib_have_a_place() -> None:
    metas = [TensorMeta("big", "BF16", (1 << 33,)), TensorMeta("small", "BF16", (4,))]
    chunks = part.encode(metas, lambda _: [])
    data = bytes(next(chunks))
    header = part.read_header(data, len(data) + (1 << 34) + 8, NAME)
    assert header.slots["small"].start == len(data) + (1 << 34)


def test_a_damaged_header_is_an_error_or_tiles_the_file() -> None:
    data = written(METAS, {"format": "pt"})
    for index in range(part.header_bytes(data, len(data), NAME)):
        for flip in (1, 2, 0x10, 0x80):
            damaged = bytearray(data)
            damaged[index] ^= flip
            try:
                slots = part.read_header(damaged, len(damaged), NAME).slots
            except FormatError:
                continue
            ends = [slot.stop for slot in slots.values()]
            assert ends[-1] == len(data)
            assert [slot.start for slot in slots.values()][1:] == ends[:-1]
    for size in range(len(data)):
        with pytest.raises(FormatError):
            part.read_header(data[:size], size, NAME)
