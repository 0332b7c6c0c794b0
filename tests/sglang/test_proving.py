"""What goes into a server is proved where it is read, and what a server holds before and after by its own checksums."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import syncline
from sglang_scenes import Scene, build
from syncline.engines import CheckpointDir
from syncline.errors import CommitError, SynclineError, TornUpdateError, VerifyError
from syncline.sglang import mirror, partial
from syncline.sglang.commit import CommitOptions
from syncline.sglang.proved import Proved, prints

SUCCESS = {"success": True, "message": "Success"}


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = build(tmp_path, "0.5.23", ranks=2, loader=False)
    with made.fake:
        made.follower.sync()
        yield made
        made.follower.close()


@pytest.fixture
def in_place(tmp_path: Path) -> Iterator[Scene]:
    made = build(tmp_path, "0.5.23", ranks=2)
    with made.fake:
        made.follower.sync()
        yield made
        made.follower.close()


def spoil(path: Path) -> None:
    """Turn the last bits of a file over, as somebody else who writes there."""
    with path.open("r+b") as file:
        file.seek(-64, 2)
        last = file.read()
        file.seek(-64, 2)
        file.write(bytes(byte ^ 1 for byte in last))


def serves_old(scene: Scene, checksum: str) -> None:
    assert scene.fake.checksum() == checksum
    assert scene.fake.label == "1" and not scene.fake.is_paused
    assert scene.follower.is_serving()


@pytest.mark.parametrize("step", ["paused", "begun"])
def test_a_staged_file_that_is_changed_before_it_is_loaded_is_not_named(
    scene: Scene, tmp_path: Path, rng: np.random.Generator, step: str
) -> None:
    before = scene.fake.checksum()
    staged = tmp_path / "staging" / "new" / "model.safetensors"
    follower = scene.another(reached=lambda at: spoil(staged) if at == step else None)
    follower.sync()
    scene.train(rng)
    with pytest.raises(VerifyError, match="changed while the server loaded it"):
        follower.sync()
    serves_old(scene, before)
    scene.another().sync()
    scene.check(2)


def test_a_staged_file_that_is_changed_back_in_time_is_noticed(
    scene: Scene, tmp_path: Path, rng: np.random.Generator
) -> None:
    before = scene.fake.checksum()
    staged = tmp_path / "staging" / "new" / "model.safetensors"

    def reached(step: str) -> None:
        if step == "begun":
            spoil(staged)

    load = scene.fake._load
    loads = []

    def loading(tensors: Any) -> None:
        load(tensors)
        if staged.exists() and not loads:
            loads.append(spoil(staged))

    follower = scene.another(reached=reached)
    follower.sync()
    scene.train(rng)
    scene.fake._load = loading  # type: ignore[method-assign]
    with pytest.raises(VerifyError, match="changed while"):
        follower.sync()
    assert loads
    serves_old(scene, before)


@pytest.mark.parametrize("how", ["spoilt", "moved on"])
def test_a_checkpoint_that_is_changed_while_it_is_loaded_whole_is_not_named(
    scene: Scene, tmp_path: Path, rng: np.random.Generator, how: str
) -> None:
    version = scene.train(rng)
    done: list[str] = []

    def reached(step: str) -> None:
        if step != "begun" or done:
            return
        done.append(how)
        if how == "spoilt":
            spoil(tmp_path / "model" / "model.safetensors")
            return
        scene.train(rng)
        store = syncline.open_store(str(tmp_path / "run"))
        syncline.Receiver(store, CheckpointDir(tmp_path / "model")).sync()

    follower = scene.another(reached=reached)
    with pytest.raises(TornUpdateError, match="changed while"):
        follower.sync(version, repair=True)
    assert scene.fake.is_paused and scene.fake.label == "1"
    assert follower.held() is None
    done_at = follower.sync()
    assert done_at is not None and done_at.route == "from disk"
    scene.check(2 if how == "spoilt" else 3)


def test_a_checkpoint_that_was_spoilt_is_repaired_before_it_is_loaded(
    scene: Scene, tmp_path: Path, rng: np.random.Generator
) -> None:
    scene.train(rng)
    spoil(tmp_path / "model" / "model.safetensors")
    shutil.rmtree(tmp_path / "staging")
    scene.another().sync()
    scene.check(2)
    spoil(tmp_path / "model" / "model.safetensors")
    (tmp_path / "staging" / "proof.json").unlink()
    scene.another().sync()  # of the same version, so that nothing is pulled
    scene.check(2)


@pytest.mark.parametrize("route", ["disk", "memory"])
def test_tensors_of_a_spoilt_checkpoint_are_not_sent(
    scene: Scene, tmp_path: Path, rng: np.random.Generator, route: Any
) -> None:
    before = scene.fake.checksum()
    follower = scene.another(route=route)
    follower.sync()
    name = "model.norm.weight"
    scene.train(rng, names=(name,))
    view, pending_to = mirror.Mirror.view, mirror.Mirror.pending_to
    pulled: list[bool] = []

    def spoilt(self: mirror.Mirror, wanted: str) -> Any:
        found = view(self, wanted)
        return found ^ 1 if pulled and wanted == name else found

    def noticed(self: mirror.Mirror, target: Any) -> Any:
        pulled.append(True)
        return pending_to(self, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mirror.Mirror, "view", spoilt)
        patch.setattr(mirror.Mirror, "pending_to", noticed)
        with pytest.raises(VerifyError):
            follower.sync()
    serves_old(scene, before)
    done = scene.another().sync()
    assert done is not None and done.route == "from disk"
    scene.check(2)


def test_a_foreign_write_to_a_tensor_that_does_not_change_is_found(
    in_place: Scene, rng: np.random.Generator
) -> None:
    scene = in_place
    scene.train(rng, names=("model.norm.weight",))
    with torch.no_grad():
        scene.fake.models[1].own["0_qkv"].data[:] = 3.0
    spoilt = scene.fake.checksum()
    with pytest.raises(TornUpdateError, match="somebody else wrote its weights"):
        scene.follower.sync()
    assert scene.fake.checksum() == spoilt and scene.fake.is_paused  # nothing was written over it
    assert scene.follower.held() is None
    done = scene.follower.sync()
    assert done is not None and done.route == "from disk"
    scene.check(2)


def test_a_foreign_write_is_found_by_the_routes_of_whole_tensors_too(
    scene: Scene, rng: np.random.Generator
) -> None:
    scene.train(rng, names=("model.norm.weight",))
    with torch.no_grad():
        scene.fake.models[0].own["1_down"].data[:] = 3.0
    with pytest.raises(TornUpdateError, match="somebody else wrote its weights"):
        scene.follower.sync()
    scene.follower.sync()
    scene.check(2)


@pytest.mark.parametrize(
    "about",
    [{"enable_eplb": True}, {"elastic_ep_backend": "mooncake"}],
    ids=["balances", "elastic"],
)
def test_a_server_that_moves_its_experts_itself_is_not_taken_for_written_by_others(
    scene: Scene, rng: np.random.Generator, about: dict[str, object]
) -> None:
    """Its checksums change with no update: what it holds is told by them after one alone."""
    scene.fake.about.update(about)
    scene.train(rng, names=("model.norm.weight",))
    with torch.no_grad():
        scene.fake.models[1].own["0_qkv"].data[:] = 3.0  # stands for a move
    done = scene.follower.sync()
    assert done is not None and done.label == "2"
    assert scene.follower.is_serving()


def test_a_restarted_follower_knows_what_the_server_must_hold(
    in_place: Scene, rng: np.random.Generator
) -> None:
    scene = in_place
    heir = scene.another()
    assert heir.sync() is None
    scene.train(rng, names=("model.norm.weight",))
    with torch.no_grad():
        scene.fake.models[1].own["0_qkv"].data[:] = 3.0
    with pytest.raises(TornUpdateError, match="somebody else wrote its weights"):
        heir.sync()


def test_a_load_from_disk_that_does_nothing_is_not_named(
    scene: Scene, rng: np.random.Generator
) -> None:
    before = scene.fake.checksum()
    scene.train(rng)
    scene.fake.lies["/update_weights_from_disk"] = SUCCESS
    with pytest.raises(CommitError, match="holds what it held before"):
        scene.follower.sync()
    serves_old(scene, before)
    scene.fake.lies.clear()
    scene.follower.sync()
    scene.check(2)


def test_tensors_from_memory_that_do_nothing_are_not_named(
    scene: Scene, rng: np.random.Generator
) -> None:
    before = scene.fake.checksum()
    follower = scene.another(route="memory")
    follower.sync()
    scene.train(rng, names=("model.norm.weight",))
    scene.fake.lies["/update_weights_from_tensor"] = SUCCESS
    with pytest.raises(CommitError, match="holds what it held before"):
        follower.sync()
    serves_old(scene, before)


def test_a_load_of_the_whole_that_does_nothing_is_not_named(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """The server was started from version 1, and nothing tells that it does not hold version 2."""
    scene = build(tmp_path, "0.5.23", loader=False)
    scene.train(rng)
    with scene.fake:
        scene.fake.lies["/update_weights_from_disk"] = SUCCESS
        with pytest.raises(TornUpdateError, match="holds what it held before"):
            scene.follower.sync()
        assert scene.fake.label == "default" and scene.fake.is_paused
        assert scene.follower.held() is None
        scene.fake.lies.clear()
        scene.follower.sync()
        scene.check(2)
        scene.follower.close()


def test_old_weights_that_the_server_does_not_take_back_are_not_called_back(
    scene: Scene, rng: np.random.Generator
) -> None:
    scene.train(rng)

    def reached(step: str) -> None:
        if step == "sent":
            scene.fake.lies["/update_weights_from_disk"] = SUCCESS
            raise CommitError("broken")

    follower = scene.another(reached=reached)
    with pytest.raises(TornUpdateError, match="took the old weights, and does not hold them"):
        follower.sync()
    assert scene.fake.is_paused and follower.held() is None


def test_checksums_of_some_ranks_alone_are_not_believed(
    scene: Scene, rng: np.random.Generator
) -> None:
    scene.train(rng)
    told = scene.fake._checksums()
    scene.fake.lies["/weights_checker"] = {**SUCCESS, **told, "ranks": told["ranks"][:1]}
    with pytest.raises(SynclineError, match="expected checksums of 2 ranks, found 1"):
        scene.follower.sync()


@pytest.mark.parametrize("how", ["lost", "cut short", "damaged"])
def test_changes_that_were_lost_or_damaged_are_made_up_for_by_loading_the_whole(
    in_place: Scene, tmp_path: Path, rng: np.random.Generator, how: str
) -> None:
    scene = in_place
    scene.train(rng)
    scene.fake.faults["/flush_cache"] = ("before", "busy")
    with pytest.raises(SynclineError, match="busy"):
        scene.follower.sync()
    [journal] = (tmp_path / "staging").glob("journal-*")
    if how == "lost":
        journal.unlink()
    elif how == "cut short":
        journal.write_bytes(journal.read_bytes()[:-40])
    else:
        spoil(journal)
    done = scene.follower.sync()
    assert done is not None and done.route == "from disk"
    scene.check(2)
    scene.train(rng)
    done = scene.follower.sync()
    assert done is not None and done.route == "in place"
    scene.check(3)


def test_a_version_with_the_weights_of_the_one_before_is_named(
    scene: Scene, rng: np.random.Generator
) -> None:
    scene.publisher.publish(scene.weights)
    scene.follower.sync()
    scene.check(2)


def test_partial_directories_are_whole(scene: Scene, tmp_path: Path) -> None:
    held = scene.follower.held()
    assert held is not None
    checkpoint = CheckpointDir(tmp_path / "model")
    names = ["model.norm.weight", "lm_head.weight"]
    metas = checkpoint.tensors()
    partial.write(tmp_path / "part", metas, names, checkpoint.view, tmp_path / "model")
    proved = Proved(tmp_path / "part", {name: prints(held)[name] for name in names})
    proved.check()
    (tmp_path / "part" / "more.safetensors").write_bytes(b"")
    with pytest.raises(VerifyError, match="more.safetensors changed"):
        proved.check()
    partial.write(tmp_path / "part", metas, names[:1], checkpoint.view, tmp_path / "model")
    with pytest.raises(VerifyError, match="do not hold the bits"):
        Proved(tmp_path / "part", {name: prints(held)[name] for name in names})


def test_a_whole_load_reads_the_directory_once_in_the_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is loaded twice, to see that the server loads at all."""
    scene = build(tmp_path, "0.5.23", loader=False)
    read: list[bool] = []
    prove = Proved._prove

    def counted(self: Proved) -> None:
        read.append(scene.fake.is_paused)
        prove(self)

    monkeypatch.setattr(Proved, "_prove", counted)
    with scene.fake:
        scene.follower.sync()
        assert scene.fake.calls.count("/update_weights_from_disk") == 3
        assert read == [False, True]
        scene.follower.close()


def test_an_update_whose_proof_cannot_be_noted_has_succeeded(
    scene: Scene, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    scene.train(rng)
    with monkeypatch.context() as patch:
        patch.setattr("syncline.sglang.proof.durable", SimpleNamespace(replace=full))
        done = scene.follower.sync()
    assert done is not None and done.label == "2"
    scene.check(2)
    assert scene.follower.is_serving()
    done = scene.another().sync()  # it knows nothing of the server
    assert done is not None and done.route == "from disk"


@pytest.mark.parametrize("how", ["repaired", "not to be proved"])
def test_checksums_that_nobody_wants_are_not_asked_for(scene: Scene, how: str) -> None:
    heir = scene.another(options=CommitOptions(proves=how == "repaired"))
    scene.fake.calls.clear()
    heir.sync(repair=how == "repaired")
    asked_at = [at for at, call in enumerate(scene.fake.calls) if call == "/weights_checker"]
    assert all(at > scene.fake.calls.index("/pause_generation") for at in asked_at)
    assert bool(asked_at) == (how == "repaired")
    scene.check(1)


def test_a_file_that_no_weights_are_read_from_may_change_during_a_load(
    scene: Scene, tmp_path: Path
) -> None:
    note = tmp_path / "model" / "README.md"

    def reached(step: str) -> None:
        note.write_text(step)

    follower = scene.another(reached=reached)
    follower.sync(repair=True)
    scene.check(1)
