"""The demo with the model that it makes itself: two processes, a store between them, and the proof."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from syncline.demo import DemoConfig, run
from syncline.demo.identity import differences
from syncline.demo.rollout import EngineProcess, RolloutEngine
from syncline.demo.run import start_process
from syncline.errors import ConfigError, PeerLostError, TransportTimeoutError, VerifyError

pytest.importorskip("transformers")

CONFIG = {"tiny": True, "steps": 2, "prompts": 4, "samples": 4, "max_new_tokens": 4, "json": True}

FLIPPING = """
import sys
from pathlib import Path
from syncline.demo.engine import TransformersEngine, serve
import torch

class Flipping(TransformersEngine):
    def digests(self):
        bits = next(self.model.parameters()).data.view(torch.int16).reshape(-1)
        bits[3] ^= 1
        return super().digests()

serve(Flipping(Path(sys.argv[1]), sys.argv[2]), sys.stdin, sys.stdout)
"""


def lines(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


def test_engine_process_ends_bit_identical(tmp_path: Path) -> None:
    """As a person runs it: the command line, JSON, a directory that is kept."""
    command = [sys.executable, "-m", "syncline.cli", "demo", "--tiny", "--steps", "3", "--json"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "kept")],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = lines(done.stdout)
    assert [line["kind"] for line in found] == ["base", "step", "step", "step", "result"]
    assert found[-1]["bit_identical"] is True
    assert found[-1]["differences"] == {}
    steps = found[1:-1]
    assert all(0 < step["changed"] <= step["total"] for step in steps)  # type: ignore[operator]
    assert all(0 <= step["reward"] <= 1 for step in steps)  # type: ignore[operator]
    assert (tmp_path / "kept" / "syncline-demo.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "kept" / "base" / "model.safetensors").exists()


def test_one_flipped_bit_in_the_engine_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(base: Path, store: str, log: Path) -> RolloutEngine:
        return EngineProcess([sys.executable, "-c", FLIPPING, str(base), store], log=log)

    with pytest.raises(VerifyError, match="1 of 20 that are not"):
        run(DemoConfig(**CONFIG, out=tmp_path / "out"), start)
    result = lines(capsys.readouterr().out)[-1]
    assert result["bit_identical"] is False
    assert len(result["differences"]) == 1  # type: ignore[arg-type]


def test_engine_that_dies_is_a_clear_error(tmp_path: Path) -> None:
    started: list[EngineProcess] = []

    def start(base: Path, store: str, log: Path) -> RolloutEngine:
        engine = start_process(base, store, log)
        assert isinstance(engine, EngineProcess)
        started.append(engine)
        rollout = engine.rollout

        def rollout_after_death(request: object) -> object:
            os.kill(engine._process.pid, signal.SIGKILL)
            return rollout(request)  # type: ignore[arg-type]

        engine.rollout = rollout_after_death  # type: ignore[method-assign, assignment]
        return engine

    with pytest.raises(PeerLostError, match="ended with status -9 while the trainer waited"):
        run(DemoConfig(**CONFIG, out=tmp_path / "out"), start)
    assert started[0]._process.poll() == -9


def test_engine_that_says_nothing_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with (
        EngineProcess(command, log=tmp_path / "log", timeout_s=0.2) as engine,
        pytest.raises(TransportTimeoutError, match="did not answer 'start' within"),
    ):
        engine.wait_until_ready()
    assert engine._process.poll() is not None


def test_engine_ends_when_the_trainer_is_killed(tmp_path: Path) -> None:
    """The engine's standard input ends with the trainer, however that dies."""
    code = (
        "import subprocess, sys, time; "
        "p = subprocess.Popen([sys.executable, '-c', 'import sys; sys.stdin.read()'], "
        "stdin=subprocess.PIPE); print(p.pid, flush=True); time.sleep(600)"
    )
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    pid = int(trainer.stdout.readline())
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    for _ in range(500):
        if not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text():
            return
        time.sleep(0.01)
    raise AssertionError(f"process {pid} outlives the trainer")


def test_out_that_is_not_empty_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(ConfigError, match="new or empty directory"):
        run(DemoConfig(**CONFIG, out=tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_differences_are_named() -> None:
    assert differences({"a": "0", "b": "1"}, {"a": "0", "b": "1"}) == {}
    assert set(differences({"a": "0", "b": "1"}, {"b": "2", "c": "3"})) == {"a", "b", "c"}
