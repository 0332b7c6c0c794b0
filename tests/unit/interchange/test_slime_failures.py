"""Every silent failure that chains of deltas are known for, refused while following; each by its name.

After each refusal the engine serves, bit for bit, what it served before.
"""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import zstandard
from safetensors.numpy import load_file, save_file

from slime_oracle import (
    COMBINATIONS,
    INDEX,
    assert_holds,
    edit_header,
    edit_index,
    engine_of,
    model,
    reader,
    stepped,
    write_chain,
    write_delta,
    write_full,
)
from syncline import MemoryEngine, Receiver
from syncline.codecs.overwrite import Overwrite
from syncline.errors import (
    BaseVersionError,
    CodecError,
    ConfigError,
    FormatError,
    LayoutError,
    SynclineError,
    VerifyError,
)
from syncline.types import TensorMeta

BOTH = pytest.mark.parametrize("encoding", ["xor", "overwrite"])


class Case:
    """A run whose version 1 an engine has taken; a test breaks version 2 and sees it refused."""

    def __init__(self, run, rng, encoding="xor", checksum="xxh3-128", parts=2) -> None:
        self.run = run
        self.states = [model(rng)]
        for _ in range(2):
            self.states.append(stepped(self.states[-1], rng))
        write_chain(run, self.states[:2], encoding, checksum)
        self.engine = engine_of(self.states[0])
        self.receiver = Receiver(reader(run), self.engine, layout="slime")
        self.receiver.sync()
        self.second = write_delta(
            run, "000002", "000001", self.states[1], self.states[2], encoding, checksum, parts=parts
        )

    def refused(self, error: type[SynclineError], match: str, version: str | None = None) -> None:
        with pytest.raises(error, match=match):
            self.receiver.sync(version)
        assert_holds(self.engine, self.states[1])

    def taken(self) -> None:
        assert self.receiver.sync().identity == "000002"
        assert_holds(self.engine, self.states[2])

    def edit_payload(self, name: str, edit) -> None:
        for path in self.second.glob("*.safetensors"):
            tensors = load_file(path)
            if name in tensors:
                data = path.read_bytes()
                length = int.from_bytes(data[:8], "little")
                metadata = json.loads(data[8 : 8 + length])["__metadata__"]
                save_file({**tensors, name: edit(tensors[name])}, path, metadata)


@pytest.fixture
def case(tmp_path, rng) -> Case:
    return Case(tmp_path / "run", rng)


@BOTH
@pytest.mark.parametrize("reached", [1, 2, 3])
def test_a_restarted_run_under_the_same_numbers(tmp_path, rng, encoding, reached):
    run, case = tmp_path / "run", Case(tmp_path / "run", rng, encoding)
    case.taken()
    case.states[1] = case.states[2]
    shutil.rmtree(run)
    fresh = [case.states[0]]
    for _ in range(reached):
        fresh.append(stepped(fresh[-1], rng))
    write_chain(run, fresh, encoding)
    if reached == 1:
        case.refused(BaseVersionError, "not in this directory")
        return
    case.refused(VerifyError, "'000002' is not the one that the engine holds.*rewritten")


def test_a_restarted_run_is_noticed_by_a_new_receiver_too(case, rng):
    case.taken()
    case.states[1] = case.states[2]
    shutil.rmtree(case.run)
    other = [case.states[0], stepped(case.states[0], rng)]
    other.append(stepped(other[1], rng))
    write_chain(case.run, other)
    case.receiver = Receiver(reader(case.run), case.engine)
    case.refused(VerifyError, "rewritten")


def test_a_full_version_rewritten_under_the_same_number(tmp_path, rng):
    run, first = tmp_path / "run", model(rng)
    write_full(run, "weight_v000001", first)
    engine = MemoryEngine()
    receiver = Receiver(reader(run), engine)
    receiver.sync()
    shutil.rmtree(run)
    write_full(run, "weight_v000001", stepped(first, rng))
    with pytest.raises(VerifyError, match="rewritten"):
        receiver.sync()
    assert_holds(engine, first)


@BOTH
def test_a_missing_part(tmp_path, rng, encoding):
    case = Case(tmp_path / "run", rng, encoding)
    part = case.second / "model-00001-of-00002.safetensors"
    away = part.rename(tmp_path / "away")
    case.refused(FormatError, r"weight_v000002/.*weight_map names 'model-00001-of-00002.*not there")
    away.rename(part)
    case.taken()


def test_a_missing_part_that_the_index_does_not_name_either(case):
    document = json.loads((case.second / INDEX).read_text())
    gone = "model-00001-of-00002.safetensors"
    document["weight_map"] = {k: v for k, v in document["weight_map"].items() if v != gone}
    (case.second / INDEX).write_text(json.dumps(document))
    (case.second / gone).unlink()
    case.refused(FormatError, "say that there are 2 parts.*found 1")


def test_a_late_index(case, tmp_path):
    late = (case.second / INDEX).rename(tmp_path / "late")
    case.refused(BaseVersionError, "'000002' is not there, or not whole yet", "000002")
    assert case.receiver.sync().identity == "000001"  # the newest that is whole, never a full one
    assert_holds(case.engine, case.states[1])
    late.rename(case.second / INDEX)
    case.taken()


def test_an_index_cut_short(case):
    text = (case.second / INDEX).read_text()
    (case.second / INDEX).write_text(text[: len(text) // 2])
    case.refused(FormatError, r"weight_v000002/model.safetensors.index.json")


@pytest.mark.parametrize(("encoding", "checksum"), COMBINATIONS)
def test_a_local_tensor_that_lost_its_pages(tmp_path, rng, encoding, checksum):
    """The marker says 1, but a tensor is still at version 0: lost page cache, or an edited file."""
    case = Case(tmp_path / "run", rng, encoding, checksum)
    case.engine.bits("embed.weight")[:] = case.states[0]["embed.weight"].reshape(-1).view(np.uint32)
    case.states[1] = {**case.states[1], "embed.weight": case.states[0]["embed.weight"]}
    case.refused(VerifyError, rf"'embed.weight': expected {checksum} \w+, found \w+")


@BOTH
def test_a_damaged_payload_that_is_repaired_and_tried_again(tmp_path, rng, encoding):
    case = Case(tmp_path / "run", rng, encoding, parts=1)
    path = case.second / "model-00000-of-00001.safetensors"
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[-3] ^= 0x10
    path.write_bytes(bytes(damaged))
    for _ in range(2):
        case.refused(SynclineError, "model-00000-of-00001")
    path.write_bytes(whole)
    case.taken()


def test_a_damaged_position_inside_the_tensor_leaves_no_stray_byte(tmp_path, rng):
    case = Case(tmp_path / "run", rng, "overwrite", parts=1)

    def move_last_position(payload):
        content = bytearray(zstandard.ZstdDecompressor().decompress(payload.tobytes()))
        count = int.from_bytes(content[:4], "little")
        places = np.frombuffer(content, "<u4", count, 4)
        places[-1] = places[-1] + 1 if places[-1] + 1 < 2560 else places[-1] - 1
        return np.frombuffer(zstandard.ZstdCompressor().compress(bytes(content)), np.uint8)

    case.edit_payload("embed.weight", move_last_position)
    case.refused(SynclineError, "embed.weight")


@BOTH
def test_xor_applied_twice(tmp_path, rng, encoding):
    """Whoever has the version already, without knowing it, must not get its bits flipped back."""
    case = Case(tmp_path / "run", rng, encoding)
    unknowing = engine_of(case.states[1])
    receiver = Receiver(reader(case.run), unknowing)
    if encoding == "xor":
        with pytest.raises(VerifyError, match="made on other bits"):
            receiver.sync("000001")
        assert_holds(unknowing, case.states[1])
        return
    assert receiver.sync("000001").changed == 0
    assert_holds(unknowing, case.states[1])


def test_a_name_in_two_parts(case):
    """Tied copies on the last stage, or pipeline replicas: the second XOR would undo the first."""
    first, second = sorted(case.second.glob("*.safetensors"))
    tensors, name = load_file(second), next(iter(load_file(first)))
    data = second.read_bytes()
    metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    copy = load_file(first)[name]
    save_file({**tensors, name: copy}, second, {**metadata, name: "0" * 32})
    case.refused(
        FormatError, f"tensor '{name}' is in 'model-00001-of-00002.*weight_map says 'model-00000"
    )


def test_a_name_that_the_base_does_not_have(tmp_path, rng):
    states = [model(rng)]
    states.append(stepped(states[0], rng))
    run, without = tmp_path / "run", dict(states[0])
    del without["embed.weight"]
    write_chain(run, states)
    engine = engine_of(without)
    with pytest.raises(LayoutError, match=r"weight_v000001/.*'embed.weight' is not in the base"):
        Receiver(reader(run), engine).sync()
    assert_holds(engine, without)


def test_positions_of_32_bits_that_wrapped_in_a_large_tensor():
    large = TensorMeta("embed", "BF16", (1 << 16, 1 << 15))
    frame = zstandard.ZstdCompressor().compress(b"\1\0\0\0" + b"\7\0\0\0" + b"\1")
    with pytest.raises(CodecError, match="32 bits.*below 4294967296 bytes, found 4294967296"):
        next(iter(Overwrite().decode(large, frame, np.empty(0, np.uint16))))


def test_positions_that_fall(tmp_path, rng):
    case = Case(tmp_path / "run", rng, "overwrite", parts=1)

    def wrap(_):
        content = b"\2\0\0\0" + b"\7\0\0\0" + b"\3\0\0\0" + b"\1\2"
        return np.frombuffer(zstandard.ZstdCompressor().compress(content), np.uint8)

    case.edit_payload("layers.0.w", wrap)
    case.refused(CodecError, "'layers.0.w', encoding overwrite")


def test_a_file_of_payload_that_the_index_does_not_name(case):
    save_file({"layers.0.w": np.zeros(9, np.uint8)}, case.second / "extra.safetensors")
    case.refused(FormatError, "'layers.0.w' is in 'extra.safetensors', but weight_map says")


def test_a_file_that_does_not_hold_what_the_index_says(case):
    document = json.loads((case.second / INDEX).read_text())
    document["weight_map"]["ghost"] = "model-00000-of-00002.safetensors"
    (case.second / INDEX).write_text(json.dumps(document))
    case.refused(FormatError, "weight_map says that tensor 'ghost' is in")


def test_an_index_that_names_a_tensor_twice(case):
    text = (case.second / INDEX).read_text()
    name = next(iter(json.loads(text)["weight_map"]))
    twice = text.replace(
        '"weight_map": {', f'"weight_map": {{"{name}": "model-00001-of-00002.safetensors", '
    )
    (case.second / INDEX).write_text(twice)
    case.refused(FormatError, f"index.json: key '{name}' is there twice")


@pytest.mark.parametrize(
    "path",
    [
        "../weight_v000001/model-00000-of-00001.safetensors",
        "/etc/x.safetensors",
        ".x.safetensors",
        "x.bin",
        7,
    ],
)
def test_an_index_that_names_a_file_outside_the_directory(case, path):
    document = json.loads((case.second / INDEX).read_text())
    document["weight_map"]["norm"] = path
    (case.second / INDEX).write_text(json.dumps(document))
    case.refused(
        FormatError, r"index.json: weight_map\['norm'\] must be the name of a .safetensors file"
    )


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        (
            {"checksum_format": "crc32"},
            r"metadata.checksum_format must be one of xxh3-128, blake3, adler32",
        ),
        (
            {"checksum_format": "alder32"},
            "metadata.checksum_format must be one of .*found 'alder32'",
        ),
        ({"delta_encoding": "indices"}, "metadata.delta_encoding must be one of overwrite, xor"),
        (
            {"delta_encoding": "syncline"},
            "metadata.delta_encoding is 'syncline': only Syncline's own",
        ),
        ({"delta_encoding": ["xor"]}, "metadata.delta_encoding must be one of"),
        (
            {"compression_format": "lz4"},
            "metadata.compression_format must be one of zstd, found 'lz4'",
        ),
        ({"compression_format": None}, "metadata.compression_format is missing"),
        ({"base_version": None}, "metadata.base_version is missing"),
        ({"base_version": ""}, "metadata.base_version must be a string of 1 to 255"),
        ({"version": "\ud800"}, "metadata.version must be text that UTF-8 can hold"),
        ({"version": "a\nb"}, "metadata.version must be a string .* without control characters"),
        ({"version": "a" * 256}, "metadata.version must be at most 255 bytes"),
        ({"base_version": 1}, "metadata.base_version must be a string"),
        ({"base_version": "000002"}, "metadata.base_version is the version itself"),
        ({"version": "000003"}, "metadata.version must be that of its directory"),
        ({"threshold": "0.1"}, "metadata.threshold is not a known key"),
    ],
)
def test_an_index_that_this_reader_does_not_know(case, fields, match):
    edit_index(case.second, **fields)
    case.refused(FormatError, r"weight_v000002/model.safetensors.index.json: " + match)


@pytest.mark.parametrize("digest", ["12345", "123456789", "ABCDEF01", "305419896", "0x123456"])
def test_adler32_of_another_width_or_in_decimal(tmp_path, rng, digest):
    case = Case(tmp_path / "run", rng, "xor", "adler32", parts=1)
    path = case.second / "model-00000-of-00001.safetensors"
    edit_header(path, lambda header: header["__metadata__"].update({"layers.0.w": digest}))
    case.refused(
        FormatError, r"__metadata__\['layers.0.w'\] must be 8 lowercase hexadecimal digits"
    )


def test_a_digest_that_is_missing_or_of_no_tensor(case):
    path = case.second / "model-00000-of-00002.safetensors"
    whole = path.read_bytes()
    edit_header(path, lambda header: header["__metadata__"].popitem())
    case.refused(FormatError, "is missing: the digest of its new bytes")
    path.write_bytes(whole)
    edit_header(path, lambda header: header["__metadata__"].update(ghost="0" * 32))
    case.refused(FormatError, r"__metadata__\['ghost'\] names no tensor")


def test_a_digest_of_other_bytes(case):
    path = case.second / "model-00000-of-00002.safetensors"

    def flip(header):
        name = next(iter(header["__metadata__"]))
        header["__metadata__"][name] = "0" * 32

    edit_header(path, flip)
    case.refused(VerifyError, "expected xxh3-128 0+, found")


def test_a_payload_of_another_size_than_the_tensor(case):
    frame = zstandard.ZstdCompressor().compress(bytes(12))
    case.edit_payload("layers.0.w", lambda _: np.frombuffer(frame, np.uint8))
    case.refused(CodecError, "924 bytes must be in the zstd frame, it says 12")


def test_a_payload_that_is_no_row_of_bytes(case):
    case.edit_payload("layers.0.w", lambda payload: payload.reshape(1, -1))
    case.refused(FormatError, "must be U8 with one dimension")


def test_a_payload_that_would_unpack_to_far_more(tmp_path, rng):
    case = Case(tmp_path / "run", rng, "overwrite", parts=1)
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    case.edit_payload("layers.0.w", lambda _: np.frombuffer(bomb, np.uint8))
    case.refused(CodecError, "layers.0.w")


def test_a_file_cut_short(case):
    path = case.second / "model-00000-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    case.refused(
        FormatError, "weight_v000002/model-00000-of-00002.safetensors: the header describes"
    )


def test_two_directories_with_one_version(case):
    shutil.copytree(case.second, case.run / "copy")
    case.refused(FormatError, "version '000002' is there twice")


def test_bases_that_go_round_in_a_circle(case):
    edit_index(case.run / "weight_v000001", base_version="000002")
    case.refused(FormatError, "go round in a circle")


def test_a_store_of_two_layouts(case, monkeypatch):
    from syncline import interchange
    from syncline.interchange.slime import Slime

    class Other(Slime):
        name = "other"

    monkeypatch.setattr(interchange, "LAYOUTS", {"slime": Slime(), "other": Other()})
    with pytest.raises(
        FormatError, match="mixes layouts: expected one, found slime by 'weight_v000001"
    ):
        interchange.recognise(reader(case.run))


def test_a_store_of_no_layout(tmp_path):
    from syncline import interchange

    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(
        FormatError, match="expected versions in one of the layouts syncline, .*'notes.txt'"
    ):
        interchange.recognise(reader(tmp_path))
    with pytest.raises(FormatError, match="'notes.txt'"):
        Receiver(reader(tmp_path), MemoryEngine()).sync()
    with pytest.raises(ConfigError, match="layout: expected one of auto, syncline"):
        Receiver(reader(tmp_path), MemoryEngine(), layout="sticks")


def test_a_version_that_changes_between_two_readings(tmp_path, rng, monkeypatch):
    """A full version is read twice; a publisher that rewrites it in between is noticed."""
    run, first = tmp_path / "run", model(rng)
    write_full(run, "weight_v000001", first)
    engine = MemoryEngine()
    receiver = Receiver(reader(run), engine, layout="slime")

    def rewrite(step):
        if step.name == "pull.tensor_decoded":
            shutil.rmtree(run / "weight_v000001")
            write_full(
                run, "weight_v000001", {name: a + a.dtype.type(1) for name, a in first.items()}
            )

    receiver._observe = rewrite
    with pytest.raises(VerifyError, match="changed while it was read"):
        receiver.sync()
    assert engine.tensors() == {}
