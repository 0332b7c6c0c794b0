from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from manifest_samples import DELTA, FULL, SHA, entry, with_sum
from syncline.errors import FormatError, VerifyError
from syncline.format import digest, manifest, strict_json, table, zstd
from syncline.types import Fingerprint, TensorMeta
from syncline.version import Manifest, PartEntry

ANCHOR = replace(
    FULL, version=9, base_version=8, base_sha256=SHA, fingerprint_before=DELTA.fingerprint
)
EMPTY = with_sum(replace(FULL, parts=(), files=(), tensors=()))
UNCHANGED = replace(
    with_sum(replace(DELTA, tensors=tuple(entry(n, None, None, None) for n in "abc"))), parts=()
)
LONG = with_sum(replace(DELTA, tensors=tuple(entry(f"layer.{i:03d}") for i in range(65))))
LEGAL = {
    "full": FULL,
    "delta": DELTA,
    "anchor": ANCHOR,
    "empty": EMPTY,
    "unchanged": UNCHANGED,
    "long": LONG,
}


@pytest.mark.parametrize("value", LEGAL.values(), ids=LEGAL)
def test_manifests_read_back(value: Manifest) -> None:
    data, sidecar = manifest.dump(value)
    assert manifest.load(data, sidecar) == value
    assert data == strict_json.dump(json.loads(data))


def test_the_table_moves_out_when_it_is_long() -> None:
    data, sidecar = manifest.dump(LONG)
    assert sidecar is not None
    wanted = manifest.wanted_sidecar(data)
    assert wanted == PartEntry("tensors.json.zst", len(sidecar), digest.sha256(sidecar))
    assert json.loads(data)["tensors"] == {
        "path": "tensors.json.zst",
        "sha256": wanted.sha256,
        "size_bytes": wanted.size_bytes,
    }
    short = with_sum(replace(LONG, tensors=LONG.tensors[:64]))
    data, sidecar = manifest.dump(short)
    assert sidecar is None
    assert manifest.wanted_sidecar(data) is None
    assert len(json.loads(data)["tensors"]) == 64


def test_the_sidecar_must_be_the_right_one() -> None:
    data, sidecar = manifest.dump(LONG)
    assert sidecar is not None
    with pytest.raises(
        FormatError, match=r"the tensor table is in tensors\.json\.zst, which was not"
    ):
        manifest.load(data)
    with pytest.raises(VerifyError, match=r"tensors\.json\.zst: the manifest names \d+ bytes"):
        manifest.load(data, sidecar + b"\0")
    with pytest.raises(VerifyError, match=r"tensors\.json\.zst: the manifest names SHA-256"):
        manifest.load(data, bytes(len(sidecar)))
    with pytest.raises(FormatError, match=r"table is inside, so tensors\.json\.zst must not be"):
        manifest.load(manifest.dump(DELTA)[0], sidecar)


def with_sidecar(
    rows: object, compress: Callable[[bytes], bytes] = zstd.compress
) -> tuple[bytes, bytes]:
    """Return a manifest, and the sidecar that it names, with these rows as table."""
    document = json.loads(manifest.dump(LONG)[0])
    sidecar = compress(strict_json.dump(rows))
    document["tensors"]["sha256"] = digest.sha256(sidecar)
    document["tensors"]["size_bytes"] = len(sidecar)
    return strict_json.dump(document), sidecar


def test_the_sidecar_is_parsed_as_strictly() -> None:
    rows: list[dict[str, Any]] = table.document(LONG.tensors)
    assert manifest.load(*with_sidecar(rows)) == LONG
    rows[7]["extra"] = 0
    with pytest.raises(
        FormatError, match=r"^tensors\.json\.zst: tensors\[7\]\.extra is not a known key"
    ):
        manifest.load(*with_sidecar(rows))
    del rows[7]["extra"], rows[9]
    with pytest.raises(FormatError, match=r"at most 64, found 64 beside"):
        manifest.load(*with_sidecar(rows))


def test_a_sidecar_that_is_no_single_frame_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = table.document(LONG.tensors)
    with pytest.raises(FormatError, match=r"tensors\.json\.zst: the zstd frame ends at offset"):
        manifest.load(*with_sidecar(rows, lambda text: zstd.compress(text) + zstd.compress(b"")))
    monkeypatch.setattr(table, "MAX_TABLE_BYTES", 1000)
    with pytest.raises(
        FormatError, match=r"tensors\.json\.zst: at most 1000 bytes may be in the zstd"
    ):
        manifest.load(*with_sidecar(rows))


def test_a_long_table_inside_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(table, "MAX_INLINE_TENSORS", 65)
        data, sidecar = manifest.dump(LONG)
    assert sidecar is None
    with pytest.raises(FormatError, match=r"at most 64, found 65 inside"):
        manifest.load(data)


def change(**members: object) -> Callable[[Manifest], Manifest]:
    return lambda value: replace(value, **members)  # type: ignore[arg-type]


def tensor(index: int, **members: object) -> Callable[[Manifest], Manifest]:
    """Return a change of one entry of the table, with the sum made right again."""

    def apply(value: Manifest) -> Manifest:
        tensors = list(value.tensors)
        tensors[index] = replace(tensors[index], **members)  # type: ignore[arg-type]
        return with_sum(replace(value, tensors=tuple(tensors)))

    return apply


def part(index: int, **members: object) -> Callable[[Manifest], Manifest]:
    def apply(value: Manifest) -> Manifest:
        parts = list(value.parts)
        parts[index] = replace(parts[index], **members)  # type: ignore[arg-type]
        return replace(value, parts=tuple(parts))

    return apply


def files(*paths: str) -> Callable[[Manifest], Manifest]:
    return change(files=tuple(PartEntry(path, 1, SHA) for path in paths))


def meta(
    index: int, *, name: str = "a", shape: tuple[int, ...] = (4, 3)
) -> Callable[[Manifest], Manifest]:
    return tensor(index, meta=TensorMeta(name, "BF16", shape))


ILLEGAL: list[tuple[Manifest, Callable[[Manifest], Manifest], str]] = [
    (FULL, change(run_id="0" * 31), "run_id must be 32 lowercase"),
    (FULL, change(epoch=0), "epoch must be an integer from 1"),
    (FULL, change(version=0), "version must be an integer from 1"),
    (FULL, change(version=1 << 63), "version must be an integer from 1"),
    (FULL, change(kind="anchor"), "kind must be 'full' or 'delta'"),
    (FULL, change(encoding="zip"), r"encoding must be auto or one of .*, found 'zip'"),
    (FULL, change(base_sha256=SHA), "base_sha256 must be null exactly where base_version is"),
    (FULL, change(fingerprint_before=FULL.fingerprint), "fingerprint_before must be null exactly"),
    (ANCHOR, change(base_sha256=None), "base_sha256 must be null exactly"),
    (ANCHOR, change(base_sha256=SHA[1:]), "base_sha256 must be 64 lowercase"),
    (ANCHOR, change(fingerprint_before=None), "fingerprint_before must be null exactly"),
    (ANCHOR, change(base_version=9), "base_version must be an integer from 1 to 8, found 9"),
    (ANCHOR, change(base_version=0), "base_version must be an integer from 1 to 8, found 0"),
    (
        DELTA,
        change(base_version=None, base_sha256=None, fingerprint_before=None),
        "base_version must be there in a delta",
    ),
    (
        FULL,
        part(0, path="model-00000-of-00003.safetensors"),
        r"parts\[0\]\.path must be 'model-00000-of",
    ),
    (FULL, part(1, path="../x.safetensors"), r"parts\[1\]\.path must be 'model-00001-of-00002"),
    (FULL, part(0, size_bytes=15), r"parts\[0\]\.size_bytes must be an integer from 16"),
    (FULL, part(0, size_bytes=39), r"parts\[0\]\.size_bytes must be at least 40 to hold"),
    (FULL, part(0, sha256=""), r"parts\[0\]\.sha256 must be 64"),
    (FULL, files("../config.json"), r"files\[0\]\.path must be one plain file name"),
    (FULL, files("b", "a"), r"files\[1\]\.path must be after 'b'"),
    (FULL, files("a", "a"), r"files\[1\]\.path must be after 'a'"),
    (FULL, change(files=(PartEntry("a", -1, SHA),)), r"files\[0\]\.size_bytes must be an integer"),
    (FULL, change(files=(PartEntry("a", 1, "x"),)), r"files\[0\]\.sha256 must be 64"),
    (DELTA, files("config.json"), "files must be empty in a delta"),
    (FULL, meta(1, name="a"), r"tensors\[1\]\.name must be after 'a'"),
    (FULL, meta(0, name="c"), r"tensors\[1\]\.name must be after 'c'"),
    (FULL, meta(0, name="__metadata__"), r"tensors\[0\]\.name must be a tensor's name"),
    (FULL, meta(0, name=""), r"tensors\[0\]\.name must be a tensor's name"),
    (FULL, meta(0, shape=(1,) * 65), r"tensors\[0\]\.shape must (have )?be|at most 64"),
    (FULL, meta(0, shape=(1 << 62, 2)), r"tensors\[0\]\.shape must be at most 64 dimensions and"),
    (FULL, tensor(0, encoding="xor"), r"tensors\[0\]\.encoding must be one of .*full version"),
    (FULL, tensor(0, encoding=None, part=None), r"tensors\[0\]\.encoding must be one of"),
    (FULL, tensor(0, part=None), r"tensors\[0\]\.part must be the index of a part"),
    (FULL, tensor(0, part=2), r"tensors\[0\]\.part must be an integer from 0 to 1"),
    (FULL, tensor(0, changed=1), r"tensors\[0\]\.changed must be null in a full version"),
    (
        DELTA,
        tensor(0, encoding=None),
        r"tensors\[0\]\.encoding must be there where part or changed",
    ),
    (DELTA, tensor(1, part=0), r"tensors\[1\]\.encoding must be there where part or changed"),
    (DELTA, tensor(1, changed=1), r"tensors\[1\]\.encoding must be there where part or changed"),
    (DELTA, tensor(0, encoding="zip"), r"tensors\[0\]\.encoding must be one of"),
    (DELTA, tensor(0, part=None), r"tensors\[0\]\.part must be the index of a part"),
    (DELTA, tensor(0, changed=None), r"tensors\[0\]\.changed must be an integer from 1 to 12"),
    (DELTA, tensor(0, changed=0), r"tensors\[0\]\.changed must be an integer from 1 to 12"),
    (DELTA, tensor(0, changed=13), r"tensors\[0\]\.changed must be an integer from 1 to 12"),
    (DELTA, change(encoding="xor"), r"tensors\[0\]\.encoding must be one of \('xor',\)"),
    (
        DELTA,
        change(encoding="overwrite"),
        r"tensors\[0\]\.encoding must be one of \('overwrite',\)",
    ),
    (
        DELTA,
        change(fingerprint=Fingerprint(0, 0)),
        "fingerprint must be .*, the sum over the tensors",
    ),
]


@pytest.mark.parametrize(("legal", "fault", "message"), ILLEGAL)
def test_one_validator_for_both_directions(
    legal: Manifest,
    fault: Callable[[Manifest], Manifest],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    illegal = fault(legal)
    with pytest.raises(FormatError, match=rf"^manifest.json: .*{message}"):
        manifest.dump(illegal)
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "check_manifest", lambda _: None)
        data, sidecar = manifest.dump(illegal)
    with pytest.raises(
        FormatError, match=rf"^v5/manifest.json: .*({message}|must be an integer from 0)"
    ):
        manifest.load(data, sidecar, "v5/manifest.json")


def test_fingerprints_have_two_lanes_of_64_bits() -> None:
    with pytest.raises(
        FormatError, match=r"tensors\[0\]\.fingerprint must be two lanes of 64 bits"
    ):
        manifest.dump(tensor(0, fingerprint=Fingerprint(-1, 0))(DELTA))
    with pytest.raises(FormatError, match=r"fingerprint_before must be two lanes of 64 bits"):
        manifest.dump(replace(DELTA, fingerprint_before=Fingerprint(0, 1 << 64)))


BAD_TEXT = [
    ('"kind":"full"', '"kind":"half"', "kind must be 'full' or 'delta'"),
    ('"epoch":1,', "", "epoch is missing"),
    ('"epoch":1,', '"epoch":1,"colour":0,', "colour is not a known key"),
    ('"epoch":1,', '"epoch":1,"epoch":1,', "key 'epoch' is there twice"),
    ('"epoch":1,', '"epoch":1e0,', "epoch must be an integer"),
    ('"epoch":1,', '"epoch":NaN,', "a number must be finite"),
    ('"encoding":"auto"', '"encoding":null', "encoding must be a string"),
    ('"base_version":null', '"base_version":false', "base_version must be an integer"),
    ('"base_sha256":null', '"base_sha256":0', "base_sha256 must be a string"),
    ('"fingerprint_before":null', '"fingerprint_before":"0"', "fingerprint_before must be 32"),
    ('"tensors":[', '"tensors":7,"x":[', "x is not a known key"),
    ('"size_bytes":7', '"size_bytes":"7"', r"files\[0\]\.size_bytes must be an integer"),
    ('"path":"config.json",', "", r"files\[0\]\.path is missing"),
    ('"shape":[4,3]', '"shape":[4,-3]', r"tensors\[0\]\.shape\[1\] must be an integer"),
    ('"shape":[4,3]', '"shape":12', r"tensors\[0\]\.shape must be a list"),
    ('"dtype":"BF16"', '"dtype":"BF17"', r"tensors\[0\]: tensor 'a': dtype 'BF17' is not one of"),
    ('"dtype":"BF16"', '"dtype":16', r"tensors\[0\]\.dtype must be a string, found 16"),
    (
        '"dtype":"BF16","encoding":"full"',
        '"dtype":"F4","encoding":3',
        r"tensors\[0\]\.encoding must be a",
    ),
    ('"changed":null', '"changed":1.5', r"tensors\[0\]\.changed must be an integer"),
    ('"part":0', '"part":true', r"tensors\[0\]\.part must be an integer"),
    ('"name":"a"', '"name":null', r"tensors\[0\]\.name must be a string"),
    ('"name":"a"', '"name":"\\ud800"', r"tensors\[0\]\.name must be text that UTF-8 can hold"),
]


@pytest.mark.parametrize(("old", "new", "message"), BAD_TEXT)
def test_text_that_is_no_manifest_is_refused(old: str, new: str, message: str) -> None:
    text = manifest.dump(FULL)[0].decode()
    assert old in text
    with pytest.raises(FormatError, match=rf"^manifest.json: .*{message}"):
        manifest.load(text.replace(old, new, 1).encode())


@pytest.mark.parametrize(
    ("member", "message"),
    [
        ({"path": "other.zst"}, r"tensors\.path must be 'tensors\.json\.zst'"),
        (
            {"size_bytes": (1 << 26) + 1},
            r"tensors\.size_bytes must be an integer from 0 to 67108864",
        ),
        ({"sha256": "x"}, r"tensors\.sha256 must be 64"),
        ({"x": 1}, r"tensors\.x is not a known key"),
    ],
)
def test_the_sidecar_is_named_strictly(member: dict[str, object], message: str) -> None:
    document = json.loads(manifest.dump(LONG)[0])
    document["tensors"] |= member
    with pytest.raises(FormatError, match=message):
        manifest.wanted_sidecar(strict_json.dump(document))


def test_an_element_that_ends_inside_a_byte_is_refused() -> None:
    text = manifest.dump(FULL)[0].decode().replace('"BF16"', '"F4"').replace("[4,3]", "[3,3]")
    with pytest.raises(FormatError, match=r"do not fill whole bytes"):
        manifest.load(text.encode())


def test_tables_of_huge_models_are_quick() -> None:
    tensors = tuple(entry(f"layers.{index:06d}") for index in range(20_000))
    big = with_sum(replace(DELTA, tensors=tensors))
    data, sidecar = manifest.dump(big)
    assert len(data) < 2000
    assert manifest.load(data, sidecar).by_name["layers.019999"] == tensors[-1]


def test_a_damaged_manifest_is_an_error_or_another_legal_manifest() -> None:
    data, _ = manifest.dump(DELTA)
    for index in range(len(data)):
        for flip in (1, 2, 0x10, 0x80):
            damaged = bytearray(data)
            damaged[index] ^= flip
            try:
                found = manifest.load(bytes(damaged))
            except FormatError:
                continue
            manifest.dump(found)
    # The last byte is the newline after the document.
    for size in range(len(data) - 1):
        with pytest.raises(FormatError):
            manifest.load(data[:size])
