"""One follower for a server: a second one touches nothing, and a dead one keeps nobody out."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sglang_scenes import Scene, build
from syncline.errors import CommitError, EndpointError
from syncline.sync import owner
from syncline.sync.owner import Owner


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = build(tmp_path, "0.5.23")
    with made.fake:
        yield made
        made.follower.close()


@pytest.mark.parametrize("staging", ["staging", "elsewhere"])
def test_a_second_follower_is_refused_and_touches_nothing(
    scene: Scene, tmp_path: Path, rng: np.random.Generator, staging: str
) -> None:
    scene.follower.sync()
    scene.train(rng)
    second = scene.beside(staging=tmp_path / staging)
    before = scene.fake.checksum()
    scene.fake.calls.clear()
    with pytest.raises(CommitError, match="another follower has this server"):
        second.sync()
    assert second.held() is None and not second.is_serving()
    assert {"/server_info", "/model_info", "/openapi.json"} >= set(scene.fake.calls)
    assert scene.fake.checksum() == before
    done = scene.follower.sync()
    assert done is not None and done.route == "in place"
    scene.check(2)


def test_a_second_follower_does_not_end_the_pause_of_the_first(
    scene: Scene, tmp_path: Path, rng: np.random.Generator
) -> None:
    scene.follower.sync()
    scene.train(rng)
    second = scene.beside()
    seen: list[bool] = []

    def reached(step: str) -> None:
        if step == "sent":
            with pytest.raises(CommitError, match="another follower"):
                second.sync()
            seen.append(scene.fake.is_paused)

    scene.another(reached=reached).sync()
    assert seen == [True]
    scene.check(2)


def test_a_follower_that_was_closed_makes_room(scene: Scene, rng: np.random.Generator) -> None:
    scene.follower.sync()
    scene.train(rng)
    first, second = scene.follower, scene.beside()
    first.close()
    second.sync()
    scene.check(2)
    scene.train(rng)
    with pytest.raises(CommitError, match="another follower"):
        first.sync()
    second.close()
    first.sync()  # what it knew of the server may not be so any more
    scene.check(3)
    first.close()
    assert not (scene.root / "staging" / owner.NAME).exists()


def test_a_follower_that_was_forgotten_makes_room(
    scene: Scene, rng: np.random.Generator, tmp_path: Path
) -> None:
    lost = Owner(tmp_path)
    lost.claim("a start")
    del lost
    assert Owner(tmp_path).claim("a start")


def _claim_and_die(staging: Path) -> None:
    Owner(staging).claim("a start")
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_dead_followers_lock_is_taken(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_claim_and_die, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    mine = Owner(tmp_path)
    assert mine.claim("a start")
    assert not mine.claim("a start")
    mine.release()


def test_a_lock_that_was_removed_is_taken_anew_or_refused(tmp_path: Path) -> None:
    first, second = Owner(tmp_path), Owner(tmp_path)
    first.claim("a start")
    (tmp_path / owner.NAME).unlink()
    assert first.claim("a start")  # what was known may not be so any more
    (tmp_path / owner.NAME).unlink()
    with pytest.raises(CommitError, match="another follower"):
        second.claim("a start")  # the server's lock is still the first one's
    first.release()
    second.release()
    assert second.claim("another start")
    second.release()


def test_a_server_that_was_started_anew_is_claimed_anew(
    scene: Scene, tmp_path: Path, rng: np.random.Generator
) -> None:
    scene.follower.sync()
    scene.fake.restart(tmp_path / "model", "default")
    scene.follower.sync()
    with pytest.raises(CommitError, match="another follower"):
        scene.beside(staging=tmp_path / "elsewhere").sync()
    scene.train(rng)
    scene.fake.faults["/flush_cache"] = ("before", "busy")
    with pytest.raises(EndpointError):
        scene.follower.sync()
    scene.follower.sync()
    scene.check(2)
