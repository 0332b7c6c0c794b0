"""Finding the tensors of a checkpoint: legal ones of any writer, and every way to be damaged."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from syncline.errors import ConfigError, FormatError, StoreError
from syncline.format import checkpoint
from syncline.types import TensorMeta

HEADER: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "b": {"dtype": "U8", "shape": [3], "data_offsets": [8, 11]},
    "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    "none": {"dtype": "F32", "shape": [0], "data_offsets": [8, 8]},
}
DATA = bytes(range(11))


def write(path: Path, header: object, data: bytes = DATA) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_headers_in_any_order_and_without_padding(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", HEADER)
    start = 8 + len(json.dumps(HEADER))
    assert [(place.meta, place.start - start) for place in checkpoint.locate(path).values()] == [
        (TensorMeta("a", "F32", (2,)), 0),
        (TensorMeta("none", "F32", (0,)), 8),
        (TensorMeta("b", "U8", (3,)), 8),
    ]


def test_views_of_tensors(tmp_path: Path) -> None:
    places = checkpoint.locate(write(tmp_path / "x.safetensors", HEADER))
    mapped = checkpoint.MappedFiles()
    assert mapped.bits(places["a"]).tobytes() == DATA[:8]
    assert mapped.bits(places["b"]).tolist() == [8, 9, 10]
    assert mapped.bits(places["none"]).size == 0
    assert not any(mapped.bits(place).flags.writeable for place in places.values())


def changed(**members: object) -> dict[str, Any]:
    return {**HEADER, **members}


BAD_HEADERS: dict[str, tuple[object, bytes, str]] = {
    "hole": (
        changed(b={"dtype": "U8", "shape": [2], "data_offsets": [9, 11]}),
        DATA,
        "'b' must begin at byte 8",
    ),
    "overlap": (
        changed(b={"dtype": "U8", "shape": [4], "data_offsets": [7, 11]}),
        DATA,
        "must begin at byte 8",
    ),
    "late start": ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}, b"12", "byte 0"),
    "cut short": (HEADER, DATA[:-1], "cut short"),
    "too long": (HEADER, DATA + b"x", "describes"),
    "wrong size": (
        changed(b={"dtype": "U8", "shape": [4], "data_offsets": [8, 11]}),
        DATA,
        "data_offsets",
    ),
    "three offsets": (
        changed(b={"dtype": "U8", "shape": [3], "data_offsets": [8, 11, 11]}),
        DATA,
        "data_offsets",
    ),
    "negative": (
        changed(b={"dtype": "U8", "shape": [3], "data_offsets": [-3, 0]}),
        DATA,
        "data_offsets",
    ),
    "dtype": (changed(b={"dtype": "U9", "shape": [3], "data_offsets": [8, 11]}), DATA, "U9"),
    "shape": (changed(b={"dtype": "U8", "shape": 3, "data_offsets": [8, 11]}), DATA, "shape"),
    "unknown key": (
        changed(b={"dtype": "U8", "shape": [3], "data_offsets": [8, 11], "more": 1}),
        DATA,
        "more",
    ),
    "missing key": (changed(b={"dtype": "U8", "shape": [3]}), DATA, "data_offsets"),
    "metadata": (changed(__metadata__={"a": 1}), DATA, "__metadata__"),
    "no object": ([1], DATA, "begin with"),
    "space first": (b" {}", b"", "begin with"),
    "no JSON": (b"{nonsense}", b"", "JSON"),
    "repeated": (b'{"a":{},"a":{}}', b"", "twice"),
    "not UTF-8": (b'{"\xff":{}}', b"", "UTF-8"),
    "empty name": (changed(**{"": HEADER["none"]}), DATA, "name"),
}


@pytest.mark.parametrize("kind", sorted(BAD_HEADERS))
def test_bad_headers_are_refused_with_the_place(tmp_path: Path, kind: str) -> None:
    header, data, message = BAD_HEADERS[kind]
    path = write(tmp_path / "x.safetensors", header, data)
    with pytest.raises(FormatError, match=message) as caught:
        checkpoint.locate(path)
    assert "x.safetensors" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"1234567", b"\xff" * 8, b"\x05" + bytes(7) + b"{}"])
def test_files_that_are_no_safetensors(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"x\.safetensors"):
        checkpoint.locate(path)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    directory = tmp_path / "sharded"
    directory.mkdir()
    for number, name in enumerate("abc", start=1):
        save_file(
            {name: np.full(4, number, np.int16)},
            directory / f"model-{number:05d}-of-00003.safetensors",
        )
    weight_map = {
        name: f"model-{number:05d}-of-00003.safetensors"
        for number, name in enumerate("abc", start=1)
    }
    index = {"metadata": {"total_size": 24}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def test_an_index_says_which_files_belong(sharded: Path) -> None:
    save_file({"a": np.zeros(4, np.int16)}, sharded / "consolidated.safetensors")
    places = checkpoint.locate(sharded)
    assert {name: place.path.name for name, place in places.items()} == {
        "a": "model-00001-of-00003.safetensors",
        "b": "model-00002-of-00003.safetensors",
        "c": "model-00003-of-00003.safetensors",
    }


def edit(sharded: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


BAD_INDEXES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "missing file": (
        lambda index: index["weight_map"].update(b="model-00009-of-00003.safetensors"),
        "model-00009-of-00003.safetensors', which is missing",
    ),
    "other file": (
        lambda index: index["weight_map"].update(b="model-00001-of-00003.safetensors"),
        "'b' is in 'model-00001-of-00003.safetensors', which does not hold it",
    ),
    "tensor that is not listed": (
        lambda index: index["weight_map"].update(d=index["weight_map"].pop("c")),
        "'c' is in .*weight_map says 'no file'",
    ),
    "outside": (
        lambda index: index["weight_map"].update(b="../b.safetensors"),
        r"weight_map\['b'\]",
    ),
    "absolute": (
        lambda index: index["weight_map"].update(b="/b.safetensors"),
        r"weight_map\['b'\]",
    ),
    "hidden": (lambda index: index["weight_map"].update(b=".b.safetensors"), r"weight_map\['b'\]"),
    "pickle": (lambda index: index["weight_map"].update(b="b.bin"), r"weight_map\['b'\]"),
    "number": (lambda index: index["weight_map"].update(b=1), r"weight_map\['b'\]"),
    "no map": (lambda index: index.pop("weight_map"), "weight_map"),
    "map of another kind": (lambda index: index.update(weight_map=[]), "weight_map"),
    "unknown key": (lambda index: index.update(more={}), "more"),
    "metadata": (lambda index: index.update(metadata=[]), "metadata"),
    "delta": (
        lambda index: index["metadata"].update(delta_encoding="xor"),
        "delta_encoding is 'xor': this directory holds a delta",
    ),
}


@pytest.mark.parametrize("kind", sorted(BAD_INDEXES))
def test_bad_indexes_are_refused_with_file_and_field(sharded: Path, kind: str) -> None:
    change, message = BAD_INDEXES[kind]
    edit(sharded, change)
    with pytest.raises(FormatError, match=message) as caught:
        checkpoint.locate(sharded)
    assert "model.safetensors.index.json" in str(caught.value)


def test_a_tensor_in_two_files_is_refused(sharded: Path) -> None:
    save_file(
        {"b": np.zeros(4, np.int16), "c": np.zeros(4, np.int16)},
        sharded / "model-00003-of-00003.safetensors",
    )
    with pytest.raises(FormatError, match=r"'b' is in 'model-00003.*exactly one file"):
        checkpoint.locate(sharded)


def test_an_index_that_repeats_a_name_is_refused(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "a.safetensors", "a": "b.safetensors"}}'
    )
    with pytest.raises(FormatError, match="twice"):
        checkpoint.locate(sharded)


def test_shards_without_index_are_no_checkpoint(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    with pytest.raises(FormatError, match=r"no model\.safetensors\.index\.json.*not complete"):
        checkpoint.locate(sharded)
    for number in (2, 3):
        (sharded / f"model-0000{number}-of-00003.safetensors").unlink()
    with pytest.raises(FormatError, match="not complete"):
        checkpoint.locate(sharded)


def test_a_single_file_of_any_name(tmp_path: Path) -> None:
    write(tmp_path / "diffusion_pytorch_model.safetensors", HEADER)
    assert checkpoint.locate(tmp_path).keys() == {"a", "b", "none"}
    save_file({"c": np.zeros(1)}, tmp_path / "model.safetensors")
    assert checkpoint.locate(tmp_path).keys() == {"c"}


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="found none"):
        checkpoint.locate(tmp_path / "missing")
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json"):
        checkpoint.locate(tmp_path)


@pytest.mark.parametrize("name", ["x.safetensors", "model.safetensors.index.json"])
def test_a_file_that_cannot_be_read(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / name, HEADER)

    def refuse(self: Path, *_: object) -> None:
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(StoreError, match=f"read .*{name}: Permission denied"):
        checkpoint.locate(tmp_path)


def test_a_file_that_is_gone_when_it_is_mapped(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", HEADER)
    places = checkpoint.locate(path)
    path.unlink()
    with pytest.raises(StoreError, match="map"):
        checkpoint.MappedFiles().bits(places["a"])


@pytest.mark.parametrize("content", [b"", b"1234567"])
def test_file_too_short_for_a_header_is_told_so(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=f"found {len(content)} bytes, too few"):
        checkpoint.locate(path)
