"""Tensors that are broadcast to a server's ranks over Gloo: a broadcast that fails ends, and the next one has a group of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sglang_scenes import Scene, build
from syncline.errors import EndpointError, SynclineError, TransportTimeoutError
from syncline.sglang import broadcast

ROUTE = "/update_weights_from_distributed"


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = build(tmp_path, "0.5.23", ranks=2, loader=False)
    with made.fake:
        made.another(route="distributed").sync()
        yield made
        made.follower.close()


def test_versions_are_broadcast_over_one_group(scene: Scene, rng: np.random.Generator) -> None:
    for number in range(2, 5):
        scene.train(rng)
        done = scene.follower.sync()
        assert done is not None and done.route == "from distributed"
        scene.check(number)
    assert scene.fake.calls.count("/init_weights_update_group") == 1
    scene.follower.close()
    assert not scene.fake.groups


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_refused_broadcast_is_taken_back_over_a_new_group(
    scene: Scene, rng: np.random.Generator, when: str
) -> None:
    before = scene.fake.checksum()
    scene.train(rng)
    scene.fake.faults[ROUTE] = (when, "no room")
    with pytest.raises(EndpointError, match="no room"):
        scene.follower.sync()
    assert scene.fake.checksum() == before
    assert scene.fake.label == "1" and not scene.fake.is_paused
    assert scene.fake.calls.count("/init_weights_update_group") == 2
    assert len(scene.fake.groups) == 1
    done = scene.follower.sync()
    assert done is not None and done.route == "from distributed"
    scene.check(2)


def test_a_server_that_never_comes_to_a_broadcast_is_not_waited_for_and_not_believed(
    scene: Scene, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcast, "_SETTLE_S", 0.2)
    scene.train(rng)
    scene.fake.lies[ROUTE] = {"success": True, "message": "Success"}
    with pytest.raises(SynclineError, match="never came to it"):
        scene.follower.sync()
    assert scene.fake.label == "1"
    scene.fake.lies.clear()
    scene.follower.sync()
    scene.check(2)


def test_waiting_for_a_broadcast_takes_no_processor(
    scene: Scene, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looked as often as it could once the server had answered."""
    monkeypatch.setattr(broadcast, "_SETTLE_S", 0.5)
    looks: list[float] = []
    sleep = time.sleep
    monkeypatch.setattr(broadcast.time, "sleep", lambda s: (looks.append(s), sleep(s)))
    group = broadcast.Group(scene.follower._control, 2)
    scene.fake.lies[ROUTE] = {"success": True}
    import torch

    with pytest.raises(TransportTimeoutError, match="never came to it"):
        group.broadcast(torch.ones(1 << 20, dtype=torch.uint8), {}, 5.0)
    assert group.is_broken
    assert 0 < len(looks) <= 0.5 / 0.01 + 1
    group.close()
