"""The command line on every golden directory: it says which layout it found, and what it found there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from layout_reading import assert_same, load
from syncline.cli import main

GOLDEN = Path(__file__).parents[1] / "golden" / "layouts"
NAMES = sorted(path.name for path in GOLDEN.iterdir() if not path.name.endswith(".expected"))
LAST = {"trl": "step_000007", "grail": "190", "skyrl": "00000003", "fireworks": "snap-11"}
NEVER_CHANGED = {"skyrl": ["model.layers.0.none"]}
"""What no delta carries, where there is no full version either."""


@pytest.fixture
def run(capsys):
    def call(*arguments: object, status: int = 0) -> str:
        try:
            main([str(argument) for argument in arguments])
            code = 0
        except SystemExit as ended:
            code = ended.code
        captured = capsys.readouterr()
        assert code == status, captured.out + captured.err
        return captured.out

    return call


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


def expected(name: str, identity: str) -> Path:
    return GOLDEN / f"{name}.expected" / f"{identity}.safetensors"


def test_log_and_show(run, name):
    layout = name.partition("-")[0]
    rows = [json.loads(line) for line in run("log", GOLDEN / name, "--json").splitlines()]
    assert rows[0]["version"] == LAST[layout]
    assert {row["layout"] for row in rows} == {layout}
    assert f"versions in the layout {layout}" in run("log", GOLDEN / name)
    shown = json.loads(run("show", GOLDEN / name, rows[1]["version"], "--json"))
    assert shown["layout"] == layout
    assert shown["missing"]
    assert "model.embed.weight" in {tensor["name"] for tensor in shown["tensors"]}
    assert f"in the layout {layout}" in run("show", GOLDEN / name, rows[1]["version"])


def test_fsck(run, name):
    found = json.loads(run("fsck", GOLDEN / name, "--deep", "--json"))
    assert (found["layout"], found["ok"]) == (name.partition("-")[0], True)


def test_fsck_finds_a_fault(run, name, tmp_path):
    broken = tmp_path / "run"
    shutil.copytree(GOLDEN / name, broken)
    path = max(path for path in broken.rglob("*") if path.suffix in (".safetensors", ".zst"))
    path.write_bytes(path.read_bytes()[:-1])
    found = json.loads(run("fsck", broken, "--layout", name.partition("-")[0], "--json", status=1))
    assert path.name in json.dumps(found["findings"])


def test_verify(run, name, tmp_path):
    """A directory that holds the version passes; one bit more does not, where that can be known."""
    layout = name.partition("-")[0]
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    weights = directory / "model.safetensors"
    shutil.copy(expected(name, LAST[layout]), weights)
    found = json.loads(run("verify", GOLDEN / name, directory, "--json"))
    assert (found["layout"], found["identical"]) == (layout, True)
    assert found["unproved"] == NEVER_CHANGED.get(layout, [])
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    found = json.loads(run("verify", GOLDEN / name, directory, "--json", status=1))
    assert [item["problem"] for item in found["mismatches"]] == ["bits"]


def test_verify_without_digests_and_without_a_full_version(run, tmp_path):
    """Nothing says what the tensors must be: they are not called proved."""
    source = tmp_path / "run"
    shutil.copytree(GOLDEN / "trl-v1", source)
    shutil.rmtree(source / "anchors")
    found = json.loads(run("verify", source, expected("trl-v1", "step_000007"), "--json"))
    assert len(found["unproved"]) == 3


def test_pull_and_diff(run, name, tmp_path):
    layout = name.partition("-")[0]
    target = tmp_path / "checkpoint"
    arguments = ["pull", GOLDEN / name, target]
    if layout == "skyrl":
        target.mkdir()
        shutil.copy(expected(name, "base"), target / "model.safetensors")
        arguments.append("--adopt")
    out = run(*arguments)
    assert f"({layout})" in out
    assert "not guaranteed" in out
    assert_same(load(target), load(expected(name, LAST[layout])))
    if layout != "skyrl":
        compared = run("diff", GOLDEN / name, target)
        assert f"version {LAST[layout]} in the layout {layout}" in compared
        found = json.loads(run("diff", GOLDEN / name, target, "--json"))
        assert found["changed"] == 0


def test_convert(run, tmp_path):
    found = json.loads(
        run("convert", GOLDEN / "trl-v1", tmp_path / "out", "--to", "fireworks", "--json")
    )
    assert [item["target"] for item in found["versions"]][-1] == "step_000007"
    assert found["missing"]
    rows = run("log", tmp_path / "out", "--json").splitlines()
    assert json.loads(rows[0])["layout"] == "fireworks"


@pytest.mark.parametrize("target", [".", "inner/deep", "../"])
def test_convert_keeps_source_and_target_apart(tmp_path, capsys, target) -> None:
    source = tmp_path / "outer" / "run"
    shutil.copytree(GOLDEN / "skyrl", source)
    before = sorted(path.name for path in source.rglob("*"))
    with pytest.raises(SystemExit) as ended:
        main(["convert", str(source), str(source / target), "--to", "syncline"])
    assert ended.value.code == 1
    assert "expected a directory apart from SRC" in capsys.readouterr().err
    assert sorted(path.name for path in source.rglob("*")) == before
