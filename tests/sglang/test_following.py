"""An SGLang server kept on a store, against a double of every release: what is served is always what is said."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sglang_tiny as tiny
import syncline
from sglang_fake import VERSIONS, FakeSglang
from sglang_scenes import QUICK, Scene, build
from syncline.commit.journal import JournalWriter
from syncline.engines import CheckpointDir
from syncline.errors import (
    CommitError,
    ConfigError,
    EndpointError,
    LayoutError,
    OutcomeUnknownError,
    SynclineError,
    TornUpdateError,
    TransportUnavailableError,
)
from syncline.sglang import mirror
from syncline.sglang.commit import CommitOptions
from syncline.sglang.control import SglangHttp
from syncline.sglang.server import SglangServer
from syncline.version import PartEntry


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = build(tmp_path, "0.5.23", ranks=2)
    with made.fake:
        yield made


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("loader", [True, False], ids=["in_place", "disk"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_release_follows(
    tmp_path: Path, rng: np.random.Generator, version: str, ranks: int, loader: bool
) -> None:
    scene = build(tmp_path, version, ranks=ranks, loader=loader)
    with scene.fake:
        first = scene.follower.sync()
        assert first is not None and first.route == "from disk"
        scene.check(1)
        for number in range(2, 6):
            assert scene.train(rng) == number
            done = scene.follower.sync()
            assert done is not None
            assert done.route == ("in place" if loader else "from disk")
            scene.check(number)
            assert scene.follower.is_serving()
        assert scene.follower.sync() is None


def test_versions_that_were_skipped_come_in_one_pause(
    scene: Scene, rng: np.random.Generator
) -> None:
    scene.follower.sync()
    for _ in range(4):
        scene.train(rng)
    scene.fake.calls.clear()
    scene.follower.sync()
    scene.check(5)
    assert scene.fake.calls.count("/pause_generation") == 1


def test_the_calls_come_in_the_order_that_keeps_a_server_exact(
    scene: Scene, rng: np.random.Generator
) -> None:
    scene.follower.sync()
    scene.train(rng)
    scene.fake.calls.clear()
    scene.follower.sync()
    assert [c for c in scene.fake.calls if not c.endswith(("info", "openapi.json", "ready"))] == [
        "/pause_generation",
        "/weights_checker",
        "/begin_weight_update",
        "/update_weights_from_tensor",
        "/update_weights_from_tensor",
        "/end_weight_update",
        "/flush_cache",
        "/weights_checker",
        "/update_weight_version",
        "/continue_generation",
    ]


def test_retracted_requests_go_on_and_none_is_aborted(
    scene: Scene, rng: np.random.Generator
) -> None:
    scene.fake.running = ["a", "b"]
    scene.follower.sync()
    scene.train(rng)
    scene.follower.sync()
    scene.check(2)
    assert scene.fake.running == ["a", "b"]
    assert scene.fake.aborted == []


@pytest.mark.parametrize("version", ["0.5.9", "0.5.20"])
def test_older_releases_abort_because_they_cannot_flush_what_was_retracted(
    tmp_path: Path, rng: np.random.Generator, version: str
) -> None:
    scene = build(tmp_path, version)
    with scene.fake:
        scene.fake.running = ["a"]
        scene.follower.sync()
        scene.check(1)
        assert scene.fake.aborted == ["a"]
        retracting = scene.another(options=CommitOptions("retract"))
        scene.train(rng)
        with pytest.raises(ConfigError, match=r"cannot flush its cache while retracted"):
            retracting.sync()
        assert scene.fake.label == "1" and not scene.fake.is_paused


def test_frozen_requests_keep_the_old_version(scene: Scene, rng: np.random.Generator) -> None:
    scene.follower.sync()
    scene.train(rng)
    frozen = scene.another(options=CommitOptions("in_place"))
    scene.fake.running = ["a"]
    with pytest.raises(EndpointError, match="Flush cache failed"):
        frozen.sync()
    assert scene.fake.label == "1" and not scene.fake.is_paused
    assert scene.fake.running == ["a"]
    scene.fake.running = []
    frozen.sync()
    scene.check(2)


@pytest.mark.parametrize(
    "route",
    [
        "/pause_generation",
        "/begin_weight_update",
        "/update_weights_from_tensor",
        "/end_weight_update",
        "/flush_cache",
        "/weights_checker",
        "/update_weight_version",
    ],
)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("fault", ["it is refused", "lost", "dies"])
def test_a_failure_anywhere_is_never_reported_as_the_new_version(
    scene: Scene, rng: np.random.Generator, route: str, when: str, fault: str
) -> None:
    scene.follower.sync()
    before = scene.fake.checksum()
    scene.train(rng)
    scene.fake.faults[route] = (when, fault)
    with pytest.raises(SynclineError) as raised:
        scene.follower.sync()
    unknown = isinstance(raised.value, (TornUpdateError, OutcomeUnknownError))
    if fault == "dies":
        assert unknown
        assert scene.follower.held() is None
        assert not scene.follower.is_serving()
        return
    held = scene.follower.held()
    if unknown:
        assert held is None
        assert scene.fake.is_paused
    else:
        assert held is not None and held.version == 1
        assert scene.fake.checksum() == before
        assert scene.fake.label == "1"
        assert not scene.fake.is_paused
    scene.follower.sync(repair=unknown)
    scene.check(2)


def test_a_400_that_wrote_is_taken_back(scene: Scene, rng: np.random.Generator) -> None:
    scene.follower.sync()
    before = scene.fake.checksum()
    scene.train(rng)
    scene.fake.faults["/end_weight_update"] = ("after", "Weights were updated, but")
    with pytest.raises(EndpointError, match="Weights were updated, but"):
        scene.follower.sync()
    assert scene.fake.checksum() == before
    assert scene.fake.label == "1" and not scene.fake.is_paused


@pytest.mark.parametrize(
    "proves, match",
    [
        (True, "somebody else wrote its weights"),
        (False, r"rank 1 of 2: VerifyError: .*before the update"),
    ],
)
def test_a_server_that_somebody_else_wrote_is_paused_and_loaded_anew(
    scene: Scene, rng: np.random.Generator, proves: bool, match: str
) -> None:
    scene.another(options=CommitOptions(proves=proves)).sync()
    before = scene.fake.checksum()
    scene.train(rng)
    with torch.no_grad():  # something else wrote on the second rank
        scene.fake.models[1].own["norm"].data[:] = 7.0
    spoiled = scene.fake.checksum()
    assert spoiled != before
    with pytest.raises(TornUpdateError, match=match):
        scene.follower.sync()
    assert scene.fake.checksum() == spoiled  # not a bit was written
    assert scene.fake.is_paused  # nothing is generated under a name that is not true
    assert scene.follower.held() is None and not scene.follower.is_serving()
    done = scene.follower.sync()
    assert done is not None and done.route == "from disk"
    scene.check(2)


@pytest.mark.parametrize("loader", [True, False], ids=["in_place", "disk"])
def test_a_checkpoint_that_somebody_else_moved_is_loaded_whole(
    tmp_path: Path, rng: np.random.Generator, loader: bool
) -> None:
    scene = build(tmp_path, "0.5.23", ranks=2, loader=loader)
    with scene.fake:
        scene.follower.sync()
        for moved in (False, True):  # alone, and with a version behind it
            version = scene.train(rng)
            store = syncline.open_store(str(tmp_path / "run"))
            syncline.Receiver(store, CheckpointDir(tmp_path / "model")).sync()
            if moved:
                version = scene.train(rng)
            done = scene.follower.sync()
            assert done is not None and done.route == "from disk"
            scene.check(version)
        version = scene.train(rng)
        done = scene.follower.sync()
        assert done is not None and done.route == ("in place" if loader else "from disk")
        scene.check(version)


def test_two_servers_of_one_checkpoint_both_follow(
    scene: Scene, tmp_path: Path, rng: np.random.Generator
) -> None:
    other = FakeSglang("0.5.23", tmp_path / "model", ranks=2, staging=tmp_path / "other")
    with other:
        second = SglangServer(
            SglangHttp(other.url),
            syncline.open_store(str(tmp_path / "run")),
            CheckpointDir(tmp_path / "model"),
            tmp_path / "other",
            options=QUICK,
        )
        scene.follower.sync()
        second.sync()
        for _ in range(2):
            version = scene.train(rng)
            scene.follower.sync()
            second.sync()
            scene.check(version)
            assert other.label == str(version)
            assert other.checksum() == scene.fake.checksum()


def test_changes_that_cannot_be_kept_are_made_up_for_by_loading_the_whole(
    scene: Scene, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.follower.sync()
    version = scene.train(rng)

    class Full(JournalWriter):
        def finish(self) -> PartEntry:
            raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(mirror, "JournalWriter", Full)
        with pytest.raises(CommitError, match="journal-.*(?i:no space left)"):
            scene.follower.sync()
    assert scene.fake.label == "1"
    done = scene.follower.sync()
    assert done is not None and done.route == "from disk"
    scene.check(version)


def test_one_rank_that_fails_leaves_all_ranks_as_they_were(
    scene: Scene, rng: np.random.Generator
) -> None:
    scene.follower.sync()
    scene.train(rng)
    scene.follower.sync()
    before = scene.fake.checksum()
    scene.train(rng)
    second = scene.fake.models[1]

    def fails() -> None:
        second.post_load_weights = kept  # type: ignore[method-assign]
        raise LayoutError("no room")

    kept = second.post_load_weights
    second.post_load_weights = fails  # type: ignore[method-assign]
    with pytest.raises(CommitError, match="apply: rank 1 of 2: LayoutError: no room"):
        scene.follower.sync()
    assert scene.fake.checksum() == before
    assert scene.fake.label == "2" and not scene.fake.is_paused
    scene.follower.sync()
    scene.check(3)


def test_quantised_layers_are_loaded_whole_and_counted(
    scene: Scene, rng: np.random.Generator
) -> None:
    """They may keep their weights in another layout than the loader writes."""

    class Fp8LinearMethod:
        pass

    for model in scene.fake.models:
        model.own.quant_method = Fp8LinearMethod()
    scene.follower.sync()
    names = ("model.layers.0.self_attn.k_proj.weight", "model.norm.weight")
    scene.train(rng, names=names)
    before = scene.fake.checksum()
    scene.fake.faults["/flush_cache"] = ("before", "busy")
    with pytest.raises(EndpointError, match="busy"):
        scene.follower.sync()
    assert scene.fake.checksum() == before
    assert scene.fake.label == "1"
    done = scene.follower.sync()
    assert done is not None and done.route == "in place"
    assert scene.follower.figures()["syncline_dense_tensors"] == len(names)
    scene.check(2)


def test_layers_packed_for_a_cpu_are_refused_before_anything_is_written(
    scene: Scene, rng: np.random.Generator
) -> None:
    scene.follower.sync()
    scene.fake.models[1].scale.use_intel_amx_backend = True
    before = scene.fake.checksum()
    scene.train(rng)
    with pytest.raises(CommitError, match="rank 1 of 2: LayoutError: layer 'scale' is packed"):
        scene.follower.sync()
    assert scene.fake.checksum() == before
    assert scene.fake.label == "1" and not scene.fake.is_paused


def test_a_rank_that_gives_no_answer_is_not_believed(
    scene: Scene, rng: np.random.Generator
) -> None:
    scene.follower.sync()
    scene.train(rng)
    scene.fake.obey = lambda model, rank: None  # type: ignore[method-assign]
    with pytest.raises(CommitError, match="expected a file, found none"):
        scene.follower.sync()
    assert scene.fake.label == "1" and not scene.fake.is_paused


def test_a_tensor_that_the_loader_drops_is_refused_before_anything_is_written(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    scene = build(tmp_path, "0.5.23")
    with scene.fake:
        scene.fake.models[0].own.pop("1_down")
        place = scene.fake.models[0]._place
        scene.fake.models[0]._place = (  # type: ignore[method-assign]
            lambda name, tensor: (None, None) if "1.mlp.down" in name else place(name, tensor)
        )
        scene.follower.sync()
        before = scene.fake.checksum()
        scene.train(rng, names=("model.layers.1.mlp.down_proj.weight",))
        with pytest.raises(LayoutError, match="SGLang's loader drops it"):
            scene.follower.sync()
        assert scene.fake.checksum() == before
        assert scene.fake.label == "1"


def test_a_killed_follower_leaves_an_open_session_and_the_next_one_starts_anew(
    scene: Scene, rng: np.random.Generator
) -> None:
    scene.follower.sync()
    scene.train(rng)

    class KilledError(BaseException):
        pass

    def killed(step: str) -> None:
        if step == "sent":
            raise KilledError

    dying = scene.another(reached=killed)
    with pytest.MonkeyPatch.context() as patch:  # a process that is gone takes nothing back
        patch.setattr("syncline.sglang.commit.Commit._take_back", lambda *_: None)
        with pytest.raises(KilledError):
            dying.sync()
    assert scene.fake.session is not None and scene.fake.is_paused
    assert scene.fake.label == "1"
    heir = scene.another()
    assert heir.held() is None
    assert not heir.is_serving()
    done = heir.sync()
    assert done is not None and done.route == "from disk"
    scene.check(2)


def test_a_restarted_follower_knows_a_server_by_its_checksums(
    scene: Scene, rng: np.random.Generator
) -> None:
    scene.follower.sync()
    scene.train(rng)
    scene.follower.sync()
    heir = scene.another()
    assert heir.sync() is None
    held = heir.held()
    assert held is not None and held.version == 2
    scene.train(rng)
    done = heir.sync()
    assert done is not None and done.route == "in place"
    scene.check(3)


def test_a_restarted_server_is_known_by_its_checksums_and_never_by_its_word(
    scene: Scene, rng: np.random.Generator
) -> None:
    scene.follower.sync()
    scene.train(rng)
    scene.follower.sync()
    scene.fake.labels = dict.fromkeys(scene.fake.labels, "default")  # the same weights, no name
    assert not scene.follower.is_serving()
    assert scene.follower.held() is None
    scene.fake.labels = dict.fromkeys(scene.fake.labels, "2")
    with torch.no_grad():
        scene.fake.models[0].own["norm"].data[:] = 1.0  # other weights under the right name
    done = scene.follower.sync()
    assert done is not None and done.route == "from disk"
    scene.check(2)


def test_a_store_that_is_gone_leaves_the_server_alone(
    scene: Scene, rng: np.random.Generator
) -> None:
    scene.follower.sync()
    scene.train(rng)
    (scene.root / "run").rename(scene.root / "away")
    with pytest.raises(SynclineError):
        scene.follower.sync()
    scene.fake.calls.clear()
    assert scene.follower.is_serving()
    held = scene.follower.held()
    assert held is not None and held.version == 1
    (scene.root / "away").rename(scene.root / "run")
    scene.follower.sync()
    scene.check(2)


def test_a_server_of_another_model_is_refused(scene: Scene, tmp_path: Path) -> None:
    other = tiny.write(tmp_path / "other", {**tiny.QWEN3, "num_hidden_layers": 1}, seed=3)
    with FakeSglang("0.5.23", other, staging=scene.root / "staging") as fake:
        follower = SglangServer(
            SglangHttp(fake.url),
            syncline.open_store(str(scene.root / "run")),
            CheckpointDir(scene.root / "model"),
            scene.root / "staging",
        )
        before = fake.checksum()
        with pytest.raises(LayoutError, match="are not those of version 1"):
            follower.sync()
        assert fake.checksum() == before and fake.label == "default"
        assert not fake.is_paused


@pytest.mark.parametrize(
    "about, match",
    [
        ({"speculative_algorithm": "EAGLE"}, "draft model would stay behind"),
        ({"dp_size": 2}, "2 data-parallel copies"),
        ({"pp_size": 4}, "4 pipeline stages"),
    ],
)
def test_servers_that_would_be_updated_in_part_are_refused(
    tmp_path: Path, about: dict[str, Any], match: str
) -> None:
    scene = build(tmp_path, "0.5.23", about=about)
    with scene.fake, pytest.raises(ConfigError, match=match):
        scene.follower.sync()
    assert scene.fake.label == "default"


def test_releases_that_are_not_known_are_refused_unless_allowed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.fake.rules["version"] = "0.5.24"
    with pytest.raises(TransportUnavailableError, match=r"SGLang 0\.5\.24: expected one of"):
        scene.follower.sync()
    monkeypatch.setenv("SYNCLINE_SGLANG_UNTESTED", "1")
    scene.follower.sync()
    scene.check(1)


def test_a_release_without_its_routes_is_refused(scene: Scene) -> None:
    scene.fake.rules["version"] = "0.5.20"
    with pytest.raises(TransportUnavailableError, match="expected no route /begin_weight_update"):
        scene.follower.sync()


def test_a_server_that_hangs_is_given_up_at_the_deadline(
    scene: Scene, rng: np.random.Generator
) -> None:
    scene.follower.sync()
    scene.train(rng)
    hasty = scene.another(options=CommitOptions(step_timeout_s=0.3, load_timeout_s=0.3))
    scene.fake.faults["/update_weights_from_tensor"] = ("after", "hangs")
    with pytest.raises(SynclineError):
        hasty.sync()
    assert scene.fake.label == "1"


@pytest.mark.parametrize("version", ["0.5.20", "0.5.23"])
def test_the_plugin_is_a_second_door_without_a_session(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setenv("SYNCLINE_SGLANG_STAGING", str(tmp_path / "staging"))
    scene = build(tmp_path, version, ranks=2, loader=False, hooked=True)
    with scene.fake:
        follower = scene.another(route="plugin")
        first = follower.sync()
        assert first is not None and first.route == "from disk"
        scene.train(rng)
        scene.fake.calls.clear()
        done = follower.sync()
        assert done is not None and done.route == "in place"
        scene.check(2)
        assert "/begin_weight_update" not in scene.fake.calls
        with torch.no_grad():  # something else wrote on the second rank
            scene.fake.models[1].own["norm"].data[:] = 7.0
        spoiled = scene.fake.checksum()
        scene.train(rng)
        with pytest.raises(TornUpdateError, match="somebody else wrote its weights"):
            follower.sync()
        assert scene.fake.checksum() == spoiled
        assert follower.held() is None and scene.fake.is_paused
        follower.sync()
        scene.check(3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nccl_without_a_gpu_is_refused_before_the_server_hears_of_it(
    scene: Scene, rng: np.random.Generator
) -> None:
    follower = scene.another(route="nccl")
    follower.sync()
    scene.train(rng)
    scene.fake.calls.clear()
    with pytest.raises(TransportUnavailableError, match="from a GPU of this process, found none"):
        follower.sync()
    assert not [call for call in scene.fake.calls if "update" in call or "pause" in call]
    assert scene.fake.label == "1"


def test_a_server_without_the_plugin_refuses_and_serves_on(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    scene = build(tmp_path, "0.5.23", loader=False)
    with scene.fake:
        follower = scene.another(route="plugin")
        follower.sync()
        before = scene.fake.checksum()
        scene.train(rng)
        with pytest.raises(EndpointError, match="400"):
            follower.sync()
        assert scene.fake.checksum() == before
        assert scene.fake.label == "1" and not scene.fake.is_paused
