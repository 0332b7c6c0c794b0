"""Whether a server is told to go on: never with weights that nobody knows, never against a pause of others."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_scenes import Scene, build
from syncline.errors import (
    CommitError,
    ConfigError,
    LayoutError,
    OutcomeUnknownError,
    SynclineError,
    TornUpdateError,
)
from syncline.sglang.commit import CommitOptions

HASTY = CommitOptions(step_timeout_s=0.5, load_timeout_s=5.0)
SUCCESS = {"success": True, "message": "ok"}


def torn(scene: Scene, rng: np.random.Generator) -> None:
    """Leave a server between two versions: an update that failed, and was not taken back."""
    scene.follower.sync()
    scene.train(rng)
    broken: list[str] = []

    def reached(step: str) -> None:
        if step == "sent" and not broken:
            broken.append(step)
            scene.fake.lies["/update_weights_from_disk"] = SUCCESS
            raise CommitError("broken")

    with pytest.raises(TornUpdateError):
        scene.another(reached=reached).sync()
    assert scene.fake.is_paused and scene.fake.label == "1"
    scene.fake.lies.clear()


@pytest.mark.parametrize("follower", ["the same", "another"])
@pytest.mark.parametrize("version", ["0.5.21", "0.5.23"])
@pytest.mark.parametrize("route", ["/weights_checker", "/pause_generation"])
def test_torn_weights_do_not_go_on_when_the_next_update_fails_early(
    tmp_path: Path, rng: np.random.Generator, route: str, version: str, follower: str
) -> None:
    scene = build(tmp_path, version, loader=False)
    with scene.fake:
        torn(scene, rng)
        if follower == "another":
            scene.another()
        for _ in range(2):
            scene.fake.faults[route] = ("before", "busy")
            with pytest.raises(OutcomeUnknownError, match="busy.*not told to go on"):
                scene.follower.sync()
            assert scene.fake.is_paused and scene.follower.held() is None
        scene.follower.sync()
        scene.check(2)
        scene.follower.close()


def test_torn_weights_that_somebody_let_go_on_stay_paused_after_our_next_pause(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    scene = build(tmp_path, "0.5.23", loader=False)
    with scene.fake:
        torn(scene, rng)
        scene.fake.is_paused = False
        scene.fake.faults["/weights_checker"] = ("before", "busy")
        with pytest.raises(OutcomeUnknownError, match="busy"):
            scene.follower.sync()
        assert scene.fake.is_paused
        scene.follower.sync()
        scene.check(2)
        scene.follower.close()


@pytest.mark.parametrize("route", ["/weights_checker", "/pause_generation"])
def test_a_fresh_server_goes_on_when_its_first_update_fails_early(
    tmp_path: Path, route: str
) -> None:
    scene = build(tmp_path, "0.5.23", loader=False)
    with scene.fake:
        before = scene.fake.checksum()
        scene.fake.faults[route] = ("before", "busy")
        with pytest.raises(SynclineError, match="busy") as raised:
            scene.follower.sync()
        assert not isinstance(raised.value, (TornUpdateError, OutcomeUnknownError))
        assert not scene.fake.is_paused and scene.fake.checksum() == before
        scene.follower.sync()
        scene.check(1)
        scene.follower.close()


def paused_late(tmp_path: Path, rng: np.random.Generator) -> Scene:
    """Return a server that cannot tell whether it is paused, and has not answered a pause."""
    scene = build(tmp_path, "0.5.21")
    follower: Any = scene.another(options=HASTY)
    follower.sync()
    scene.train(rng)
    scene.fake.faults["/pause_generation"] = ("before", "late")
    with pytest.raises(SynclineError):
        follower.sync(2)
    scene.fake.has_given_up.set()
    while not scene.fake.is_paused:
        time.sleep(0.01)
    return scene


def test_a_server_that_does_not_hear_that_it_may_go_on_is_not_ready(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    scene = paused_late(tmp_path, rng)
    with scene.fake:
        scene.fake.faults["/continue_generation"] = ("before", "busy")
        assert not scene.follower.is_serving()
        assert scene.follower.is_serving() and not scene.fake.is_paused
        scene.follower.close()


def test_a_late_pause_is_not_waited_for_when_a_later_one_was_answered(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    scene = paused_late(tmp_path, rng)
    with scene.fake:
        assert scene.follower.is_serving() and not scene.fake.is_paused
        scene.follower.sync(2)
        scene.check(2)
        scene.fake.is_paused = True  # somebody else's
        scene.fake.calls.clear()
        scene.follower.is_serving()
        assert scene.fake.is_paused and "/continue_generation" not in scene.fake.calls
        scene.follower.close()


@pytest.mark.parametrize(
    "about",
    [{"hicache_storage_backend": "file"}, {"enable_lmcache": True}, {"enable_flexkv": True}],
)
def test_a_server_whose_keys_and_values_outlive_a_flush_is_refused(
    tmp_path: Path, about: dict[str, Any]
) -> None:
    scene = build(tmp_path, "0.5.23", about=about)
    with scene.fake:
        with pytest.raises(ConfigError, match=rf"{next(iter(about))}.*old weights"):
            scene.follower.sync()
        assert "/pause_generation" not in scene.fake.calls
        scene.fake.about.update(
            hicache_storage_backend=None, enable_lmcache=False, enable_flexkv=False
        )
        scene.follower.sync()
        scene.check(1)
        scene.follower.close()


def test_a_follower_with_another_staging_directory_is_told_which_one_to_use(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    scene = build(tmp_path, "0.5.23", loader=False)
    with scene.fake:
        scene.follower.sync()
        scene.train(rng)
        scene.follower.sync()
        elsewhere = scene.another(staging=tmp_path / "elsewhere")
        with pytest.raises(LayoutError, match=f"follow it with .*{tmp_path / 'staging'}"):
            elsewhere.sync()
        assert not scene.fake.is_paused
        scene.another(staging=tmp_path / "staging").sync()
        scene.check(2)
        scene.follower.close()
