"""Fireworks snapshots against fireworks-delta-compression: it decodes ours, and we its own, bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from cross.test_real_packages import ENVIRONMENT, Weights, assert_engine, draw, other_side, step
from syncline import MemoryEngine, Publisher, Receiver
from syncline.stores import open_store
from syncline.sync.conversion import convert

pytestmark = pytest.mark.skipif(
    not (ENVIRONMENT / ".made-from").exists(),
    reason="fireworks-delta-compression is not installed; run make cross-env",
)


@pytest.fixture
def states(rng) -> list[Weights]:
    states = [draw(rng)]
    for _ in range(3):
        states.append(step(states[-1], rng))
    return states


def save_in_two(weights: Weights, directory: Path) -> Path:
    """Write a checkpoint of two files, with an index."""
    import json

    directory.mkdir(parents=True)
    files = {}
    for number, names in enumerate((list(weights)[::2], list(weights)[1::2]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: weights[name] for name in names}, directory / file)
        files |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": files}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def assert_files(directory: Path, weights: Weights) -> None:
    found = {n: a for path in directory.glob("*.safetensors") for n, a in load_file(path).items()}
    assert found.keys() == weights.keys()
    for name, array in weights.items():
        assert found[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("arc", ["arc_v1", "arc_v2"])
def test_what_the_package_writes_is_followed(tmp_path, states, arc):
    checkpoints = [save_in_two(state, tmp_path / f"c{n}") for n, state in enumerate(states)]
    run = tmp_path / "run"
    shutil.copytree(checkpoints[0], run / "snap-0")
    for number in (1, 2, 3):
        before, after = checkpoints[number - 1 : number + 1]
        other_side("fireworks_compress", before, after, run / f"snap-{number}", arc)
    engine = MemoryEngine()
    receiver = Receiver(open_store(run), engine, verify="full")
    for number, state in enumerate(states):
        report = receiver.sync(f"snap-{number}")
        assert report.layout == "fireworks"
        assert_engine(engine, state)


@pytest.mark.parametrize("how", ["inplace", "whole"])
def test_the_package_applies_what_is_converted(tmp_path, states, how):
    base = save_in_two(states[0], tmp_path / "base")
    publisher = Publisher(open_store(tmp_path / "ours"), anchor_every=None)
    for state in states:
        publisher.publish(state)
    convert(open_store(tmp_path / "ours"), open_store(tmp_path / "theirs"), "fireworks", base=base)
    served = tmp_path / "served"
    shutil.copytree(base, served)
    for number in (1, 2, 3):
        snapshot = tmp_path / "theirs" / f"{number + 1:06d}"
        other_side("fireworks_apply", served, snapshot, "arc_v2", how)
        assert_files(served, states[number])
