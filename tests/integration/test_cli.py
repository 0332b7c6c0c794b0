"""The command line as a person meets it: results, JSON, one-line errors, exit statuses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

Run = Callable[..., tuple[int, str, str]]


def checkpoint(directory: Path, value: float) -> Path:
    directory.mkdir()
    w = np.linspace(-1, 1, 4096, dtype=np.float32).reshape(64, 64)
    w[1, :5] += value
    save_file({"w": w, "b": np.ones(3, np.float16)}, directory / "model.safetensors")
    (directory / "config.json").write_text('{"model_type": "none"}')
    return directory


@pytest.fixture
def store(tmp_path: Path, run: Run) -> Path:
    """Three versions: full, delta, delta."""
    for number in range(3):
        status, _, err = run(
            "publish", tmp_path / "store", checkpoint(tmp_path / f"c{number}", number)
        )
        assert (status, err) == (0, "")
    return tmp_path / "store"


def test_publish_says_what_it_did(store: Path, run: Run, tmp_path: Path) -> None:
    status, out, _ = run("publish", store, checkpoint(tmp_path / "c3", 9))
    assert status == 0
    assert out.startswith("version 4 (delta): 5 of 4,099 elements changed")
    status, out, _ = run("publish", store, tmp_path / "c3", "--full", "--json")
    report = json.loads(out)
    assert (report["version"], report["kind"], report["full_bytes"]) == (5, "full", 4096 * 4 + 6)


def test_publish_with_a_base_makes_it_version_1(run: Run, tmp_path: Path) -> None:
    old, new = checkpoint(tmp_path / "old", 0), checkpoint(tmp_path / "new", 1)
    status, out, _ = run("publish", tmp_path / "s", new, "--base", old, "--json")
    report = json.loads(out)
    assert (status, report["version"], report["kind"], report["changed"]) == (0, 2, "delta", 5)


@pytest.mark.parametrize("mode", ["in_place", "swap"])
def test_pull_makes_a_complete_checkpoint_and_follows(
    store: Path, run: Run, tmp_path: Path, mode: str
) -> None:
    engine = tmp_path / "engine"
    assert run("pull", store, engine, "--version", 1, "--mode", mode)[0] == 0
    assert (engine / "config.json").read_text() == '{"model_type": "none"}'
    status, out, _ = run("pull", store, engine, "--mode", mode)
    assert status == 0
    assert "holds version 3, applied 2, 3" in out
    assert run("pull", store, engine, "--mode", mode)[1].count("already there") == 1
    found = load_file(engine / "model.safetensors")
    wanted = load_file(tmp_path / "c2" / "model.safetensors")
    assert {n: a.tobytes() for n, a in found.items()} == {n: a.tobytes() for n, a in wanted.items()}


def test_log_and_show(store: Path, run: Run) -> None:
    status, out, _ = run("log", store, "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert [(row["version"], row["kind"]) for row in rows] == [
        (3, "delta"),
        (2, "delta"),
        (1, "full"),
    ]
    assert status == 0
    assert "delta" in run("log", store)[1]
    status, out, _ = run("show", store, 2, "--json")
    tensors = {row["name"]: row for row in json.loads(out)["tensors"]}
    assert tensors["b"]["encoding"] is None
    assert (tensors["w"]["encoding"], tensors["w"]["changed"]) == ("tight", 5)
    assert 0 < tensors["w"]["payload_bytes"] < 100
    assert "tight" in run("show", store, 2)[1]


def test_verify_names_what_differs_and_how_many_elements(
    store: Path, run: Run, tmp_path: Path
) -> None:
    engine = tmp_path / "engine"
    run("pull", store, engine)
    status, out, _ = run("verify", store, engine)
    assert (status, "holds exactly version 3" in out) == (0, True)
    wrong = tmp_path / "wrong"
    shutil.copytree(tmp_path / "c2", wrong)
    w = load_file(wrong / "model.safetensors")
    w["w"].reshape(-1)[[7, 9]] += 1
    save_file(w, wrong / "model.safetensors")
    (wrong / "config.json").write_text("{}")
    status, out, _ = run("verify", store, wrong, "--json")
    found = json.loads(out)
    assert (status, found["identical"]) == (1, False)
    assert [(m["name"], m["problem"], m["changed"]) for m in found["mismatches"]] == [
        ("w", "bits", 2),
        ("config.json", "file", None),
    ]
    assert "is not version 3" in run("verify", store, wrong)[1]


def test_verify_tells_a_directory_that_is_behind_from_one_that_is_damaged(
    store: Path, run: Run, tmp_path: Path
) -> None:
    engine = tmp_path / "engine"
    run("pull", store, engine, "--version", 1)
    assert "by its own account it holds version 1" in run("verify", store, engine)[1]
    run("pull", store, engine)
    save_file(load_file(tmp_path / "c0" / "model.safetensors"), engine / "model.safetensors")
    assert "`pull --repair` puts right" in run("verify", store, engine)[1]
    assert "`pull --adopt`" in run("verify", store, tmp_path / "c0")[1]
    run("pull", store, engine, "--repair")
    assert run("verify", store, engine)[0] == 0


def test_log_names_the_encodings_that_versions_have(store: Path, run: Run) -> None:
    rows = [json.loads(line) for line in run("log", store, "--json")[1].splitlines()]
    assert [row["encodings"] for row in rows] == [["tight"], ["tight"], ["full"]]


def test_fsck_says_how_engines_get_round_a_damaged_version(
    store: Path, run: Run, tmp_path: Path
) -> None:
    newest = tmp_path / "c2"
    next((store / "weight_v000002").glob("*.safetensors")).unlink()
    status, out, _ = run("fsck", store)
    assert (status, "--base CHECKPOINT --full" in out) == (1, True)
    assert run("publish", store, newest, "--base", newest, "--full")[0] == 0
    assert run("pull", store, tmp_path / "engine")[0] == 0
    assert run("verify", store, tmp_path / "engine")[0] == 0


def test_fsck_finds_a_damaged_part(store: Path, run: Run) -> None:
    status, out, _ = run("fsck", store, "--deep")
    assert (status, out) == (0, "3 versions checked, 0 faults\n")
    part = store / "weight_v000002" / "model-00000-of-00001.safetensors"
    raw = bytearray(part.read_bytes())
    raw[-1] ^= 1
    part.write_bytes(raw)
    status, out, _ = run("fsck", store, "--json")
    found = json.loads(out)
    assert (status, found["ok"]) == (1, False)
    assert [f["where"] for f in found["findings"]] == [
        "weight_v000002/model-00000-of-00001.safetensors"
    ]


def test_diff_predicts_and_recommends(run: Run, tmp_path: Path) -> None:
    old, new = checkpoint(tmp_path / "old", 0), checkpoint(tmp_path / "new", 1e-7)
    status, out, _ = run("diff", old, new, "--json")
    found = json.loads(out)
    assert status == 0
    assert found["changed"] == sum(found["steps"].values()) == 5
    assert found["recommended"] == "auto"
    assert set(found["predicted_bytes"]) >= {"full", "planes", "xor", "overwrite", "packed", "auto"}
    assert "recommended: --encoding auto" in run("diff", old, new)[1]


def test_errors_are_one_line_and_status_1(store: Path, run: Run, tmp_path: Path) -> None:
    foreign = tmp_path / "photos"
    foreign.mkdir()
    (foreign / "a.jpg").write_bytes(b"x")
    for arguments in (
        ("pull", store, foreign),
        ("pull", store, tmp_path / "engine", "--version", 99),
        ("log", tmp_path / "nothing"),
        ("publish", foreign, tmp_path / "c0"),
        ("verify", store, foreign),
        ("show", store, 99),
    ):
        status, out, err = run(*arguments)
        assert (status, out) == (1, ""), arguments
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert "Traceback" not in err
        status, out, _ = run(*arguments, "--json")
        assert set(json.loads(out)) == {"error", "message"}
    assert [path.name for path in foreign.iterdir()] == ["a.jpg"]


def test_wrong_usage_is_status_2(run: Run, tmp_path: Path) -> None:
    for arguments in (
        ("pull",),
        ("nonsense",),
        ("publish", tmp_path / "s", tmp_path / "missing"),
        ("publish", tmp_path / "s", tmp_path, "--encoding", "gzip"),
        ("pull", tmp_path / "s", tmp_path / "d", "--layout", "sticks"),
    ):
        assert run(*arguments)[0] == 2, arguments


def test_full_standard_output_is_one_line_and_no_traceback(store: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "syncline.cli", "log", str(store), "--json"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
