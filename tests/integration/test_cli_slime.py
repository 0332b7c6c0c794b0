"""The command line on directories that a slime-family publisher wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from slime_oracle import INDEX, model, raw, stepped, write_chain, write_delta, write_full

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def states(rng):
    states = [model(rng)]
    for _ in range(2):
        states.append(stepped(states[-1], rng))
    return states


@pytest.fixture
def theirs(tmp_path, states) -> Path:
    """Two deltas on a base that is not in the directory."""
    write_chain(tmp_path / "theirs", states, checksum="adler32")
    return tmp_path / "theirs"


@pytest.fixture
def whole(tmp_path, states) -> Path:
    """A full version without digests, and a delta."""
    write_full(tmp_path / "whole", "weight_v000001", states[0])
    write_delta(tmp_path / "whole", "000002", "000001", states[0], states[1])
    return tmp_path / "whole"


def save(weights, directory: Path) -> Path:
    directory.mkdir()
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


def test_pull_says_which_layout_it_found_and_what_is_not_guaranteed(tmp_path, run, theirs, states):
    target = save(states[0], tmp_path / "ckpt")
    status, out, _ = run("pull", theirs, target, "--adopt")
    assert status == 0
    assert out.startswith(f"{target} holds version 000002 (slime), applied 2 versions: ")
    assert "not guaranteed: adler32 has 32 bits" in out
    assert "not guaranteed: the base '000000' is not in the directory" in out
    found = load_file(target / "model.safetensors")
    assert all(raw(found[name]).tobytes() == raw(states[2][name]).tobytes() for name in found)
    status, out, _ = run("pull", theirs, target, "--layout", "slime", "--json")
    report = json.loads(out)
    assert (report["layout"], report["identity"], report["applied"]) == ("slime", "000002", [])


def test_pull_takes_a_named_version(tmp_path, run, theirs, states):
    target = save(states[0], tmp_path / "ckpt")
    for name in ("000001", "2"):
        status, out, _ = run("pull", theirs, target, "--adopt", "--version", name)
        assert (status, f"{int(name):06d} (slime), applied 1 version:" in out) == (0, True)
    status, _, err = run("pull", theirs, target, "--version", "000007")
    assert (status, "version '000007' is not there" in err) == (1, True)


def test_log_and_show(run, theirs):
    status, out, _ = run("log", theirs)
    assert (status, "versions in the layout slime" in out) == (0, True)
    assert out.index("000002") < out.index("000001")
    rows = [json.loads(line) for line in run("log", theirs, "--json")[1].splitlines()]
    assert [(row["version"], row["base"]) for row in rows] == [
        ("000002", "000001"),
        ("000001", "000000"),
    ]
    status, out, _ = run("show", theirs, "1")
    assert (status, "version 000001 (delta) in the layout slime" in out) == (0, True)
    assert "embed.weight" in out
    assert "not guaranteed: no digest covers the index" in out
    shown = json.loads(run("show", theirs, "000002", "--json")[1])
    assert (shown["layout"], shown["checksum"], len(shown["tensors"])) == ("slime", "adler32", 3)


def test_verify_proves_by_digests_what_it_can(tmp_path, run, theirs, states):
    status, out, _ = run("verify", theirs, save(states[2], tmp_path / "right"))
    assert (status, "holds version 000002 (slime)" in out) == (0, True)
    assert "3 of 4 tensors proved" in out
    assert "tensors that no version here carries, 1 in all, such as norm" in out
    status, out, _ = run("verify", theirs, tmp_path / "right", "--version", "1", "--json")
    verdict = json.loads(out)
    assert (status, verdict["identical"], verdict["unproved"]) == (1, False, ["norm"])
    assert {item["problem"] for item in verdict["mismatches"]} == {"bits"}
    lacking = {name: array for name, array in states[2].items() if name != "embed.weight"}
    status, out, _ = run("verify", theirs, save(lacking, tmp_path / "lacking"))
    assert (status, "missing" in out) == (1, True)


def test_verify_compares_bits_where_a_full_version_has_no_digests(tmp_path, run, whole, states):
    assert run("verify", whole, save(states[1], tmp_path / "right"))[0] == 0
    wrong = {**states[1], "norm": states[1]["norm"] + np.uint8(1), "more": np.zeros(1, np.float32)}
    wrong["layers.0.w"] = wrong["layers.0.w"].reshape(7, 33)
    status, out, _ = run("verify", whole, save(wrong, tmp_path / "wrong"), "--json")
    problems = {item["name"]: item for item in json.loads(out)["mismatches"]}
    assert status == 1
    assert problems["norm"]["problem"] == "bits"
    assert problems["norm"]["changed"] == 5
    assert problems["more"]["problem"] == "extra"
    assert problems["layers.0.w"]["problem"] == "layout"


def test_fsck_counts_versions_and_names_what_the_layout_leaves_open(run, whole, theirs, states):
    status, out, _ = run("fsck", whole, "--deep")
    assert (status, "2 versions in the layout slime checked, 0 faults" in out) == (0, True)
    assert "note: guarantees: the full version has no digests" in out
    status, out, _ = run("fsck", theirs, "--json")
    report = json.loads(out)
    assert (report["layout"], report["versions"], report["ok"]) == ("slime", 2, True)
    assert any("'000000' is not here" in item["problem"] for item in report["findings"])


def test_fsck_finds_a_damaged_payload_and_an_unfinished_version(run, whole):
    part = next((whole / "weight_v000002").glob("*.safetensors"))
    data = bytearray(part.read_bytes())
    data[-2] ^= 1
    part.write_bytes(bytes(data))
    (whole / "weight_v000003").mkdir()
    (whole / "weight_v000003" / "model-00000-of-00001.safetensors").write_bytes(b"begun")
    status, out, _ = run("fsck", whole)
    assert (status, "weight_v000003/model-00000-of-00001.safetensors: of no version" in out) == (
        0,
        True,
    )
    status, out, _ = run("fsck", whole, "--deep")
    assert (status, "fault: 000002: weight_v000002/" in out) == (1, True)
    (whole / "weight_v000002" / INDEX).write_text("{")
    status, out, _ = run("fsck", whole)
    assert (status, "fault: slime: weight_v000002/model.safetensors.index.json" in out) == (1, True)


def test_diff_takes_a_directory_of_versions_for_its_newest(tmp_path, run, whole, states):
    status, out, _ = run("diff", save(states[0], tmp_path / "old"), whole)
    assert status == 0
    assert f"{whole}: version 000002 in the layout slime" in out
    changed = sum(
        int((raw(states[0][n]).view(f"u{a.itemsize}") != raw(a).view(f"u{a.itemsize}")).sum())
        for n, a in states[1].items()
    )
    assert f"in all: {changed:,} of " in out


def test_publish_for_slime_readers(tmp_path, run, states):
    first, second = save(states[0], tmp_path / "c0"), save(states[1], tmp_path / "c1")
    store = tmp_path / "run"
    options = ("--layout", "slime", "--checksum", "adler32")
    assert run("publish", store, first, *options)[0] == 0
    assert run("publish", store, second, *options, "--encoding", "overwrite")[0] == 0
    metadata = json.loads((store / "weight_v000002" / INDEX).read_text())["metadata"]
    assert (metadata["delta_encoding"], metadata["checksum_format"]) == ("overwrite", "adler32")
    status, out, _ = run("pull", store, tmp_path / "new", "--layout", "slime")
    assert (status, "holds version 000002 (slime), applied 2 versions" in out) == (0, True)
    status, out, _ = run("pull", store, tmp_path / "ours")
    assert (status, "holds version 2, applied 1, 2" in out) == (0, True)
    status, _, err = run("publish", store, second, *options, "--encoding", "tight")
    assert (status, "expected encoding 'xor' or 'overwrite'" in err) == (1, True)
    status, _, err = run("pull", store, tmp_path / "ours", "--version", "two")
    assert (status, "in a run of Syncline's own, found 'two'" in err) == (1, True)


def test_a_store_of_no_layout_is_one_line(tmp_path, run):
    (tmp_path / "junk").mkdir()
    (tmp_path / "junk" / "notes.txt").write_text("hello")
    for command in (("log",), ("fsck",), ("show", "1")):
        status, _, err = run(command[0], tmp_path / "junk", *command[1:])
        assert (status, err.startswith("error: expected versions in one of the layouts")) == (
            1,
            True,
        )
