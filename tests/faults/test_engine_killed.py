"""SIGKILL at every named step of a checkpoint directory: old bits or new, never a mix called whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import engine_cases
from engine_cases import (
    FILES,
    Weights,
    as_bytes,
    change,
    draw,
    held_bits,
    records,
    spans,
    version_of,
)
from syncline.engines import CheckpointDir, checkpoint_dir
from syncline.engines.checkpoint_dir import Mode, read_state
from syncline.sources import CheckpointSource
from syncline.version import HeldVersion

CHILD = """
import os, signal, sys
from pathlib import Path
from engine_cases import FILES, change, draw, records, spans, version_of
from syncline.engines import CheckpointDir

job, path, mode, step, nth = sys.argv[1:]
left = int(nth)

def observe(reached):
    global left
    left -= reached.name == step
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

engine = CheckpointDir(path, mode=mode, shard_bytes=100_000, observe=observe)
old = draw(1)
if job == "create":
    engine.create(version_of(1, old), spans(old, window_units=20_000), FILES)
elif job == "apply":
    new = change(old, 2)
    engine.apply(records(old, new, window_units=20_000), version_of(2, new))
elif job == "open":
    engine.held()
"""

CREATE_IN_PLACE = [step for step in checkpoint_dir.STEPS if step.startswith("create.")]
APPLY_IN_PLACE = [step for step in checkpoint_dir.STEPS if step.startswith("apply.")]
CREATE_SWAP = [
    "create.written",
    "create.flushed",
    *(step for step in checkpoint_dir.STEPS if step.startswith("flip.") and step != "flip.copied"),
]
APPLY_SWAP = [
    *(step for step in checkpoint_dir.STEPS if step.startswith("flip.")),
    "apply.record_written",
    "apply.flushed",
    "apply.verified",
]
REDO = ["apply.record_written", "apply.flushed", "apply.verified"]
CREATE = [
    *(("in_place", step, 1) for step in CREATE_IN_PLACE),
    *(("swap", step, 1) for step in CREATE_SWAP),
    ("in_place", "create.written", 3),
    ("swap", "create.written", 3),
]
APPLY = [
    *(("in_place", step, 1) for step in APPLY_IN_PLACE),
    *(("swap", step, 1) for step in APPLY_SWAP),
    ("in_place", "apply.record_written", 20),
    ("swap", "apply.record_written", 20),
]
OLD = draw(1)
NEW = change(OLD, 2)
NEXT = change(NEW, 3)


def kill(job: str, path: Path, mode: Mode, step: str, nth: int = 1) -> None:
    """Run a job in a process of its own, which must die at the step."""
    search = os.pathsep.join([str(Path(engine_cases.__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", CHILD, job, str(path), mode, step, str(nth)],
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, f"{job} never reached {step}: {done.stderr}"


def on_disk(path: Path) -> dict[str, bytes]:
    source = CheckpointSource(path)
    return {name: source.bits(name).tobytes() for name in source.metas()}


def check_truthful(path: Path) -> None:
    """What the state file says now, before anybody repairs anything, is what the files hold."""
    state = read_state(path)
    if state is None:
        assert not path.exists()
    elif not state.is_changing:
        assert state.held is not None
        assert on_disk(path) == as_bytes(weights_of(state.held))


def weights_of(held: HeldVersion) -> Weights:
    return {1: OLD, 2: NEW, 3: NEXT}[held.version]


def carry_on(engine: CheckpointDir) -> None:
    """From whatever it holds, the engine takes the next versions."""
    held = engine.held()
    if held is None:
        assert dict(engine.tensors()) == {}
        engine.create(version_of(1, OLD), spans(OLD), FILES)
        held = engine.held()
    assert held is not None
    assert held_bits(engine) == as_bytes(weights_of(held))
    engine.apply(records(weights_of(held), NEXT), version_of(3, NEXT))
    assert held_bits(engine) == as_bytes(NEXT)
    assert on_disk(engine.path) == as_bytes(NEXT)
    assert {name: (engine.path / name).read_bytes() for name in FILES} == FILES


def check_tidy(path: Path) -> None:
    """Nothing of a killed process is left beside the path or in it."""
    beside = {entry.name for entry in path.parent.iterdir()} - {path.name}
    if not path.is_symlink():
        assert beside == set()
        assert {entry.name for entry in (path / ".syncline").iterdir()} == {"lock", "state.json"}
        return
    assert beside == {f".{path.name}.syncline"}
    home = {entry.name for entry in (path.parent / f".{path.name}.syncline").iterdir()}
    assert home - {"lock"} <= {entry for entry in home if entry.startswith("v")}
    assert len(home) <= 3


@pytest.mark.parametrize(("mode", "step", "nth"), CREATE)
def test_killed_while_creating(tmp_path: Path, mode: Mode, step: str, nth: int) -> None:
    path = tmp_path / "model"
    kill("create", path, mode, step, nth)
    check_truthful(path)
    engine = CheckpointDir(path, mode=mode)
    if step in ("create.committed", "flip.committed", "flip.old_removed"):
        assert engine.held() == version_of(1, OLD)
    if step in ("create.written", "create.flushed", "flip.built", "flip.named"):
        assert engine.held() is None
    carry_on(engine)
    check_tidy(path)


@pytest.mark.parametrize(("mode", "step", "nth"), APPLY)
def test_killed_while_applying(tmp_path: Path, mode: Mode, step: str, nth: int) -> None:
    path = tmp_path / "model"
    CheckpointDir(path, mode=mode, shard_bytes=100_000).create(
        version_of(1, OLD), spans(OLD), FILES
    )
    kill("apply", path, mode, step, nth)
    check_truthful(path)
    engine = CheckpointDir(path, mode=mode)
    state = read_state(path)
    assert state is not None
    assert not state.is_changing
    expected = 2 if mode == "in_place" and step != "apply.journal_flushed" else 1
    if step in ("flip.linked", "flip.committed", "flip.old_removed"):
        expected = 2
    assert engine.held() == version_of(expected, NEW if expected == 2 else OLD)
    carry_on(engine)
    check_tidy(path)


@pytest.mark.parametrize("again", REDO)
@pytest.mark.parametrize("step", ["apply.marked", "apply.record_written", "apply.verified"])
def test_killed_again_while_finishing(tmp_path: Path, step: str, again: str) -> None:
    path = tmp_path / "model"
    CheckpointDir(path).create(version_of(1, OLD), spans(OLD), FILES)
    kill("apply", path, "in_place", step)
    for _ in range(2):
        kill("open", path, "in_place", again)
        state = read_state(path)
        assert state is not None
        assert state.is_changing
    engine = CheckpointDir(path)
    assert engine.held() == version_of(2, NEW)
    carry_on(engine)
    check_tidy(path)


def test_every_step_is_killed_at() -> None:
    covered = {step for _, step, _ in (*CREATE, *APPLY)}
    assert covered == set(checkpoint_dir.STEPS)
