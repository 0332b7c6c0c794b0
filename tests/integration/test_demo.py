"""The whole demo on the tiny model: two processes, real versions, the verdict, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import syncline.demo
from syncline.cli import main
from syncline.demo import DemoConfig, DemoResult, run
from syncline.demo.rollout import EngineProcess, RolloutEngine, RolloutRequest
from syncline.demo.session import working_directory
from syncline.errors import ConfigError, PeerLostError

pytest.importorskip("transformers")

FLIPPING = Path(__file__).with_name("flipping_engine.py")
FLIPPED = "model.layers.1.mlp.down_proj.weight"


def test_the_engine_ends_bit_identical_and_everything_is_kept_in_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    main(["demo", "--tiny", "--steps", "4", "--out", str(out), "--json"])

    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["kind"] for line in lines] == ["base", *["step"] * 4, "result"]
    assert lines[-1]["bit_identical"] is True
    assert lines[-1]["tensors"] == lines[0]["tensors"] == 20
    assert [line["version"] for line in lines[1:-1]] == [2, 3, 4, 5]
    for line in lines[1:-1]:
        assert 0 < line["changed"] < line["total"]
        assert 0 < line["payload_bytes"] < line["full_bytes"]
        assert 0.0 <= line["reward"] <= 1.0
    assert sorted(path.name for path in out.iterdir()) == [
        *("base", "engine.log", "store", "syncline-demo.png"),
    ]


def test_a_single_flipped_bit_is_named_and_is_exit_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(base: Path, store: str, log: Path) -> RolloutEngine:
        return EngineProcess([sys.executable, str(FLIPPING), str(base), store], log=log)

    def run_with_it(config: DemoConfig) -> DemoResult:
        return run(config, start)

    monkeypatch.setattr(syncline.demo, "run", run_with_it)
    with pytest.raises(SystemExit) as stopped:
        main(["demo", "--tiny", "--steps", "1", "--out", str(tmp_path / "out"), "--json"])
    assert stopped.value.code == 1
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["bit_identical"] is False
    assert list(last["differences"]) == [FLIPPED]


class LostInTheSecondRollout(EngineProcess):
    rollouts = 0

    def rollout(self, request: RolloutRequest) -> list[list[list[int]]]:
        self.rollouts += 1
        if self.rollouts == 2:
            os.kill(self.pid, signal.SIGKILL)
        return super().rollout(request)


def test_an_engine_that_dies_on_the_way_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def start(base: Path, store: str, log: Path) -> RolloutEngine:
        return LostInTheSecondRollout(
            [sys.executable, "-m", "syncline.demo.engine", str(base), store], log=log
        )

    with pytest.raises(PeerLostError, match="status -9 while the trainer waited for 'rollout'"):
        run(DemoConfig(tiny=True, steps=3, json=True), start)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("send", "number", "status", "last_words"),
    [
        (os.killpg, signal.SIGINT, 130, "error: interrupted"),
        (os.kill, signal.SIGTERM, -signal.SIGTERM, ""),
    ],
    ids=["ctrl-c to both", "terminate the trainer"],
)
def test_a_signal_leaves_no_process_and_no_file(
    send: Callable, number: int, status: int, last_words: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "syncline.cli", "demo", "--tiny", "--steps", "100000"]
    with subprocess.Popen(
        [*command, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        start_new_session=True,
        text=True,
    ) as process:
        kinds = [json.loads(process.stdout.readline())["kind"] for _ in range(3)]
        assert kinds == ["base", "step", "step"]
        send(process.pid, number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == status
    assert errors.strip() == last_words
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    for taken in (tmp_path, tmp_path / "mine"):
        with (
            pytest.raises(ConfigError, match="expected a new or empty directory"),
            working_directory(taken),
        ):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
