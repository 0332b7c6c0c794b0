"""The order of a commit over workers that agree: all steps, and a failure at each of them."""

from __future__ import annotations

import threading

import pytest

import syncline
from syncline.errors import (
    CommitError,
    ConfigError,
    OutcomeUnknownError,
    SynclineError,
    TornUpdateError,
    TransportTimeoutError,
)
from syncline.vllm.commit import CommitOptions, bring
from syncline.vllm.server import VllmServer
from vllm_fakes import FakeVllm, as_bytes, changed, refused, tensors

OPTIONS = CommitOptions(stage_timeout_s=10, drain_timeout_s=10, step_timeout_s=10, poll_s=0.001)


@pytest.fixture
def run(tmp_path):
    """A store with two versions: the base checkpoint, and a delta on it."""
    base = tensors(1)
    url = str(tmp_path / "run")
    publisher = syncline.Publisher(syncline.open_store(url))
    publisher.publish(base)
    second = changed(base, 2)
    publisher.publish(second)
    return url, base, second, publisher


def test_a_commit_stages_before_the_pause_and_resumes_at_its_end(run):
    url, base, second, _ = run
    vllm = FakeVllm(base)
    done = bring(vllm, url, 2, OPTIONS)
    assert vllm.bits() == as_bytes(second)
    assert (vllm.name, vllm.is_paused, done.version) == ("2", False, 2)
    assert vllm.log == [
        "syncline_open",
        "syncline_stage",
        "pause",
        "syncline_apply",
        "reset_caches",
        "set_label",
        "syncline_finish",
        "resume",
    ]
    assert 0 < done.apply_s <= done.pause_s


def test_a_version_that_is_there_is_named_without_a_pause(run):
    url, base, _second, _ = run
    vllm = FakeVllm(base)
    bring(vllm, url, 2, OPTIONS)
    vllm.name, vllm.log = "default", []  # as after a restart that caught up by itself
    assert bring(vllm, url, 2, OPTIONS).pause_s == 0
    assert "pause" not in vllm.log
    assert vllm.name == "2"


@pytest.mark.parametrize(
    "step", ["pause", "syncline_apply", "reset_caches", "set_label", "syncline_finish"]
)
def test_a_step_that_fails_leaves_the_old_version_served(run, step):
    url, base, second, _ = run
    vllm = FakeVllm(base)
    bring(vllm, url, 1, OPTIONS)
    vllm.fail[step] = refused(step)
    with pytest.raises(SynclineError, match=f"{step} was refused"):
        bring(vllm, url, 2, OPTIONS)
    assert vllm.bits() == as_bytes(base)
    assert (vllm.name, vllm.is_paused) == ("1", False)
    bring(vllm, url, 2, OPTIONS)
    assert vllm.bits() == as_bytes(second)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_in_the_middle_on_one_worker_restores_both(run, rank):
    url, base, second, _ = run
    vllm = FakeVllm(base)
    bring(vllm, url, 1, OPTIONS)

    def fault(step):
        if step == "write":
            vllm.weights[rank].fault = lambda step: None
            raise MemoryError("injected")

    vllm.weights[rank].fault = fault
    with pytest.raises(CommitError) as raised:
        bring(vllm, url, 2, OPTIONS)
    assert f"worker {rank} of 2: MemoryError: injected; every worker was put back" in str(
        raised.value
    )
    assert "serves version 1" in str(raised.value)
    assert vllm.bits() == as_bytes(base)
    assert (vllm.name, vllm.is_paused) == ("1", False)
    bring(vllm, url, 2, OPTIONS)
    assert vllm.bits() == as_bytes(second)


def test_weights_that_do_not_have_the_manifests_fingerprint_are_put_back(run):
    url, base, _, _ = run
    vllm = FakeVllm(base)
    name, bits = next(iter(vllm.weights[1].live.items()))
    bits[-1] ^= 1 << 22
    with pytest.raises(CommitError, match="the workers hold weights with fingerprint"):
        bring(vllm, url, 2, OPTIONS)
    expected = as_bytes(base)
    expected[name] = bits.tobytes()
    assert vllm.bits() == expected
    assert not vllm.is_paused


def test_a_worker_that_cannot_undo_leaves_generation_paused_until_a_repair(run):
    url, base, second, _ = run
    vllm = FakeVllm(base)
    bring(vllm, url, 1, OPTIONS)

    def fault(step):
        raise MemoryError(f"no {step}")

    vllm.weights[1].fault = fault
    with pytest.raises(TornUpdateError, match="worker 1 of 2"):
        bring(vllm, url, 2, OPTIONS)
    assert vllm.is_paused
    vllm.weights[1].fault = lambda step: None
    bring(vllm, url, 2, OPTIONS, repair=True)
    assert vllm.bits() == as_bytes(second)
    assert (vllm.name, vllm.is_paused) == ("2", False)


def test_an_undo_that_is_not_answered_is_said_to_be_unknown(run):
    url, base, _, _ = run
    vllm = FakeVllm(base)
    vllm.fail["reset_caches"] = refused("reset_caches")
    vllm.fail["syncline_undo"] = TransportTimeoutError("no answer in 10 s")
    with pytest.raises(OutcomeUnknownError, match="no answer in 10 s"):
        bring(vllm, url, 2, OPTIONS)


def test_what_a_dead_driver_left_applied_is_taken_back_first(run):
    url, base, _second, _ = run
    vllm = FakeVllm(base)
    vllm.fail["reset_caches"] = KeyboardInterrupt()
    vllm.fail["syncline_undo"] = refused("undo")
    with pytest.raises(SynclineError):
        bring(vllm, url, 2, OPTIONS)
    assert vllm.sessions[0].status()["is_applied"]
    bring(vllm, url, 1, OPTIONS)
    assert vllm.bits() == as_bytes(base)
    assert not vllm.is_paused


def test_a_store_that_is_gone_is_an_error_before_the_pause(run, tmp_path):
    _url, base, _, _ = run
    vllm = FakeVllm(base)
    with pytest.raises(CommitError, match=r"no HEAD\.json in .*nothing.*2 of 2 workers"):
        bring(vllm, str(tmp_path / "nothing"), 2, OPTIONS)
    assert "pause" not in vllm.log


def test_another_models_run_is_an_error_before_the_pause(tmp_path, run):
    _, base, _, _ = run
    url = str(tmp_path / "other")
    syncline.Publisher(syncline.open_store(url)).publish({"other": base["w0"]})
    vllm = FakeVllm(base)
    with pytest.raises(CommitError, match="missing other; unknown w0"):
        bring(vllm, url, 1, OPTIONS)
    assert "pause" not in vllm.log


def test_another_run_of_the_same_model_is_refused(tmp_path, run):
    url, base, _, _ = run
    other = str(tmp_path / "other")
    syncline.Publisher(syncline.open_store(other)).publish(changed(base, 5))
    vllm = FakeVllm(base)
    bring(vllm, url, 1, OPTIONS)
    with pytest.raises(CommitError, match="the engine follows run"):
        bring(vllm, other, 1, OPTIONS)
    assert vllm.bits() == as_bytes(base)


def test_staging_that_takes_too_long_changes_nothing(run):
    url, base, _, _ = run
    vllm = FakeVllm(base)
    held = threading.Event()
    stage = vllm.sessions[1]._stage

    def slow(*arguments, **options):
        held.wait(30)
        return stage(*arguments, **options)

    vllm.sessions[1]._stage = slow
    options = CommitOptions(stage_timeout_s=0.05, poll_s=0.001)
    with pytest.raises(
        TransportTimeoutError, match=r"was not staged in 0\.05 s; nothing was changed"
    ):
        bring(vllm, url, 2, options)
    held.set()
    assert "pause" not in vllm.log
    assert vllm.bits() == as_bytes(base)


def test_a_worker_that_does_not_answer_the_others_fails_the_apply(run):
    url, base, _, _ = run
    vllm = FakeVllm(base, timeout_s=0.2)
    held = threading.Event()
    vllm.weights[1].fault = lambda step: held.wait(1.0)
    with pytest.raises(SynclineError, match="another worker did not come"):
        bring(vllm, url, 2, OPTIONS)
    held.set()


def test_versions_on_the_way_are_taken_together(run):
    url, base, second, publisher = run
    third = changed(second, 3)
    publisher.publish(third)
    vllm = FakeVllm(base)
    bring(vllm, url, 1, OPTIONS)
    bring(vllm, url, 3, OPTIONS)
    assert vllm.bits() == as_bytes(third)
    bring(vllm, url, 1, OPTIONS)
    assert vllm.bits() == as_bytes(base)


def test_a_failed_version_is_skipped_by_the_next(run):
    url, base, second, publisher = run
    third = changed(second, 3)
    publisher.publish(third)
    vllm = FakeVllm(base)
    bring(vllm, url, 1, OPTIONS)
    vllm.fail["reset_caches"] = refused("reset_caches")
    with pytest.raises(SynclineError):
        bring(vllm, url, 2, OPTIONS)
    assert vllm.bits() == as_bytes(base)
    bring(vllm, url, 3, OPTIONS)
    assert vllm.bits() == as_bytes(third)


def test_a_failure_after_every_step_is_taken_back_or_finished(run):
    url, base, second, _ = run
    for wanted in ("staged", "paused", "applied", "caches_reset", "labelled", "finished"):
        vllm = FakeVllm(base)
        bring(vllm, url, 1, OPTIONS)

        def stop(step, wanted=wanted):
            if step == wanted:
                raise CommitError(f"stopped after {step}")

        with pytest.raises(CommitError, match=f"stopped after {wanted}"):
            bring(vllm, url, 2, OPTIONS, reached=stop)
        is_old = vllm.bits() == as_bytes(base)
        assert is_old or vllm.bits() == as_bytes(second)
        assert not vllm.is_paused
        assert is_old == (wanted != "finished")


def test_options_are_checked():
    with pytest.raises(ConfigError, match="keep, wait, abort"):
        CommitOptions(pause="freeze")
    with pytest.raises(ConfigError, match="above 0"):
        CommitOptions(step_timeout_s=0)


def test_a_server_knows_what_it_serves_and_when_it_was_started_anew(run):
    url, base, _second, _ = run
    vllm = FakeVllm(base)
    server = VllmServer(vllm, syncline.open_store(url), url, OPTIONS)
    assert server.held() is None
    assert not server.is_serving()
    server.sync(None)
    assert server.held().version == 2
    assert server.is_serving()
    assert set(server.figures()) == {
        "syncline_stage_seconds",
        "syncline_pause_seconds",
        "syncline_apply_seconds",
    }
    vllm.name = "default"
    assert not server.is_serving()
