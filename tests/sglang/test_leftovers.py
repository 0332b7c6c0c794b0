"""What an update leaves behind on the host when it is over, however it ended: nothing that it staged."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang_scenes import Scene, build
from syncline.errors import SynclineError, TransportUnavailableError
from syncline.sglang import buckets

SHARED = Path("/dev/shm")


@pytest.fixture(params=["disk", "memory", "in_place"])
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    made = build(tmp_path, "0.5.23", ranks=2, loader=request.param == "in_place")
    with made.fake:
        made.another(route=request.param).sync()
        yield made
        made.follower.close()


def segments() -> set[str]:
    return {path.name for path in SHARED.glob(f"torch_{os.getpid()}_*")}


def staged(scene: Scene) -> set[str]:
    return {path.name for path in (scene.root / "staging").iterdir()}


def test_an_update_leaves_its_proof_and_its_lock_alone(
    scene: Scene, rng: np.random.Generator
) -> None:
    for number in (2, 3):
        scene.train(rng)
        scene.follower.sync()
        scene.check(number)
        assert staged(scene) == {"proof.json", "owner.lock"}
        assert not segments()


@pytest.mark.parametrize("fault", ["refused", "lost"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_load_that_failed_leaves_the_changes_alone(
    scene: Scene, rng: np.random.Generator, when: str, fault: str
) -> None:
    before = scene.fake.checksum()
    scene.train(rng)
    for route in ("/update_weights_from_tensor", "/update_weights_from_disk"):
        scene.fake.faults[route] = (when, fault)
    with pytest.raises(SynclineError):
        scene.follower.sync()
    assert not segments()
    assert staged(scene) <= {"journal-0", "owner.lock"}
    scene.fake.faults.clear()
    if scene.follower.held() is not None:
        assert scene.fake.checksum() == before and not scene.fake.is_paused
    scene.follower.sync()
    scene.check(2)


@pytest.mark.parametrize("found_out", ["before", "by torch"])
@pytest.mark.parametrize("scene", ["memory"], indirect=True)
def test_shared_memory_without_room_is_refused_and_nothing_is_left_there(
    scene: Scene, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, found_out: str
) -> None:
    before = scene.fake.checksum()
    scene.train(rng)

    def full(_: Any) -> Any:
        name = f"torch_{os.getpid()}_1_0"
        (SHARED / name).write_bytes(b"")
        raise RuntimeError(
            f"unable to allocate shared memory(shm) for file </{name}>: No space left on device (28)"
        )

    with monkeypatch.context() as patch:
        if found_out == "before":
            room = SimpleNamespace(f_bavail=1, f_frsize=4096)
            patch.setattr(buckets.os, "statvfs", lambda _: room)
        else:
            patch.setattr(torch.UntypedStorage, "_share_filename_cpu_", full)
        with pytest.raises(TransportUnavailableError, match="/dev/shm, found none"):
            scene.follower.sync()
    assert not segments()
    assert scene.fake.checksum() == before
    assert scene.fake.label == "1" and scene.follower.is_serving()
    scene.follower.sync()
    scene.check(2)
