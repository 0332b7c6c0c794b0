"""SIGKILL at every named step of publish, pull and apply: the next process carries on, no bit is wrong."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from syncline import (
    CheckpointDir,
    CheckpointSource,
    MemoryEngine,
    Publisher,
    Receiver,
    open_store,
)
from syncline.engines import checkpoint_dir
from syncline.stores import filesystem
from syncline.sync import ownership, pull, writer
from syncline.sync.fsck import check_store

PUBLISH_STEPS = (*ownership.STEPS, *writer.STEPS, *filesystem.STEPS)
PULL_STEPS = (*pull.STEPS, *checkpoint_dir.STEPS)

CHILD = textwrap.dedent(
    """
    import os, signal, sys
    from pathlib import Path
    from syncline import CheckpointDir, CheckpointSource, FilesystemStore, Publisher, Receiver

    job, step, nth, store, argument, mode, full = sys.argv[1:]
    left = int(nth)

    def observe(at):
        global left
        if at.name == step:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    opened = FilesystemStore(store, observe=observe)
    if job == "publish":
        publisher = Publisher(opened, observe=observe, part_bytes=600)
        publisher.publish(CheckpointSource(argument), full=full == "full")
    else:
        engine = CheckpointDir(argument, mode=mode, observe=observe)
        Receiver(opened, engine, observe=observe).sync()
    """
)


def run_child(
    job: str, step: str, nth: int, store: Path, argument: Path, mode: str, full: bool
) -> bool:
    """Run one job in a process of its own that is killed at a step; tell whether it was."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            CHILD,
            job,
            step,
            str(nth),
            str(store),
            str(argument),
            mode,
            "full" if full else "delta",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode == 0:
        return False
    assert done.returncode == -9, done.stderr
    return True


def weights(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    base = np.random.default_rng(0)
    out = {}
    for name in ("a", "b", "c"):
        array = base.standard_normal((16, 16)).astype(np.float32)
        if seed:
            array.reshape(-1)[rng.integers(0, 256, 9)] += 1
        out[name] = array
    return out


@pytest.fixture
def checkpoints(tmp_path: Path) -> list[Path]:
    paths = []
    for seed in range(3):
        directory = tmp_path / f"checkpoint{seed}"
        directory.mkdir()
        save_file(weights(seed), directory / "model.safetensors")
        (directory / "config.json").write_text('{"model_type": "none"}')
        paths.append(directory)
    return paths


def raw(directory: Path) -> dict[str, bytes]:
    return {
        name: array.tobytes()
        for path in sorted(directory.glob("*.safetensors"))
        for name, array in load_file(path).items()
    }


@pytest.mark.parametrize("full", [False, True], ids=["delta", "full"])
@pytest.mark.parametrize("nth", [1, 2, 4])
@pytest.mark.parametrize("step", PUBLISH_STEPS)
def test_publisher_killed(
    step: str, nth: int, full: bool, tmp_path: Path, checkpoints: list[Path]
) -> None:
    store = tmp_path / "store"
    Publisher(open_store(store)).publish(CheckpointSource(checkpoints[0]))
    run_child("publish", step, nth, store, checkpoints[1], "", full)
    reader = MemoryEngine()
    seen = Receiver(open_store(store), reader, verify="full").sync()
    assert {n: reader.view(n).tobytes() for n in reader.tensors()} == raw(
        checkpoints[seen.version - 1]
    )
    publisher = Publisher(open_store(store))
    publisher.publish(CheckpointSource(checkpoints[2]))
    Receiver(open_store(store), reader, verify="full").sync()
    assert {n: reader.view(n).tobytes() for n in reader.tensors()} == raw(checkpoints[2])
    _, findings = check_store(open_store(store), deep=True, observe=lambda step: None)
    assert findings == []


def test_every_publish_step_is_reached(tmp_path: Path, checkpoints: list[Path]) -> None:
    """A step that is listed but never reached would make the test above check nothing."""
    for step in PUBLISH_STEPS:
        store = tmp_path / f"store.{step}"
        Publisher(open_store(store)).publish(CheckpointSource(checkpoints[0]))
        killed = run_child("publish", step, 1, store, checkpoints[1], "", True)
        assert killed or step == "publish.table_written", step


@pytest.mark.parametrize("fresh", [False, True], ids=["update", "create"])
@pytest.mark.parametrize("mode", ["in_place", "swap"])
@pytest.mark.parametrize("step", PULL_STEPS)
def test_pull_killed(
    step: str, mode: str, fresh: bool, tmp_path: Path, checkpoints: list[Path]
) -> None:
    store, directory = tmp_path / "store", tmp_path / "engine"
    publisher = Publisher(open_store(store))
    publisher.publish(CheckpointSource(checkpoints[0]))
    if not fresh:
        Receiver(open_store(store), CheckpointDir(directory, mode=mode)).sync()
    publisher.publish(CheckpointSource(checkpoints[1]))
    run_child("pull", step, 1, store, directory, mode, False)

    held = CheckpointDir(directory, mode=mode).held()
    if held is not None:
        assert raw(directory) == raw(checkpoints[held.version - 1])
    applied = Receiver(open_store(store), CheckpointDir(directory, mode=mode), verify="full").sync()
    assert applied.version == 2
    assert raw(directory) == raw(checkpoints[1])
    assert (directory / "config.json").read_bytes() == (checkpoints[1] / "config.json").read_bytes()
    leftovers = [p.name for p in tmp_path.iterdir() if "tmp" in p.name or "partial" in p.name]
    assert leftovers == []
