"""What the system, torch and memory raise in the middle of an update: an error of ours, and the old version served."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_scenes import Scene, build
from syncline.errors import (
    CommitError,
    ConfigError,
    FormatError,
    LayoutError,
    OutcomeUnknownError,
    SynclineError,
)
from syncline.sglang import answers, plugin, staged
from syncline.sglang.commit import STEPS

FOREIGN: dict[str, Exception] = {
    "disk full": OSError(errno.ENOSPC, "No space left on device"),
    "torch": RuntimeError("[enforce fail at alloc_cpu.cpp:118]"),
    "memory": MemoryError("Unable to allocate 1.00 TiB"),
}


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = build(tmp_path, "0.5.23", ranks=2)
    with made.fake:
        yield made


def failing_in(place: str, error: Exception, patch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    patch.setattr(place, fails)


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("step", STEPS)
def test_a_foreign_error_at_any_step_is_ours_and_the_old_version_is_served(
    scene: Scene, rng: np.random.Generator, step: str, kind: str
) -> None:
    scene.follower.sync()
    before = scene.fake.checksum()

    def reached(at: str) -> None:
        if at == step:
            raise FOREIGN[kind]

    scene.follower._reached = reached
    scene.train(rng)
    with pytest.raises(CommitError, match=f"serves what it served: {type(FOREIGN[kind]).__name__}"):
        scene.follower.sync()
    assert scene.fake.checksum() == before
    assert scene.fake.label == "1" and not scene.fake.is_paused
    assert scene.follower.held() is not None and scene.follower.held().version == 1
    scene.follower._reached = lambda _: None
    scene.follower.sync()
    scene.check(2)


@pytest.mark.parametrize(
    ("route", "place"),
    [
        ("auto", "syncline.sglang.staged.write_order"),
        ("auto", "syncline.sglang.mirror.Mirror.before"),
        ("auto", "syncline.sglang.mirror.Mirror.view"),
        ("auto", "syncline.sglang.mirror.CheckpointDir.apply"),
        ("disk", "syncline.sglang.partial.durable.sync_file"),
        ("memory", "syncline.sglang.buckets.filled"),
        ("memory", "syncline.sglang.buckets._payload"),
        ("distributed", "syncline.sglang.server.Group"),
    ],
)
def test_a_foreign_error_while_preparing_is_ours_and_the_old_version_is_served(
    scene: Scene, rng: np.random.Generator, route: Any, place: str
) -> None:
    scene.follower.sync()
    before = scene.fake.checksum()
    scene.follower._route = route
    scene.train(rng)
    with pytest.MonkeyPatch.context() as patch:
        failing_in(place, FOREIGN["disk full"], patch)
        try:
            scene.follower.sync()
        except SynclineError as error:
            assert not isinstance(error, OutcomeUnknownError)
            assert scene.fake.checksum() == before
            assert scene.fake.label == "1" and not scene.fake.is_paused
    scene.follower._route = "auto"
    scene.follower.sync()
    scene.check(2)


@pytest.mark.parametrize("kind", FOREIGN)
def test_taking_back_that_meets_a_foreign_error_is_not_known_to_have_worked(
    scene: Scene, rng: np.random.Generator, kind: str
) -> None:
    scene.follower.sync()
    scene.train(rng)

    def reached(at: str) -> None:
        if at == "sent":
            raise ConfigError("on purpose")

    scene.follower._reached = reached
    with pytest.MonkeyPatch.context() as patch:
        for way in ("InPlace", "FromDirectory"):
            failing_in(f"syncline.sglang.change.{way}.undo", FOREIGN[kind], patch)
        with pytest.raises(OutcomeUnknownError, match="on purpose.*taking it back failed too"):
            scene.follower.sync()
    assert scene.follower.held() is None and not scene.follower.is_serving()
    assert scene.fake.is_paused and scene.fake.label == "1"
    scene.follower._reached = lambda _: None
    scene.follower.sync()
    scene.check(2)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1", "a" * 64, ""])
def test_a_host_that_is_none_of_this_machines_is_named(
    scene: Scene, rng: np.random.Generator, host: str
) -> None:
    follower = scene.another(route="distributed", host=host)
    follower.sync()
    scene.train(rng)
    if not host:  # all addresses of this machine
        return
    with pytest.raises(ConfigError, match=f"host '{host}': expected a name or IPv4 address"):
        follower.sync()
    assert scene.fake.label == "1" and not scene.fake.is_paused


@pytest.mark.parametrize("name", ["journal-1", "order.json", "proof.json", "new", "old"])
@pytest.mark.parametrize("kind", ["a directory", "a file"])
def test_what_stands_in_the_way_in_the_staging_directory_is_named(
    scene: Scene, rng: np.random.Generator, name: str, kind: str
) -> None:
    scene.follower.sync()
    scene.train(rng)
    path = scene.root / "staging" / name
    path.unlink(missing_ok=True)
    if kind == "a directory":
        (path / "in it").mkdir(parents=True)
    else:
        path.write_bytes(b"{")
    try:
        scene.follower.sync()
    except SynclineError as error:
        assert str(path) in str(error)
        assert scene.fake.label == "1" and not scene.fake.is_paused
    else:
        scene.check(2)


def test_an_answer_that_is_a_directory_is_named(scene: Scene, rng: np.random.Generator) -> None:
    scene.follower.sync()
    (scene.root / "staging" / "answer-0-0.json" / "in it").mkdir(parents=True)
    scene.train(rng)
    try:
        scene.follower.sync()
    except SynclineError as error:
        assert "answer-0-0.json cannot be removed" in str(error)
        assert scene.fake.label == "1" and not scene.fake.is_paused
    else:
        scene.check(2)


@pytest.mark.parametrize("path", ["\0", "/no/such\0path", "x" * 5000, "/proc/self/fd/0/x"])
def test_a_model_path_that_is_none_is_refused(scene: Scene, path: str) -> None:
    scene.fake.model_path = path
    with pytest.raises(LayoutError, match="cannot be read here"):
        scene.follower.sync()


def test_a_model_path_that_leads_in_a_circle_is_refused(scene: Scene) -> None:
    circle = scene.root / "circle"
    circle.symlink_to(circle)
    scene.fake.model_path = str(circle)
    with pytest.raises(LayoutError, match="cannot be read here"):
        scene.follower.sync()


@pytest.mark.parametrize("key", ["tp_size", "dp_size", "pp_size"])
@pytest.mark.parametrize("count", [10**12, 10**30, 4097, 0, -1, True, 1.0, "2", None])
def test_counts_that_no_server_has_are_refused(key: str, count: object) -> None:
    about = json.dumps({"version": "0.5.23", key: count}).encode()
    model = json.dumps({"model_path": "/m", "weight_version": "1"}).encode()
    with pytest.raises(FormatError, match=f"/server_info.{key} must be a count from 1 to 4096"):
        answers.server(about, model)


def test_a_count_that_would_take_all_memory_is_refused_before_it_is_used(
    scene: Scene, rng: np.random.Generator
) -> None:
    scene.follower.sync()
    scene.train(rng)
    scene.fake.about = {"tp_size": 10**12}
    with pytest.raises(FormatError, match="tp_size"):
        scene.follower.sync()
    assert scene.fake.label == "1" and not scene.fake.is_paused


@pytest.mark.parametrize(
    "change",
    [
        {"journals": [["journal-0", 9]]},
        {"journals": [[]]},
        {"journals": [["a", 1, "b", 2]]},
        {"journals": ["abc"]},
    ],
)
def test_an_order_with_a_list_of_another_length_is_none(tmp_path: Path, change: Any) -> None:
    order = {"identity": "ab", "act": "apply", "checkpoint": "/m", "journals": [], **change}
    (tmp_path / staged.ORDER).write_text(json.dumps(order))
    with pytest.raises(FormatError):
        staged.read_order(tmp_path)


@pytest.mark.parametrize("held", [[[4]], [[4], [], []], [[4], [[[0]]]], [[4], [[[0], [1], [2]]]]])
def test_an_answer_with_a_list_of_another_length_is_none(tmp_path: Path, held: Any) -> None:
    answer = {
        "order": "ab",
        "rank": 0,
        "error": None,
        "written": 0,
        "dense": {},
        "held": {"w": held},
    }
    (tmp_path / "answer-ab-0.json").write_text(json.dumps(answer))
    with pytest.raises(FormatError):
        staged.read_answers(tmp_path, "ab", 1)


@pytest.mark.parametrize("kind", FOREIGN)
def test_the_plugin_raises_nothing_into_sglang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("SYNCLINE_SGLANG_STAGING", str(tmp_path))
    failing_in("syncline.sglang.worker.obey", FOREIGN[kind], monkeypatch)

    class Updater:
        tp_rank = 0

        def get_model(self) -> None:
            return None

    is_done, said = plugin.around(lambda *_: (True, ""), Updater(), str(tmp_path))
    assert not is_done and said.startswith("syncline: ")
