"""Runs that are moved between layouts: every pair, bit for bit, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from layout_reading import assert_same, load
from syncline import CheckpointDir, MemoryEngine, MemoryStore, Publisher, Receiver, interchange
from syncline.errors import (
    BaseVersionError,
    CodecError,
    ConfigError,
    FormatError,
    StoreError,
    VerifyError,
)
from syncline.stores import FilesystemStore
from syncline.sync.conversion import convert

GOLDEN = Path(__file__).parents[2] / "golden" / "layouts"
SOURCES = sorted(path.name for path in GOLDEN.iterdir() if not path.name.endswith(".expected"))
TARGETS = ("syncline", "slime", "fireworks")


def base_of(name: str) -> Path:
    return GOLDEN / f"{name}.expected" / "base.safetensors"


def follow(store, tmp_path: Path, base: Path, identity: str, *, layout: str):
    """Return the weights of a version, as a receiver of a checkpoint directory gets them."""
    target = tmp_path / f"follow-{layout}-{identity}"
    target.mkdir()
    shutil.copy(base, target / "model.safetensors")
    Receiver(store, CheckpointDir(target, adopt=True), layout=layout, verify="full").sync(identity)
    return load(target)


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("name", SOURCES)
def test_every_version_is_the_same_in_the_other_layout(tmp_path, name, to):
    source, target = FilesystemStore(GOLDEN / name), FilesystemStore(tmp_path / "out")
    report = convert(source, target, to, base=base_of(name), work_dir=tmp_path)
    assert (report.source, report.target) == (name.partition("-")[0], to)
    assert report.missing
    assert interchange.recognise(target) == to
    for item in report.versions:
        wanted = load(GOLDEN / f"{name}.expected" / f"{item.source}.safetensors")
        assert_same(follow(target, tmp_path, base_of(name), item.target, layout=to), wanted)
        assert item.target_bytes > 0 or not item.changed
    assert report.versions[1].changed > 50
    assert json.loads(json.dumps(report.as_dict()))["target"] == to
    assert (
        sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("syncline")) == []
    )


@pytest.mark.parametrize("through", ["slime", "fireworks"])
def test_there_and_back_is_the_same_bit_for_bit(tmp_path, rng, through):
    ours, theirs, back = MemoryStore(), MemoryStore(), MemoryStore()
    publisher = Publisher(ours, anchor_every=2)
    weights = {
        "a": rng.integers(0, 1 << 16, (40, 30), np.uint16).view(np.float16),
        "b": rng.integers(0, 1 << 32, (7,), np.uint32).view(np.float32),
        "zero": np.array(1.5, np.float32),
        "none": np.zeros((0, 3), np.int64),
    }
    states = []
    for _ in range(5):
        weights = {name: array.copy() for name, array in weights.items()}
        weights["a"].reshape(-1).view(np.uint16)[rng.integers(0, 1200, 30)] ^= 1
        weights["zero"][...] += 1
        publisher.publish(weights)
        states.append(weights)
    first = convert(ours, theirs, through)
    second = convert(theirs, back, "syncline")
    assert [item.kind for item in first.versions] == [item.kind for item in second.versions]
    assert [item.kind[0] for item in first.versions] == list("fddfddf")
    engine = MemoryEngine()
    receiver = Receiver(back, engine, verify="full")
    for item, number in zip(second.versions, (0, 1, 2, 2, 3, 4, 4), strict=True):
        receiver.sync(item.target)
        for name, array in states[number].items():
            assert engine.view(name).tobytes() == array.tobytes()


def test_names_become_numbers_for_readers_that_count(tmp_path):
    target = MemoryStore()
    report = convert(FilesystemStore(GOLDEN / "trl-v1"), target, "slime")
    assert [item.target for item in report.versions] == ["000004", "000005", "000006", "000007"]
    assert {info.key.partition("/")[0] for info in target.list()} == {
        f"weight_v{number:06d}" for number in (4, 5, 6, 7)
    }
    fireworks = convert(FilesystemStore(GOLDEN / "trl-v1"), MemoryStore(), "fireworks")
    assert fireworks.versions[0].target == "step_000004"


def test_names_that_do_not_count_stay_as_they_are(tmp_path):
    root = tmp_path / "run"
    for old, new in (("snap-8", "a"), ("snap-9", "b"), ("snap-10", "c"), ("snap-11", "d")):
        shutil.copytree(GOLDEN / "fireworks-arc_v2" / old, root / new)
    report = convert(FilesystemStore(root), MemoryStore(), "slime")
    assert [item.target for item in report.versions] == ["a", "b", "c", "d"]
    for old, new in (("a", "w-4"), ("b", "x-3"), ("c", "y-2"), ("d", "z-1")):
        (root / old).rename(root / new)
    report = convert(FilesystemStore(root), MemoryStore(), "slime")
    assert [item.target for item in report.versions] == ["w-4", "x-3", "y-2", "z-1"]


def test_two_layouts_in_one_place_are_told_apart_by_name(tmp_path):
    root = tmp_path / "run"
    shutil.copytree(GOLDEN / "trl-v1", root)
    shutil.copytree(GOLDEN / "grail-v2", root, dirs_exist_ok=True)
    with pytest.raises(
        FormatError, match="mixes layouts: expected one, found trl by 'anchors/step"
    ):
        convert(FilesystemStore(root), MemoryStore(), "slime")
    report = convert(FilesystemStore(root), MemoryStore(), "slime", layout="grail")
    assert [item.target for item in report.versions] == ["000100", "000130", "000160", "000190"]


def test_encoding_and_checksum_are_as_asked_for(tmp_path):
    source, target = FilesystemStore(GOLDEN / "fireworks-arc_v1"), MemoryStore()
    convert(source, target, "slime", encoding="overwrite", checksum="adler32")
    last = interchange.get("slime").versions(target)[-1]
    assert (last.encoding, last.checksum, last.base) == ("overwrite", "adler32", "000010")
    with pytest.raises(ConfigError, match="checksum"):
        convert(source, MemoryStore(), "slime", checksum="md5")
    with pytest.raises(ConfigError, match="SHA-256 and fingerprints alone"):
        convert(source, MemoryStore(), "syncline", checksum="adler32")
    with pytest.raises(ConfigError, match="'arc_v2', found 'arc_v3'"):
        convert(source, MemoryStore(), "fireworks", encoding="arc_v3")


def test_the_files_of_the_base_are_mirrored_for_fireworks(tmp_path):
    base = tmp_path / "base"
    shutil.copytree(GOLDEN / "fireworks-arc_v2" / "snap-8", base)
    places = {name: path.name for path in base.glob("*.safetensors") for name in load(path)}
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    out = tmp_path / "out"
    convert(FilesystemStore(GOLDEN / "skyrl"), FilesystemStore(out), "fireworks", base=base)
    for identity in ("00000001", "00000003"):
        found = {
            name: path.name
            for path in (out / identity).glob("*.safetensors")
            for name in load(path)
        }
        assert found == places
        request = json.loads((out / identity / "incremental_snapshot_metadata.json").read_text())
        assert request["compression_format"] == "arc_v2"
        assert request["previous_snapshot_identity"] == f"{int(identity) - 1:08d}"


def test_a_chain_that_begins_with_a_delta_needs_its_base():
    source = FilesystemStore(GOLDEN / "skyrl")
    with pytest.raises(ConfigError, match="pass base"):
        convert(source, MemoryStore(), "slime")
    with pytest.raises(VerifyError, match="made on other bits than the base's"):
        convert(
            source, MemoryStore(), "slime", base=GOLDEN / "skyrl.expected" / "00000001.safetensors"
        )


@pytest.mark.parametrize("to", ["trl", "grail", "skyrl"])
def test_layouts_that_nobody_reads_are_not_written(to):
    target = MemoryStore()
    with pytest.raises(ConfigError, match=f"layout '{to}' is only read"):
        convert(FilesystemStore(GOLDEN / "trl-v1"), target, to)
    with pytest.raises(ConfigError, match="layout must be one of"):
        convert(FilesystemStore(GOLDEN / "trl-v1"), target, "sticks")
    assert target.list() == []


def test_a_target_that_is_not_empty_is_left_alone():
    target = MemoryStore()
    target.put("notes.txt", [b"mine"])
    with pytest.raises(ConfigError, match="holds 1 objects already"):
        convert(FilesystemStore(GOLDEN / "trl-v1"), target, "slime")
    assert [info.key for info in target.list()] == ["notes.txt"]


def test_sources_without_versions_or_of_another_layout():
    with pytest.raises(StoreError, match="no HEAD.json in a memory store"):
        convert(MemoryStore(), MemoryStore(), "slime")
    with pytest.raises(BaseVersionError, match="nothing to convert"):
        convert(FilesystemStore(GOLDEN / "trl-v1"), MemoryStore(), "slime", layout="grail")
    store = MemoryStore()
    store.put("notes.txt", [b"mine"])
    with pytest.raises(FormatError, match="found 1 objects"):
        convert(store, MemoryStore(), "slime")


def test_two_chains_are_not_taken_for_one(tmp_path):
    root = tmp_path / "run"
    shutil.copytree(GOLDEN / "skyrl", root)
    manifest = root / "delta-00000003" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "base_version": 1}))
    with pytest.raises(BaseVersionError, match="'00000003' is made on '00000001'"):
        convert(FilesystemStore(root), MemoryStore(), "slime", base=base_of("skyrl"))


class Bending(MemoryStore):
    """A store that keeps something else than it was given."""

    def put(self, key, chunks):
        content = b"".join(bytes(chunk) for chunk in chunks)
        if key.endswith("5/model-00000-of-00001.safetensors"):
            content = content[:-1] + bytes([content[-1] ^ 1])
        super().put(key, [content])


def test_what_was_written_is_read_back(tmp_path):
    with pytest.raises((VerifyError, CodecError, FormatError)):
        convert(FilesystemStore(GOLDEN / "trl-v1"), Bending(), "slime")


class BendingFull(MemoryStore):
    """Full versions of the slime layout without digests are only proved by reading them back."""

    def put(self, key, chunks):
        content = b"".join(bytes(chunk) for chunk in chunks)
        if key.startswith("weight_v000004/model-"):
            content = content[:-1] + bytes([content[-1] ^ 1])
        super().put(key, [content])


def test_a_full_version_is_compared_bit_by_bit():
    with pytest.raises(VerifyError, match="was read back with other bits than 'step_000004' has"):
        convert(FilesystemStore(GOLDEN / "trl-v1"), BendingFull(), "slime")


def test_progress_reaches_the_end():
    steps = []
    convert(FilesystemStore(GOLDEN / "grail-v2"), MemoryStore(), "fireworks", observe=steps.append)
    assert [step.name for step in steps] == ["convert.version"] * 4
    assert steps[-1].done_bytes == steps[-1].total_bytes > steps[0].done_bytes > 0
