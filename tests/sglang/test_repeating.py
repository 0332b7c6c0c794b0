"""A rank's steps may be asked for twice, late, or after it was started anew: what it answers is still true."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sglang_fake import FusedModel
from sglang_scenes import Scene, build
from syncline.errors import CommitError, EndpointError, OutcomeUnknownError, TornUpdateError
from syncline.sglang import staged, worker
from syncline.sglang.commit import CommitOptions
from syncline.sglang.live import RankWeights


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = build(tmp_path, "0.5.23", ranks=2)
    with made.fake:
        made.follower.sync()
        yield made
        made.follower.close()


class Fp8LinearMethod:
    """What makes a module's weights be loaded whole."""


@pytest.mark.parametrize("proves", [True, False])
@pytest.mark.parametrize("act", ["check", "apply", "undo"])
def test_an_order_that_is_delivered_twice_is_done_once(
    scene: Scene, rng: np.random.Generator, act: str, proves: bool
) -> None:
    scene.another(options=CommitOptions(proves=proves)).sync()
    before = scene.fake.checksum()
    version = scene.train(rng)
    obey, doubled = scene.fake.obey, []

    def twice(model: FusedModel, rank: int) -> None:
        obey(model, rank)
        assert scene.fake.staging is not None
        if staged.read_order(scene.fake.staging).act == act:
            doubled.append(rank)
            obey(model, rank)

    scene.fake.obey = twice  # type: ignore[method-assign]
    scene.fake.faults["/flush_cache"] = ("before", "busy")
    with pytest.raises(EndpointError, match="busy"):
        scene.follower.sync()
    assert doubled == [0, 1]
    assert scene.fake.checksum() == before
    assert scene.fake.label == "1" and not scene.fake.is_paused
    scene.follower.sync()
    scene.check(version)


def test_changes_are_not_applied_over_others(scene: Scene, rng: np.random.Generator) -> None:
    """What undoing them puts back would be neither."""
    orders: list[Any] = []
    obey = scene.fake.obey

    def noted(model: FusedModel, rank: int) -> None:
        assert scene.fake.staging is not None
        orders.append(staged.read_order(scene.fake.staging))
        obey(model, rank)

    scene.fake.obey = noted  # type: ignore[method-assign]
    kept: list[tuple[str, bytes]] = []

    def reached(step: str) -> None:
        if step == "sent" and not kept:
            kept.extend(
                (p.name, p.read_bytes()) for p in (scene.root / "staging").glob("journal-*")
            )

    follower = scene.another(reached=reached)
    follower.sync()
    scene.train(rng)
    follower.sync()
    scene.check(2)
    after = scene.fake.checksum()
    for name, data in kept:
        (scene.root / "staging" / name).write_bytes(data)
    again = orders[-1]
    staged.write_order(
        scene.root / "staging",
        staged.Order("f" * 32, "apply", again.checkpoint, again.journals, again.prints),
    )
    answer = worker.obey(scene.fake.models[0], scene.root / "staging", 0)
    assert answer.error is not None and "neither undone nor followed by a check" in answer.error
    assert scene.fake.checksum() == after


@pytest.mark.parametrize("proves", [True, False])
def test_a_server_that_was_started_anew_in_an_update_has_nothing_to_take_back(
    scene: Scene, rng: np.random.Generator, tmp_path: Path, proves: bool
) -> None:
    """It has loaded the checkpoint, which is ahead: those are not the old weights."""
    is_trained: list[bool] = []

    def reached(step: str) -> None:
        if step == "ended" and is_trained:
            scene.fake.restart(tmp_path / "model", "1")
            raise CommitError("broken")

    follower = scene.another(reached=reached, options=CommitOptions(proves=proves))
    follower.sync(1)
    scene.train(rng)
    is_trained.append(True)
    with pytest.raises((TornUpdateError, OutcomeUnknownError)):
        follower.sync()
    assert follower.held() is None and not follower.is_serving()
    scene.another().sync()
    scene.check(2)


@pytest.mark.parametrize("which", ["new", "old"])
def test_a_tensor_that_is_loaded_whole_is_proved_at_the_rank(
    scene: Scene, rng: np.random.Generator, which: str
) -> None:
    for model in scene.fake.models:
        model.own.quant_method = Fp8LinearMethod()  # type: ignore[assignment]
    before = scene.fake.checksum()
    name = "model.norm.weight"
    scene.train(rng, names=(name,))
    if which == "old":
        scene.fake.faults["/flush_cache"] = ("before", "busy")

    def spoilt(load: Any) -> Any:
        def loading(model: FusedModel, rank: int) -> None:
            assert scene.fake.staging is not None
            act = staged.read_order(scene.fake.staging).act
            if rank == 1 and act == ("apply" if which == "new" else "undo"):
                file = scene.root / "model" / "model.safetensors"
                held = file.read_bytes()
                place = held.index(scene.weights[name].view(torch.uint8).numpy().tobytes())
                file.write_bytes(held[:place] + bytes([held[place] ^ 1]) + held[place + 1 :])
                load(model, rank)
                file.write_bytes(held)
                return
            load(model, rank)

        return loading

    scene.fake.obey = spoilt(scene.fake.obey)  # type: ignore[method-assign]
    if which == "old":
        with pytest.raises(TornUpdateError, match="does not hold the bits"):
            scene.follower.sync()
        assert scene.fake.is_paused and scene.follower.held() is None
        return
    with pytest.raises(CommitError, match="rank 1 of 2: CommitError: .*does not hold the bits"):
        scene.follower.sync()
    assert scene.fake.checksum() == before
    assert scene.fake.label == "1" and not scene.fake.is_paused


def test_a_journal_that_changes_while_a_rank_reads_it_is_read_as_it_was(
    scene: Scene, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.train(rng)
    apply = RankWeights.apply

    def spoilt(self: RankWeights, *given: Any) -> int:
        for path in (scene.root / "staging").glob("journal-*"):
            data = path.read_bytes()
            path.write_bytes(data[:8] + bytes(len(data) - 8))
        return apply(self, *given)

    monkeypatch.setattr(RankWeights, "apply", spoilt)
    with pytest.raises(CommitError, match="journal"):
        scene.follower.sync()  # the second rank finds it damaged, and the first one takes it back
    assert scene.fake.label == "1"
    assert scene.fake.is_paused or scene.follower.is_serving()
    monkeypatch.undo()
    scene.another().sync()
    scene.check(2)
