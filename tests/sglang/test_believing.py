"""What a server says of itself is believed as far as it can be seen; what it does not say is asked."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_scenes import Scene, build
from syncline.errors import CommitError, EndpointError, FormatError, SynclineError
from syncline.sglang.commit import CommitOptions

HASTY = CommitOptions(step_timeout_s=0.5, load_timeout_s=5.0)
DENIED = {"success": False, "message": "the scheduler is busy"}


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = build(tmp_path, "0.5.23", ranks=2)
    with made.fake:
        made.follower.sync()
        yield made


def serves_old(scene: Scene, checksum: str) -> None:
    """Check that version 1 is served on under its name."""
    assert scene.fake.checksum() == checksum
    assert scene.fake.label == "1" and not scene.fake.is_paused
    held = scene.follower.held()
    assert held is not None and held.version == 1
    assert scene.follower.is_serving()


@pytest.mark.parametrize(
    "change",
    [
        {"success": False},
        {"per_engine_checksum": ""},
        {"per_engine_checksum": "none"},
        {"ranks": [{"checksums": {}}, {"checksums": {}}]},
        {"ranks": [{"checksums": {"w": ""}}, {"checksums": {"w": ""}}]},
    ],
    ids=["denied", "empty", "a word", "no parameter", "empty for a parameter"],
)
def test_checksums_that_the_server_denies_or_leaves_empty_are_not_believed(
    scene: Scene, rng: np.random.Generator, change: dict[str, Any]
) -> None:
    scene.train(rng)
    before = scene.fake.checksum()
    told = {"success": True, "message": "", **scene.fake._checksums()}
    scene.fake.lies["/weights_checker"] = {**told, **change}
    with pytest.raises(FormatError, match="/weights_checker"):
        scene.follower.sync()
    scene.fake.lies.clear()
    serves_old(scene, before)
    scene.follower.sync()
    scene.check(2)


@pytest.mark.parametrize("route", ["/pause_generation", "/flush_cache"])
def test_a_step_that_the_server_denies_with_200_is_a_failure(
    scene: Scene, rng: np.random.Generator, route: str
) -> None:
    scene.train(rng)
    before = scene.fake.checksum()
    scene.fake.lies[route] = DENIED
    with pytest.raises(EndpointError, match="expected that it was done"):
        scene.follower.sync()
    serves_old(scene, before)


def test_a_server_that_denies_going_on_is_not_ready(scene: Scene, rng: np.random.Generator) -> None:
    scene.train(rng)
    scene.fake.lies["/continue_generation"] = DENIED
    with pytest.raises(SynclineError, match="expected that it was done"):
        scene.follower.sync()
    assert scene.fake.is_paused
    assert scene.follower.held() is None and not scene.follower.is_serving()
    scene.fake.lies.clear()
    scene.follower.sync()
    scene.check(2)
    assert scene.follower.is_serving()


def test_a_name_that_the_server_does_not_take_is_not_reported(
    scene: Scene, rng: np.random.Generator
) -> None:
    scene.train(rng)
    before = scene.fake.checksum()
    scene.fake.lies["/update_weight_version"] = {"success": True}
    with pytest.raises(CommitError, match="was told the name '2' and says '1'"):
        scene.follower.sync()
    serves_old(scene, before)


def test_a_server_that_somebody_else_paused_is_not_ready(
    scene: Scene, rng: np.random.Generator
) -> None:
    scene.train(rng)
    scene.fake.is_paused = True
    before = scene.fake.checksum()
    assert not scene.follower.is_serving()
    with pytest.raises(CommitError, match="found it paused by somebody else"):
        scene.follower.sync()
    assert scene.fake.is_paused and scene.fake.checksum() == before
    scene.fake.is_paused = False
    assert scene.follower.is_serving()
    scene.follower.sync()
    scene.check(2)


@pytest.mark.parametrize(
    "version, comes",
    [("0.5.21", "at once"), ("0.5.23", "at once"), ("0.5.23", "after another version")],
)
def test_a_pause_that_comes_late_is_noticed_and_ended(
    tmp_path: Path, rng: np.random.Generator, version: str, comes: str
) -> None:
    scene = build(tmp_path, version)
    with scene.fake:
        follower = scene.another(options=HASTY)
        follower.sync()
        scene.train(rng)
        scene.fake.faults["/pause_generation"] = ("before", "late")
        with pytest.raises(SynclineError):
            follower.sync(2)
        assert scene.fake.label == "1" and not scene.fake.is_paused
        if comes == "after another version":
            follower.sync(2)
        at = int(scene.fake.label)
        scene.fake.has_given_up.set()
        while not scene.fake.is_paused:
            time.sleep(0.01)
        if not follower.is_serving():
            follower.sync(at)
        assert not scene.fake.is_paused
        assert follower.is_serving()
        follower.sync()
        scene.check(2)
        follower.close()


def test_a_follower_that_is_interrupted_while_it_takes_back_knows_nothing(
    scene: Scene, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.train(rng)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    scene.fake.faults["/flush_cache"] = ("before", "busy")
    with monkeypatch.context() as patch:
        patch.setattr("syncline.sglang.change.InPlace.undo", interrupted)
        with pytest.raises(KeyboardInterrupt):
            scene.follower.sync()
    assert scene.fake.is_paused
    assert scene.follower.held() is None and not scene.follower.is_serving()
    scene.follower.sync()
    scene.check(2)


@pytest.mark.parametrize("label", ["2", "default"])
def test_a_server_that_a_supervisor_started_anew_is_not_taken_for_the_one_before(
    scene: Scene, rng: np.random.Generator, tmp_path: Path, label: str
) -> None:
    shutil.copytree(tmp_path / "model", tmp_path / "first")
    scene.train(rng)
    scene.follower.sync()
    scene.check(2)
    scene.fake.restart(tmp_path / "first", label)  # old weights, perhaps under the newest name
    assert not scene.follower.is_serving()
    assert scene.follower.held() is None
    done = scene.follower.sync()
    assert done is not None and done.route == "from disk"
    scene.check(2)


def test_a_server_started_anew_is_noticed_by_sync_alone(
    scene: Scene, rng: np.random.Generator, tmp_path: Path
) -> None:
    shutil.copytree(tmp_path / "model", tmp_path / "first")
    scene.train(rng)
    scene.follower.sync()
    scene.fake.restart(tmp_path / "first", "2")
    done = scene.follower.sync()
    assert done is not None and done.route == "from disk"
    scene.check(2)
