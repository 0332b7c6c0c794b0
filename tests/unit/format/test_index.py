from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from manifest_samples import DELTA, FULL, SHA, entry, with_sum
from syncline.format import index
from syncline.version import Manifest

RAW = with_sum(replace(FULL, tensors=(entry("a", "full", 0, None), entry("b", "full", 1, None))))


def read(manifest: Manifest) -> Any:
    return json.loads(index.dump(manifest))


def test_a_full_version_of_raw_tensors_is_an_ordinary_checkpoint() -> None:
    assert read(RAW) == {
        "metadata": {"total_size": 48},
        "weight_map": {
            "a": "model-00000-of-00002.safetensors",
            "b": "model-00001-of-00002.safetensors",
        },
    }


def test_readers_of_the_slime_family_can_follow_their_encodings() -> None:
    for encoding in ("xor", "overwrite"):
        tensors = (entry("a", encoding), entry("b", None, None, None), entry("c", encoding, 1, 1))
        delta = with_sum(replace(DELTA, encoding=encoding, tensors=tensors))
        assert read(delta) == {
            "metadata": {
                "version": "000005",
                "base_version": "000004",
                "delta_encoding": encoding,
                "compression_format": "zstd",
                "checksum_format": "xxh3-128",
            },
            "weight_map": {
                "a": "model-00000-of-00002.safetensors",
                "c": "model-00001-of-00002.safetensors",
            },
        }


def test_everything_else_keeps_them_away() -> None:
    anchor = replace(FULL, version=9, base_version=8, base_sha256=SHA, encoding="xor")
    assert read(anchor)["metadata"]["delta_encoding"] == "syncline"
    assert read(anchor)["metadata"]["base_version"] == "000008"
    assert read(anchor)["weight_map"] == {}
    assert read(FULL)["metadata"]["base_version"] == ""
    for encoding in ("auto", "packed", "planes", "full"):
        found = read(replace(DELTA, encoding=encoding))
        assert found["metadata"]["delta_encoding"] == "syncline"
        assert found["metadata"]["checksum_format"] == "none"
        assert found["weight_map"] == {}
