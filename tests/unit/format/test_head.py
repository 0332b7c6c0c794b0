from __future__ import annotations

from dataclasses import replace

import pytest

from syncline.errors import FormatError
from syncline.format import head
from syncline.version import Head

FIRST = Head("0123456789abcdef" * 2, 1, None, None)
LATER = replace(FIRST, epoch=4, version=12, manifest_sha256="ab" * 32)


@pytest.mark.parametrize("value", [FIRST, LATER])
def test_heads_read_back(value: Head) -> None:
    assert head.load(head.dump(value)) == value


def test_the_text_is_canonical() -> None:
    assert head.dump(LATER).decode() == (
        '{"epoch":4,"format":"syncline-head","format_version":1,"manifest_sha256":"'
        + "ab" * 32
        + '","run_id":"0123456789abcdef0123456789abcdef","version":12}\n'
    )


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"run_id": "x" * 32}, "run_id must be 32 lowercase hexadecimal digits"),
        ({"run_id": "AB" * 16}, "run_id must be 32 lowercase hexadecimal digits"),
        ({"epoch": 0}, "epoch must be an integer from 1"),
        ({"epoch": 1 << 63}, "epoch must be an integer from 1"),
        ({"version": 0}, "version must be an integer from 1"),
        ({"version": None}, "manifest_sha256 must be null exactly where version is"),
        ({"manifest_sha256": None}, "manifest_sha256 must be null exactly where version is"),
        ({"manifest_sha256": "ab" * 31}, "manifest_sha256 must be 64 lowercase"),
    ],
)
def test_illegal_heads_are_neither_written_nor_read(
    fault: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    illegal = replace(LATER, **fault)
    with pytest.raises(FormatError, match=message):
        head.dump(illegal)
    with monkeypatch.context() as patch:
        patch.setattr(head, "check_head", lambda _: None)
        data = head.dump(illegal)
    with pytest.raises(FormatError, match=r"(?s)^run/HEAD\.json: "):
        head.load(data, "run/HEAD.json")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"epoch":4,', b"", "epoch is missing"),
        (b'"epoch":4,', b'"epoch":4.0,', "epoch must be an integer"),
        (b'"epoch":4,', b'"epoch":4,"epoch":5,', "'epoch' is there twice"),
        (b'"epoch":4,', b'"epoch":4,"extra":0,', "extra is not a known key"),
        (b'"syncline-head"', b'"syncline-manifest"', "format must be 'syncline-head'"),
        (b'"version":12', b'"version":"12"', "version must be an integer"),
        (b"0123456789abcdef0123456789abcdef", b"", "run_id must be 32"),
    ],
)
def test_other_text_is_refused(old: bytes, new: bytes, message: str) -> None:
    data = head.dump(LATER)
    assert old in data
    with pytest.raises(FormatError, match=message):
        head.load(data.replace(old, new))


def test_a_head_is_small() -> None:
    with pytest.raises(FormatError, match=r"at most 65536 bytes"):
        head.load(head.dump(LATER) + b" " * (1 << 16))
