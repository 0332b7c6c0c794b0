"""The examples of the format page are what the codecs write, byte for byte."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from contracts.codecs import apply, encode
from syncline import codecs
from syncline.types import TensorMeta

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "format.md"
HEX = re.compile(r"[0-9a-f]{2}( {1,2}[0-9a-f]{2})*")


def worked_bytes(example: str) -> bytes:
    """Return the bytes of the indented block that follows the line with this text."""
    after = PAGE.read_text().split(example, 1)[1]
    block = re.search(r"(?m)^    .*\n(    .*\n)*", after)
    assert block is not None
    rows = [re.split(r" {3,}", line.strip(), maxsplit=1)[0] for line in block[0].splitlines()]
    assert all(HEX.fullmatch(row) for row in rows)
    return bytes.fromhex(" ".join(rows))


@pytest.mark.parametrize(
    ("encoding", "example", "window_units"),
    [
        ("planes", "Example: BF16, shape `[3]`", 2),
        ("packed", "Example: BF16, shape `[1000]`", 1000),
        ("packed", "The same with window_units 512", 512),
        ("tight", "Example: the tensor of section 6.6", 1000),
        ("indices", "Example, again the tensor of section 6.6", 1000),
    ],
)
def test_the_page_is_right(encoding: str, example: str, window_units: int) -> None:
    if encoding == "planes":
        new = np.array([0x3F80, 0xC000, 0x3F00], np.uint16)
        old = np.zeros_like(new)
    else:
        old = np.full(1000, 0x3CA3, np.uint16)
        new = old.copy()
        new[[3, 4, 700]] = [0x3CA4, 0x3CA2, 0x3CCB]
    meta = TensorMeta("w", "BF16", new.shape)
    codec = codecs.get(encoding)
    payload = worked_bytes(example)
    assert encode(codec, meta, old, new, window_units) == payload
    assert (apply(old, codec.decode(meta, payload, old)) == new).all()


def test_the_page_is_right_about_several_classes() -> None:
    example = "Example: BF16, shape `[8]`"
    text = PAGE.read_text().split(example, 1)[1]
    old, new = (
        np.array([int(word, 16) for word in words.split()], np.uint16)
        for words in re.findall(r"`((?:[0-9a-f]{4} ?){8})`", text)[:2]
    )
    decoded = codecs.get("tight").decode(TensorMeta("w", "BF16", (8,)), worked_bytes(example), old)
    assert (apply(old, decoded) == new).all()
