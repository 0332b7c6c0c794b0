"""Every rule that a directory of another layout can break, broken: a clear error, and nothing is changed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from layout_reading import apply, assert_same, load
from syncline import interchange
from syncline.errors import (
    CodecError,
    ConfigError,
    FormatError,
    LayoutError,
    SynclineError,
    VerifyError,
)
from syncline.interchange import grail_codec
from syncline.stores import FilesystemStore, MemoryStore
from syncline.types import ObjectInfo

GOLDEN = Path(__file__).parents[2] / "golden" / "layouts"
EMBED = "model.embed.weight"


class Case:
    """A copy of a golden directory, to be broken."""

    def __init__(self, name: str, tmp_path: Path) -> None:
        self.name = name
        self.root = tmp_path / name
        self.expected = GOLDEN / f"{name}.expected"
        shutil.copytree(GOLDEN / name, self.root)

    def read_all(self) -> None:
        """Read every version, from its index to its last bit; what is read is right."""
        store = FilesystemStore(self.root)
        layout = interchange.get(self.name.partition("-")[0])
        weights = load(self.expected / "base.safetensors")
        for version in layout.versions(store):
            weights = apply(layout, store, version, weights)
            assert_same(weights, load(self.expected / f"{version.identity}.safetensors"))

    def refused(self, error: type[SynclineError], *words: str) -> None:
        with pytest.raises(error) as caught:
            self.read_all()
        for word in words:
            assert word in str(caught.value), str(caught.value)

    def edit_json(self, path: str, edit: Callable[[dict[str, Any]], object]) -> None:
        file = self.root / path
        document = json.loads(file.read_text())
        edit(document)
        file.write_text(json.dumps(document))

    def edit_tensors(
        self, path: str, edit: Callable[[dict[str, Any], dict[str, bytes]], object]
    ) -> None:
        """Let `edit` change the header and the data of a safetensors file, and lay it out again."""
        file = self.root / path
        raw = file.read_bytes()
        size = struct.unpack("<Q", raw[:8])[0]
        header = json.loads(raw[8 : 8 + size])
        data = {
            name: raw[8 + size :][row["data_offsets"][0] : row["data_offsets"][1]]
            for name, row in header.items()
            if name != "__metadata__"
        }
        edit(header, data)
        position = 0
        for name, content in data.items():
            header[name]["data_offsets"] = [position, position + len(content)]
            position += len(content)
        text = json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data.values()))


@pytest.fixture
def case(tmp_path):
    return lambda name: Case(name, tmp_path)


def set_metadata(**values: str | None) -> Callable[[dict[str, Any], dict[str, bytes]], object]:
    def edit(header, data):
        for key, value in values.items():
            if value is None:
                del header["__metadata__"][key]
            else:
                header["__metadata__"][key] = value

    return edit


DELTA = "deltas/step_000005.safetensors"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"format": "other"}, "__metadata__.format must be 'sparse_weight_patch'"),
        ({"version": "2"}, "__metadata__.version must be '1' or '3'"),
        ({"sparse": "False"}, "__metadata__.sparse must be 'True'"),
        ({"model_version": "6"}, "__metadata__.model_version must be that of its name, 5"),
        ({"model_version": "-1"}, "__metadata__.model_version must be a whole number"),
        ({"sparsity": "much"}, "__metadata__.sparsity must be a number"),
        ({"total_elements": None}, "__metadata__.total_elements is missing"),
        ({"num_changed_params": "2"}, "__metadata__.num_changed_params must be 3, found 2"),
        ({"total_changed_elements": "1"}, "__metadata__.total_changed_elements must be"),
        ({"surprise": "1"}, "__metadata__.surprise is not a known key"),
        ({"encoding": "zip"}, "__metadata__.encoding must be 'raw' or 'gap_delta'"),
        ({"encoding": "nvcomp_cascaded"}, "'nvcomp_cascaded': positions in a format of nvCOMP"),
    ],
)
def test_trl_metadata(case, values, words):
    broken = case("trl-v3-gap_delta")
    broken.edit_tensors(DELTA, set_metadata(**values))
    broken.refused(FormatError, DELTA, words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "changed_params must list names, found 1"),
        ("{}", "changed_params must be a list"),
        ('["model.norm.weight"]', "changed_params must list the tensors of the file"),
        ("[", "changed_params: not JSON"),
    ],
)
def test_trl_changed_params(case, text, words):
    broken = case("trl-v1")
    broken.edit_tensors(DELTA, set_metadata(changed_params=text))
    broken.refused(FormatError, DELTA, words)


def positions(
    *values: int, dtype: str = "<i4"
) -> Callable[[dict[str, Any], dict[str, bytes]], object]:
    """Replace the first positions of the embedding."""

    def edit(header, data):
        key = next(key for key in data if key in (f"{EMBED}.indices", f"{EMBED}.idx"))
        array = np.frombuffer(data[key], dtype).copy()
        array[: len(values)] = values
        data[key] = array.tobytes()

    return edit


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (positions(-1), "position 0 must be from 0 to 230, found -1"),
        (positions(5, 5), "position 1 must be after 5, found 5"),
        (positions(9, 5), "position 1 must be after 9, found 5"),
        (positions(2**31 - 1), "position 0 must be from 0 to 230"),
    ],
)
@pytest.mark.parametrize("name", ["trl-v1", "trl-v3-raw"])
def test_trl_positions(case, name, edit, words):
    broken = case(name)
    broken.edit_tensors(DELTA, edit)
    broken.refused(CodecError, DELTA, EMBED, words)


def test_trl_gaps_that_run_out_of_the_tensor(case):
    broken = case("trl-v3-gap_delta")
    broken.edit_tensors(DELTA, positions(0xFFFFFFFF, 0xFFFFFFFF, dtype="<u4"))
    broken.refused(CodecError, DELTA, "must be from 0 to 230, found 4294967295")


def test_trl_pairs(case):
    broken = case("trl-v1")
    broken.edit_tensors(
        DELTA, lambda header, data: (header.pop(f"{EMBED}.values"), data.pop(f"{EMBED}.values"))
    )
    broken.refused(FormatError, f"'{EMBED}.values' is missing")
    broken = Case("trl-v3-raw", broken.root.parent)
    broken.edit_tensors(
        DELTA, lambda header, data: (header.pop(f"{EMBED}.idx"), data.pop(f"{EMBED}.idx"))
    )
    broken.refused(FormatError, f"tensor '{EMBED}.val': no '.idx' belongs to it")


def test_trl_positions_of_another_type_or_number(case):
    broken = case("trl-v3-raw")
    broken.edit_tensors(DELTA, lambda header, data: header[f"{EMBED}.idx"].update(dtype="F32"))
    broken.refused(FormatError, f"'{EMBED}.idx' must be I32, found F32")

    def shorten(header, data):
        data[f"{EMBED}.idx"] = data[f"{EMBED}.idx"][:-4]
        header[f"{EMBED}.idx"]["shape"][0] -= 1

    broken = Case("trl-v3-gap_delta", broken.root.parent)
    broken.edit_tensors(DELTA, shorten)
    broken.refused(FormatError, "must be flat and equally many")


def test_trl_values_of_another_dtype_than_the_base(case):
    broken = case("trl-v3-raw")
    broken.edit_tensors(DELTA, lambda header, data: header[f"{EMBED}.val"].update(dtype="F16"))
    broken.refused(LayoutError, EMBED, "the version says F16", "the base has BF16")


def test_trl_step_names_that_are_one(case):
    broken = case("trl-v1")
    shutil.copy(broken.root / DELTA, broken.root / "deltas" / "step_0000005.safetensors")
    broken.refused(FormatError, "step 5 is there twice")


def grail(window: int, folder: str, name: str) -> str:
    return f"checkpoint-{window}/{folder}/{name}"


def recompress(case: Case, edit: Callable[[dict[str, Any], bytes], bytes | None]) -> None:
    """Change header or data of the delta of window 130, and list its new digest."""
    path = case.root / grail(130, "DELTA", "delta_sparse.bin.zst")
    content = zstandard.ZstdDecompressor().decompress(path.read_bytes())
    size = struct.unpack("<I", content[:4])[0]
    header, data = json.loads(content[4 : 4 + size]), content[4 + size :]
    data = edit(header, data) or data
    text = json.dumps(header).encode()
    relist(case, zstandard.compress(struct.pack("<I", len(text)) + text + data))


def relist(case: Case, content: bytes) -> None:
    (case.root / grail(130, "DELTA", "delta_sparse.bin.zst")).write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    case.edit_json(
        grail(130, "DELTA", "metadata.json"),
        lambda document: document["file_manifest"].update({"delta_sparse.bin.zst": digest}),
    )


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda h, _: h.update(version=4), "version must be 2, 3 or 31"),
        (lambda h, _: h.update(surprise=1), "surprise is not a known key"),
        (lambda h, _: h["tensors"][0].update(surprise=1), "tensors[0].surprise is not a known key"),
        (lambda h, _: h["tensors"][0].update(value_dtype="int8"), "tensors[0].value_dtype must be"),
        (
            lambda h, _: h["tensors"][0].update(num_nonzero=232),
            "tensors[0].num_nonzero must be an integer",
        ),
        (
            lambda h, _: h["tensors"][1].update(indices_offset=0),
            "tensors[1].indices_offset must be",
        ),
        (
            lambda h, _: h["tensors"][0].update(values_size=1 << 62),
            "tensors[0].values_size must be",
        ),
        (lambda h, _: h["tensors"][0].update(shape=[1 << 62, 1 << 62]), "indices_size must be"),
        (lambda h, _: h["tensors"][0].update(name=""), "tensors[0].name must be a tensor's name"),
        (lambda h, _: h["tensors"].pop(), "the header describes"),
    ],
)
@pytest.mark.parametrize("name", ["grail-v2", "grail-v3", "grail-v3.1"])
def test_grail_header(case, name, edit, words):
    if "indices_size" in words:
        words = ""
    broken = case(name)
    recompress(broken, lambda header, data: edit(header, data) and None)
    broken.refused(SynclineError, words)


def test_grail_payload_that_is_not_one_frame(case):
    broken = case("grail-v2")
    path = "checkpoint-130/DELTA/delta_sparse.bin.zst"
    relist(broken, b"\x28\xb5\x2f\xfd")
    broken.refused(FormatError, path, "found 0: the file is cut short")
    relist(broken, b"garbage")
    broken.refused(CodecError, path)
    relist(broken, zstandard.compress(b"\xff\xff\xff\xff"))
    broken.refused(FormatError, path, "the header length must be at most", "found 4294967295")
    relist(broken, zstandard.compress(b"\x01"))
    broken.refused(FormatError, path, "found 1: the file is cut short")
    text = b'{"version":2,"tensors":[]}'
    relist(broken, 2 * zstandard.compress(struct.pack("<I", len(text)) + text))
    broken.refused(CodecError, path, "the zstd frame ends at offset")


def test_grail_header_that_is_longer_than_what_is_read_first(tmp_path, monkeypatch):
    from syncline.interchange import grail_codec

    monkeypatch.setattr(grail_codec, "_PREFIX_BYTES", 8)
    Case("grail-v3", tmp_path).read_all()


def test_grail_file_that_is_cut_after_it_was_listed_ends_the_reading():
    """Its header is looked for in what there is, not in what there was."""
    content = (GOLDEN / "grail-v2" / grail(130, "DELTA", "delta_sparse.bin.zst")).read_bytes()
    store = MemoryStore()
    store.put("cut", [content[:12]])
    with pytest.raises((CodecError, FormatError), match="cut"):
        grail_codec.peek(store, ObjectInfo("cut", len(content)))


def test_grail_bomb_is_refused_before_it_is_unpacked(case):
    """A frame of a gigabyte of zeros: its header says that nothing is in it."""
    broken = case("grail-v2")
    text = b'{"version":2,"tensors":[]}'
    packer = zstandard.ZstdCompressor(level=1).compressobj(size=4 + len(text) + (1 << 30))
    pieces = [packer.compress(struct.pack("<I", len(text)) + text)]
    pieces += [packer.compress(bytes(1 << 24)) for _ in range(64)]
    relist(broken, b"".join([*pieces, packer.flush()]))
    broken.refused(FormatError, "the header describes 0 bytes", "the frame holds 1073741824")


@pytest.mark.parametrize("name", ["nobody's", EMBED])
def test_grail_block_that_is_larger_than_the_base_has_it_is_not_unpacked(case, name):
    """A gigabyte of zeros in a few kilobytes, said to be the changes of a tensor of this size."""
    broken, count = case("grail-v2"), 1 << 27
    block = {"name": name, "shape": [count], "num_nonzero": count, "value_dtype": "float32"}
    block |= {"indices_offset": 0, "indices_size": 4 * count}
    block |= {"values_offset": 4 * count, "values_size": 4 * count}
    text = json.dumps({"version": 2, "tensors": [block]}).encode()
    packer = zstandard.ZstdCompressor(level=1).compressobj(size=4 + len(text) + 8 * count)
    pieces = [packer.compress(struct.pack("<I", len(text)) + text)]
    pieces += [packer.compress(bytes(1 << 24)) for _ in range(8 * count >> 24)]
    relist(broken, b"".join([*pieces, packer.flush()]))
    tracemalloc.start()
    try:
        broken.refused(LayoutError, name)
        assert tracemalloc.get_traced_memory()[1] < 1 << 26
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("steps", [(3, 0), (-1,), (1 << 30,)])
@pytest.mark.parametrize("name", ["grail-v2", "grail-v3"])
def test_grail_positions(case, name, steps):
    broken = case(name)

    def edit(header, data):
        array = np.frombuffer(data, "<i4", len(data) // 4).copy()
        if name == "grail-v3" and steps == (3, 0):
            count = header["tensors"][0]["num_nonzero"]
            array[1], array[count + 1] = 0, 0
        else:
            array[: len(steps)] = steps
        return array.tobytes() + data[len(array) * 4 :]

    recompress(broken, edit)
    broken.refused(CodecError, "model.embed.weight")


@pytest.mark.parametrize(
    ("file", "edit", "words"),
    [
        ("metadata.json", lambda d: d.update(window=131), "window must be that of its directory"),
        ("metadata.json", lambda d: d.update(checkpoint_type="FULL"), "checkpoint_type must be"),
        ("metadata.json", lambda d: d.update(surprise=1), "surprise is not a known key"),
        ("metadata.json", lambda d: d.pop("file_manifest"), "file_manifest is missing"),
        ("metadata.json", lambda d: d["file_manifest"].update(a="0" * 64), "'a' is not there"),
        ("metadata.json", lambda d: d["file_manifest"].update(a="0"), "64 lowercase hexadecimal"),
        ("metadata.json", lambda d: d["file_manifest"].clear(), "is there, but not listed"),
        (
            "delta_metadata.json",
            lambda d: d.update(format="sparse_codec_v9"),
            "format must be one of",
        ),
        ("delta_metadata.json", lambda d: d.update(format="sparse_codec_v3"), "version must be 3"),
        (
            "delta_metadata.json",
            lambda d: d.update(threshold=1e-6),
            "smaller changes were left out",
        ),
        ("delta_metadata.json", lambda d: d.update(prev_window=130), "prev_window must be"),
        ("delta_metadata.json", lambda d: d.update(prev_window=90), "prev_window must be"),
        ("delta_metadata.json", lambda d: d.update(surprise=1), "surprise is not a known key"),
    ],
)
def test_grail_metadata(case, file, edit, words):
    broken = case("grail-v2")
    broken.edit_json(grail(130, "DELTA", file), edit)
    broken.refused(FormatError, grail(130, "DELTA", ""), words)


@pytest.mark.parametrize("offset", [1, 40])
@pytest.mark.parametrize(
    "path", [grail(130, "DELTA", "delta_sparse.bin.zst"), grail(100, "FULL", "model.safetensors")]
)
def test_grail_damaged_files(case, path, offset):
    broken = case("grail-v3")
    content = bytearray((broken.root / path).read_bytes())
    content[-offset] ^= 1
    (broken.root / path).write_bytes(content)
    broken.refused(SynclineError, path)


def test_grail_damaged_configuration(case):
    """Further files are proved too, and a delta has none."""
    broken = case("grail-v3")
    store, layout = FilesystemStore(broken.root), interchange.get("grail")
    full, delta = layout.versions(store)[:2]
    assert layout.files(store, full) == {"config.json": b'{"a": 1}'}
    assert layout.files(store, delta) == {}
    (broken.root / grail(100, "FULL", "config.json")).write_bytes(b'{"a": 2}')
    with pytest.raises(VerifyError, match="config.json: .* says SHA-256"):
        layout.files(store, full)


def test_grail_replaced_values(case):
    """A payload that is well formed, but not the one that was listed."""
    broken = case("grail-v3")
    path = broken.root / grail(130, "DELTA", "delta_sparse.bin.zst")
    content = bytearray(zstandard.ZstdDecompressor().decompress(path.read_bytes()))
    content[-1] ^= 1
    path.write_bytes(zstandard.compress(bytes(content)))
    broken.refused(VerifyError, "delta_sparse.bin.zst", "says SHA-256")


def test_grail_files_that_are_not_there(case):
    broken = case("grail-v3")
    (broken.root / grail(130, "DELTA", "delta_sparse.bin.zst")).unlink()
    broken.refused(FormatError, "'delta_sparse.bin.zst' is not there")
    (broken.root / grail(130, "DELTA", "metadata.json")).unlink()
    broken.refused(FormatError, "metadata.json is missing, but the window is marked as ready")


def test_grail_windows_that_are_not_ready_are_no_versions(case):
    whole = case("grail-v2")
    (whole.root / "checkpoint-190" / "READY-220").unlink()
    store = FilesystemStore(whole.root)
    assert [at.identity for at in interchange.get("grail").versions(store)] == ["100", "130", "160"]


def test_grail_two_runs_in_one_store(case):
    broken = case("grail-v2")
    shutil.copytree(
        GOLDEN / "grail-v2" / "checkpoint-100", broken.root / "other" / "checkpoint-100"
    )
    broken.refused(FormatError, "checkpoints lie below")


MANIFEST = "delta-00000001/manifest.json"
PAYLOAD = "delta-00000001/delta-rank00000-file000000.safetensors"


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda d: d.update(version=2), "version must be that of its directory"),
        (lambda d: d.update(base_version=1), "base_version must be an integer from 0 to 0"),
        (lambda d: d.update(surprise=1), "surprise is not a known key"),
        (lambda d: d.pop("payload_files"), "payload_files is missing"),
        (lambda d: d["payload_files"].append("../x.safetensors"), "payload_files must be the name"),
        (lambda d: d["payload_files"].append(d["payload_files"][0]), "is there twice"),
        (lambda d: d["payload_files"].pop(), "is there, but not listed"),
        (lambda d: d["tensors"].append(d["tensors"][0]), "is there twice"),
        (lambda d: d["tensors"][0].update(name="__metadata__"), "tensors[0].name"),
        (lambda d: d["tensors"][0].update(dtype="object"), "tensors[0].dtype must be one of"),
        (
            lambda d: d["tensors"][0].update(shape=[1 << 60, 1 << 60]),
            "uncompressed_num_bytes must be",
        ),
        (lambda d: d["tensors"][0].update(checksum_algorithm="md5"), "checksum_algorithm must be"),
        (lambda d: d["tensors"][0].update(checksum="00"), "checksum must be 32 lowercase"),
        (lambda d: d["tensors"][0].update(payload_key="other"), "has no payload 'other'"),
        (
            lambda d: d["tensors"][0].update(payload_file="/etc/passwd"),
            "payload_file must be the name",
        ),
        (lambda d: d.update(total_compressed_num_bytes=0), "total_compressed_num_bytes must be"),
    ],
)
def test_skyrl_manifest(case, edit, words):
    broken = case("skyrl")
    broken.edit_json(MANIFEST, edit)
    broken.refused(FormatError, MANIFEST, words)


def test_skyrl_payloads(case):
    broken = case("skyrl")

    def damage(header, data):
        name = next(iter(data))
        data[name] = data[name][:-1] + bytes([data[name][-1] ^ 1])

    broken.edit_tensors(PAYLOAD, damage)
    broken.refused(SynclineError, PAYLOAD)


def test_skyrl_digest_of_other_bits(case):
    broken = case("skyrl")
    broken.edit_json(MANIFEST, lambda d: d["tensors"][0].update(checksum="0" * 32))
    broken.refused(VerifyError, "expected xxh3-128 " + "0" * 32)


def test_skyrl_lost_and_surplus_payloads(case):
    broken = case("skyrl")
    shutil.copy(broken.root / PAYLOAD, broken.root / PAYLOAD.replace("file000000", "file000007"))
    broken.refused(FormatError, "file000007.safetensors' is there, but not listed")
    (broken.root / PAYLOAD).unlink()
    broken.refused(FormatError, "file000000.safetensors' is not there")


def test_skyrl_payload_nobody_speaks_of(case):
    broken = case("skyrl")
    broken.edit_json(
        MANIFEST,
        lambda d: d.update(
            total_uncompressed_num_bytes=d["total_uncompressed_num_bytes"]
            - d["tensors"][0]["uncompressed_num_bytes"],
            total_compressed_num_bytes=d["total_compressed_num_bytes"]
            - d["tensors"].pop(0)["compressed_num_bytes"],
        ),
    )
    broken.refused(FormatError, "nothing says what")


ARC_PART = "snap-9/model-00001-of-00002.safetensors"


def test_fireworks_wrong_base(case):
    """Without the version before it, the digests refute the base."""
    broken = case("fireworks-arc_v2")
    shutil.rmtree(broken.root / "snap-9")
    broken.refused(VerifyError, "snap-10/model-0000", "made on other bits than the base's")


@pytest.mark.parametrize("arc", ["arc_v1", "arc_v2"])
def test_fireworks_damage_in_any_byte_is_found_or_changes_nothing(case, arc):
    """Compressed data have a few bits that mean nothing; all others are found."""
    broken = case(f"fireworks-{arc}")
    whole = (broken.root / ARC_PART).read_bytes()
    start = 8 + struct.unpack("<Q", whole[:8])[0]
    found = 0
    for offset in range(start, len(whole), 3):
        damaged = bytearray(whole)
        damaged[offset] ^= 0x10
        (broken.root / ARC_PART).write_bytes(damaged)
        try:
            broken.read_all()
        except SynclineError:
            found += 1
    assert found > 0.8 * len(range(start, len(whole), 3))


def test_fireworks_lost_part(case):
    broken = case("fireworks-arc_v2")
    (broken.root / ARC_PART).unlink()
    broken.refused(FormatError, "snap-9: the file names say that there are 2 parts, found 1")


def test_fireworks_tensor_that_is_missing_or_there_twice(case):
    broken = case("fireworks-arc_v2")
    name = "model.rotary.positions"
    taken: dict[str, Any] = {}

    def take(header, data):
        taken.update(
            row=header.pop(name), data=data.pop(name), digest=header["__metadata__"].pop(name)
        )

    broken.edit_tensors(ARC_PART, take)
    broken.refused(FormatError, name, "in 'snap-8' alone")

    def put(header, data):
        header[name], data[name] = taken["row"], taken["data"]
        header["__metadata__"][name] = taken["digest"]

    broken = Case("fireworks-arc_v1", broken.root.parent)
    broken.edit_tensors(ARC_PART.replace("00001-of", "00002-of"), put)
    broken.refused(FormatError, name, "is in snap-9/model-00001-of-00002.safetensors too")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("4294967296", "must be a decimal adler32 below 2**32"),
        ("00000001", "must be the decimal adler32 of its new bytes"),
        ("0x1", "found '0x1'"),
        (None, "found 'nothing'"),
    ],
)
def test_fireworks_digests(case, text, words):
    broken = case("fireworks-arc_v2")
    broken.edit_tensors(ARC_PART, set_metadata(**{EMBED: text}))
    broken.refused(FormatError, words)


def test_fireworks_delta_without_any_digest_is_not_taken_for_weights(case):
    broken = case("fireworks-arc_v2")
    broken.edit_tensors(ARC_PART, lambda header, data: header["__metadata__"].clear())
    broken.refused(FormatError, ARC_PART, "every tensor is U8 with one dimension, as in a delta")


def test_fireworks_delta_of_one_part_that_is_weights(case):
    broken = case("fireworks-arc_v2")
    shutil.copy(broken.root / ARC_PART.replace("snap-9", "snap-8"), broken.root / ARC_PART)
    broken.refused(FormatError, "snap-9: some files hold payloads with digests and some do not")


def test_fireworks_metadata_of_no_tensor(case):
    broken = case("fireworks-arc_v2")
    broken.edit_tensors(ARC_PART, set_metadata(other="1"))
    broken.refused(FormatError, ARC_PART, "__metadata__['other'] names no tensor")


def test_fireworks_arc_v3_is_refused_unread(case):
    broken = case("fireworks-arc_v2")
    (broken.root / ARC_PART).write_bytes(b"ARC3_ENVELOPE\0" + b"cos\nsystem\n(S'true'\ntR.")
    store = FilesystemStore(broken.root)
    keys = [info.key for info in store.list()]
    assert interchange.get("fireworks").evidence(store, keys) is not None
    broken.refused(FormatError, ARC_PART, "ARC3_ENVELOPE: arc_v3 is a Python pickle")


def test_fireworks_arc_v3_payload_is_refused_unread(case):
    broken = case("fireworks-arc_v2")

    def edit(header, data):
        name = next(name for name in data if data[name])
        data[name] = b"ARC3_ENVELOPE\0" + b"cos\nsystem\n"
        header[name]["shape"] = [len(data[name])]

    broken.edit_tensors(ARC_PART, edit)
    broken.refused(FormatError, ARC_PART, "ARC3_ENVELOPE: arc_v3 is a Python pickle")


@pytest.mark.parametrize(
    ("compress", "words"),
    [
        (lambda raw: zlib.compress(raw[:-1]), "the zlib stream ends 1 bytes too early"),
        (lambda raw: zlib.compress(raw + b"\0"), "content is longer than the tensor"),
        (lambda raw: zlib.compress(bytes(1 << 26)), "content is longer than the tensor"),
        (lambda raw: zlib.compress(raw)[:-2], "the zlib stream is cut short"),
        (lambda raw: zlib.compress(raw) + b"xyz", "3 bytes follow the zlib stream"),
        (lambda raw: b"\x78\x9cgarbage", "the zlib stream is damaged"),
        (lambda raw: b"", "the zlib stream ends"),
    ],
)
def test_fireworks_zlib_payloads(case, compress, words):
    broken = case("fireworks-arc_v1")

    def edit(header, data):
        data[EMBED] = compress(zlib.decompress(data[EMBED]))
        header[EMBED]["shape"] = [len(data[EMBED])]

    broken.edit_tensors(ARC_PART, edit)
    broken.refused(CodecError, ARC_PART, EMBED, words)


def lengthen(broken: Case, path: str, name: str) -> int:
    """Put 128 MiB of nothing behind the payload that lies last in a file; return its length then."""
    file = broken.root / path
    content = file.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    end = max(row["data_offsets"][1] for key, row in header.items() if key != "__metadata__")
    assert header[name]["data_offsets"][1] == end
    header[name]["data_offsets"][1] += 1 << 27
    header[name]["shape"][0] += 1 << 27
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])
    os.truncate(file, 8 + len(text) + end + (1 << 27))
    return header[name]["shape"][0]


def last_of(broken: Case, path: str) -> str:
    content = (broken.root / path).read_bytes()
    header = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
    header.pop("__metadata__", None)
    return max(header, key=lambda name: header[name]["data_offsets"])


@pytest.mark.parametrize("name", ["fireworks-arc_v1", "fireworks-arc_v2", "skyrl", "grail-v3"])
def test_a_payload_that_no_tensor_has_a_use_for_is_not_read_into_memory(case, name):
    """Files with holes cost whoever makes them nothing."""
    broken = case(name)
    if name == "grail-v3":
        os.truncate(broken.root / grail(130, "DELTA", "delta_sparse.bin.zst"), 1 << 27)
    elif name == "skyrl":
        key = last_of(broken, PAYLOAD)
        nbytes = lengthen(broken, PAYLOAD, key)

        def edit(document):
            row = next(row for row in document["tensors"] if row["payload_key"] == key)
            document["total_compressed_num_bytes"] += nbytes - row["compressed_num_bytes"]
            row["compressed_num_bytes"] = nbytes

        broken.edit_json(MANIFEST, edit)
    else:
        lengthen(broken, ARC_PART, last_of(broken, ARC_PART))
    tracemalloc.start()
    try:
        broken.refused(FormatError, "of weights is at most")
        assert tracemalloc.get_traced_memory()[1] < 1 << 26
    finally:
        tracemalloc.stop()


def test_fireworks_delta_that_became_weights_after_it_was_listed(case):
    broken = case("fireworks-arc_v2")
    store, layout = FilesystemStore(broken.root), interchange.get("fireworks")
    delta = next(at for at in layout.versions(store) if at.identity == "snap-9")
    for part in (broken.root / "snap-9").glob("*.safetensors"):
        shutil.copy(broken.root / "snap-8" / part.name, part)
    delta = replace(delta, objects=tuple(store.list("snap-9/")))  # files of the same sizes
    with pytest.raises(FormatError, match="snap-9: it changed while it was read"):
        apply(layout, store, delta, load(broken.expected / "snap-8.safetensors"))


def test_fireworks_request_of_another_encoding(case):
    broken = case("fireworks-arc_v2")
    request = {
        "previous_snapshot_identity": "snap-8",
        "compression_format": "arc_v1",
        "checksum_format": "alder32",
    }
    (broken.root / "snap-9" / "incremental_snapshot_metadata.json").write_text(json.dumps(request))
    broken.refused(FormatError, "compression_format must be 'arc_v2', found 'arc_v1'")


@pytest.mark.parametrize(
    "name", sorted(path.name for path in GOLDEN.iterdir() if not path.name.endswith(".expected"))
)
def test_a_file_that_is_cut_short_anywhere_is_never_read_as_whole(case, name):
    broken = case(name)
    for path in sorted(broken.root.rglob("*")):
        if path.suffix not in (".safetensors", ".zst") or not path.is_file():
            continue
        whole = path.read_bytes()
        for size in {0, 1, 7, len(whole) // 2, len(whole) - 1}:
            path.write_bytes(whole[:size])
            if broken.name.startswith("trl") and path.parts[-2:] == (
                "deltas",
                "step_000006.safetensors",
            ):
                continue
            with pytest.raises(SynclineError):
                broken.read_all()
        path.write_bytes(whole)
    broken.read_all()


@pytest.mark.parametrize(
    "name", sorted(path.name for path in GOLDEN.iterdir() if not path.name.endswith(".expected"))
)
def test_deltas_need_a_base_with_their_tensors(case, name):
    whole = case(name)
    store = FilesystemStore(whole.root)
    layout = interchange.get(name.partition("-")[0])
    delta = next(at for at in layout.versions(store) if at.kind == "delta")
    with pytest.raises(ConfigError, match="is a delta; pass its base"):
        next(layout.read(store, delta, None))
    with pytest.raises(LayoutError, match="no tensor"):
        apply(layout, store, delta, {})
