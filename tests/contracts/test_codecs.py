"""The codec contract, over every codec."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from contracts.codecs import CodecContract
from syncline import codecs
from syncline.codecs.packed import Packed
from syncline.errors import ConfigError
from syncline.format.rules import ENCODINGS


class TestFull(CodecContract):
    codec = codecs.get("full")


class TestIndices(CodecContract):
    codec = codecs.get("indices")


class TestOverwrite(CodecContract):
    codec = codecs.get("overwrite")


class TestPacked(CodecContract):
    codec = codecs.get("packed")


class TestPackedXor(CodecContract):
    codec = Packed("xor")


class TestPlanes(CodecContract):
    codec = codecs.get("planes")


class TestTight(CodecContract):
    codec = codecs.get("tight")


class TestXor(CodecContract):
    codec = codecs.get("xor")


def test_every_codec_is_under_the_contract() -> None:
    suites = CodecContract.__subclasses__()
    assert {type(suite.codec) for suite in suites} == {type(codecs.get(n)) for n in codecs.NAMES}


def test_the_manifest_knows_exactly_these_encodings() -> None:
    assert set(codecs.NAMES) == set(ENCODINGS)
    assert all(codecs.get(name).name == name for name in codecs.NAMES)


def test_the_format_page_lists_exactly_these_encodings() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "format.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| `encoding` |"))
    assert set(re.findall(r"`([a-z]+)`", row)) == {"encoding", "auto", *codecs.NAMES}
    table = page.split("| name | needs the base |", 1)[1].split("\n\n", 1)[0]
    assert set(re.findall(r"(?m)^\| `([a-z]+)` \|", table)) == set(codecs.NAMES)


def test_an_unknown_encoding_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"must be one of .*'xor'.*, found 'zip'"):
        codecs.get("zip")
