"""What a vLLM says is believed as far as its workers bear it out: a version that is named is the one that is served."""

from __future__ import annotations

import shutil

import pytest

import syncline
from syncline.errors import (
    CommitError,
    ConfigError,
    FormatError,
    OutcomeUnknownError,
    PeerLostError,
    SynclineError,
    TornUpdateError,
    TransportTimeoutError,
)
from syncline.vllm.commit import CommitOptions, bring
from syncline.vllm.server import VllmServer
from vllm_fakes import FakeVllm, as_bytes, changed, refused, tensors

OPTIONS = CommitOptions(stage_timeout_s=10, drain_timeout_s=10, step_timeout_s=10, poll_s=0.001)
LOST = TransportTimeoutError("no answer in 10 s")


class Scene:
    """A run of two versions, a double that serves the first, and its follower."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.base = tensors(1)
        self.publisher = syncline.Publisher(syncline.open_store(url))
        self.publisher.publish(self.base)
        self.second = changed(self.base, 2)
        self.publisher.publish(self.second)
        self.vllm = FakeVllm(self.base)
        self.server = VllmServer(self.vllm, syncline.open_store(url), url, OPTIONS)
        self.server.sync(1)

    def check(self) -> None:
        """Check that the name is that of the bits, and that what the follower says of itself is so."""
        expected = {"1": as_bytes(self.base), "2": as_bytes(self.second)}
        assert self.vllm.bits() == expected[self.vllm.name]
        if self.server.is_serving():
            assert self.vllm.name == str(self.server.held().version)
            assert not self.vllm.is_paused


@pytest.fixture
def scene(tmp_path):
    made = Scene(str(tmp_path / "run"))
    yield made
    made.server.close()


@pytest.mark.parametrize("step", ["syncline_apply", "syncline_finish"])
def test_a_lost_answer_does_not_put_the_old_name_on_new_weights(scene, step):
    """Finishing cannot be taken back: it was, by name alone."""
    scene.vllm.lose[step] = LOST
    with pytest.raises(TransportTimeoutError):
        scene.server.sync(None)
    scene.check()
    assert not scene.vllm.is_paused
    scene.server.sync(None)
    assert scene.vllm.name == "2"
    scene.check()
    assert scene.server.is_serving()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("part", ["_kv", "weights"])
def test_a_worker_that_fails_to_finish_leaves_no_mix(scene, rank, part):
    session = scene.vllm.sessions[rank]
    session._is_kv_finite = False
    kept = session._kv, session.weights.settle

    class Full:
        def is_finite(self):
            return False

        def clear(self):
            session._kv = kept[0]
            raise MemoryError("no room to clear")

    def settle():
        session.weights.settle = kept[1]
        raise MemoryError("no room to settle")

    if part == "_kv":
        session._kv = Full()
    else:
        session.weights.settle = settle
    with pytest.raises(CommitError, match="no room to"):
        scene.server.sync(None)
    scene.check()
    assert not scene.vllm.is_paused
    scene.server.sync(None)
    assert scene.vllm.name == "2"
    scene.check()


def test_a_worker_that_never_finishes_leaves_generation_paused(scene):
    def finish():
        raise MemoryError("never")

    scene.vllm.sessions[1].finish = finish
    with pytest.raises(OutcomeUnknownError, match="MemoryError: never"):
        scene.server.sync(None)
    assert scene.vllm.is_paused
    assert scene.server.held() is None and not scene.server.is_serving()


def test_a_second_driver_that_takes_a_version_back_is_found_out(scene):
    """It settled what it took for a dead driver's leavings; the first then named a version that nobody held."""

    def second(step):
        if step == "caches_reset":
            scene.vllm.call("syncline_undo", timeout_s=10)

    with pytest.raises(CommitError, match="something else drive"):
        bring(scene.vllm, scene.url, 2, OPTIONS, reached=second)
    scene.check()
    assert scene.vllm.name == "1" and not scene.vllm.is_paused


def test_a_second_driver_that_stages_another_version_is_found_out(scene):
    def second(step):
        if step == "caches_reset":
            scene.vllm.call("syncline_undo", timeout_s=10)
            scene.vllm.call("syncline_stage", "1", "", timeout_s=10)

    with pytest.raises(CommitError):
        bring(scene.vllm, scene.url, 2, OPTIONS, reached=second)
    scene.check()


def test_a_mix_from_an_earlier_update_is_not_gone_on_with_when_its_repair_fails(scene):
    def fault(step):
        raise MemoryError(f"no {step}")

    scene.vllm.weights[1].fault = fault
    with pytest.raises(TornUpdateError):
        scene.server.sync(None)
    scene.vllm.weights[1].fault = lambda step: None
    scene.vllm.fail["pause"] = refused("pause")
    with pytest.raises(TornUpdateError, match="mix of two versions"):
        bring(scene.vllm, scene.url, 2, OPTIONS, repair=True)
    assert scene.vllm.is_paused
    assert not scene.server.is_serving()
    scene.server.sync(None, repair=True)
    assert scene.vllm.name == "2"
    scene.check()
    assert scene.server.is_serving()


def test_a_resume_that_is_not_answered_is_made_up_for(scene):
    """The next sync found the version there, and left generation paused for ever."""
    scene.vllm.fail["resume"] = LOST
    with pytest.raises(TransportTimeoutError):
        scene.server.sync(None)
    assert scene.vllm.is_paused and not scene.server.is_serving()
    scene.server.sync(None)
    assert not scene.vllm.is_paused
    scene.check()
    assert scene.server.is_serving()


def test_a_paused_vllm_is_not_ready_and_not_taken_from_whoever_paused_it(scene):
    scene.server.sync(None)
    scene.vllm.is_paused = True
    assert not scene.server.is_serving()
    with pytest.raises(CommitError, match="paused by somebody else"):
        scene.server.sync(1)
    assert scene.vllm.is_paused and scene.vllm.name == "2"
    scene.vllm.is_paused = False
    assert scene.server.is_serving()


def test_a_vllm_that_was_started_anew_under_the_right_name_is_not_ready(scene):
    scene.server.sync(None)
    started_anew = FakeVllm(scene.base)
    scene.vllm.sessions, scene.vllm.weights = started_anew.sessions, started_anew.weights
    assert scene.vllm.name == "2"
    assert not scene.server.is_serving()
    scene.server.sync(None)
    scene.check()
    assert scene.server.is_serving()


def test_a_name_that_another_gave_is_not_believed(scene):
    """Version 1 is held, and named as the second."""
    scene.vllm.name = "2"
    assert not scene.server.is_serving()
    scene.server.sync(None)
    scene.check()
    assert scene.server.is_serving()


def test_a_store_that_the_workers_see_as_another_run_is_refused_before_the_pause(scene, tmp_path):
    other = str(tmp_path / "other")
    publisher = syncline.Publisher(syncline.open_store(other))
    publisher.publish(scene.base)
    publisher.publish(changed(scene.base, 3))
    vllm = FakeVllm(scene.base)
    server = VllmServer(vllm, syncline.open_store(scene.url), other, OPTIONS)
    with pytest.raises(CommitError, match="that is another run"):
        server.sync(2)
    assert "pause" not in vllm.log and vllm.name == "default"
    assert server.held() is None


def test_another_run_that_has_the_same_number_is_not_there(scene, tmp_path):
    """The workers hold version 2 of one run; version 2 of another was named without a change."""
    scene.server.sync(None)
    other = str(tmp_path / "other")
    publisher = syncline.Publisher(syncline.open_store(other))
    publisher.publish(scene.base)
    third = changed(scene.base, 3)
    publisher.publish(third)
    scene.server.close()
    server = VllmServer(scene.vllm, syncline.open_store(other), other, OPTIONS)
    with pytest.raises(SynclineError):
        server.sync(None)
    assert scene.vllm.bits() == as_bytes(scene.second)
    server.sync(None, repair=True)
    assert scene.vllm.bits() == as_bytes(third)
    assert server.is_serving() and not scene.server.is_serving()


@pytest.mark.parametrize(
    "lie",
    [
        lambda answers: [],
        lambda answers: answers[:1],
        lambda answers: answers[::-1],
        lambda answers: [answers[0], answers[0]],
        lambda answers: [{**answer, "workers": 3} for answer in answers],
        lambda answers: [{"error": None}, {"error": None}],
    ],
    ids=["none", "one", "turned round", "one twice", "of three", "of nobody"],
)
@pytest.mark.parametrize(
    "method",
    ["syncline_open", "syncline_stage", "syncline_status", "syncline_apply", "syncline_finish"],
)
def test_answers_that_are_not_those_of_all_workers_are_not_believed(scene, method, lie):
    scene.vllm.answer = lambda asked, answers: lie(answers) if asked == method else answers
    with pytest.raises((FormatError, OutcomeUnknownError), match="answer of each worker") as raised:
        scene.server.sync(None)
    scene.vllm.answer = lambda asked, answers: answers
    if isinstance(raised.value, OutcomeUnknownError):
        assert method == "syncline_finish" and scene.vllm.is_paused
    else:
        scene.check()
    for session in scene.vllm.sessions:
        session._thread.join()
    scene.server.sync(None)
    scene.check()
    assert scene.vllm.name == "2" and not scene.vllm.is_paused


def test_a_name_that_is_not_taken_is_taken_back(scene):
    told = scene.vllm.set_label
    scene.vllm.set_label = lambda label, timeout_s: None
    with pytest.raises(CommitError, match="was told the name '2' and says '1'"):
        scene.server.sync(None)
    scene.vllm.set_label = told
    scene.check()
    assert scene.vllm.name == "1" and not scene.vllm.is_paused


@pytest.mark.parametrize("kind", [OSError, RuntimeError, MemoryError])
def test_taking_back_that_meets_a_foreign_error_is_not_known_to_have_worked(scene, kind):
    scene.vllm.fail["reset_caches"] = refused("reset_caches")
    scene.vllm.fail["syncline_undo"] = kind("on purpose")
    with pytest.raises(OutcomeUnknownError, match="on purpose"):
        scene.server.sync(None)
    assert scene.vllm.is_paused and not scene.server.is_serving()
    scene.server.sync(None)
    scene.check()


@pytest.mark.parametrize("kind", [OSError, RuntimeError, MemoryError])
@pytest.mark.parametrize("step", ["pause", "syncline_apply", "reset_caches", "set_label"])
def test_a_foreign_error_at_any_step_is_ours_and_the_old_version_is_served(scene, step, kind):
    scene.vllm.fail[step] = kind("on purpose")
    with pytest.raises(CommitError, match=f"serves what it served: {kind.__name__}: on purpose"):
        scene.server.sync(None)
    scene.check()
    assert scene.vllm.name == "1" and not scene.vllm.is_paused
    assert scene.server.is_serving()


def test_a_second_follower_is_refused_and_touches_nothing(scene):
    second = VllmServer(scene.vllm, syncline.open_store(scene.url), scene.url, OPTIONS)
    scene.vllm.log.clear()
    with pytest.raises(CommitError, match="another follower has this server"):
        second.sync(None)
    assert scene.vllm.log == [] and second.held() is None and not second.is_serving()
    scene.server.sync(None)
    scene.check()
    scene.server.close()
    second.sync(1)
    assert scene.vllm.name == "1"
    with pytest.raises(CommitError, match="another follower"):
        scene.server.sync(None)
    second.close()


def test_a_second_follower_does_not_end_the_pause_of_the_first(scene, monkeypatch):
    second = VllmServer(scene.vllm, syncline.open_store(scene.url), scene.url, OPTIONS)
    seen = []
    reset = scene.vllm.reset_caches

    def meanwhile(timeout_s):
        with pytest.raises(CommitError, match="another follower"):
            second.sync(None)
        seen.append(scene.vllm.is_paused)
        reset(timeout_s)

    monkeypatch.setattr(scene.vllm, "reset_caches", meanwhile)
    scene.server.sync(None)
    assert seen == [True]
    scene.check()
    assert scene.vllm.name == "2"


class Killed(BaseException):
    """What no driver survives."""


def left_by_a_dead_driver(scene, monkeypatch):
    """Let a driver name version 2 and die before it has finished; return who follows next."""

    def reached(step):
        if step == "labelled":
            raise Killed

    scene.server.close()
    with monkeypatch.context() as patch:
        patch.setattr("syncline.vllm.commit._take_back", lambda *_: None)
        patch.setattr("syncline.vllm.commit._has_gone_on", lambda *_: False)
        with pytest.raises(Killed):
            bring(scene.vllm, scene.url, 2, OPTIONS, reached=reached)
    assert scene.vllm.name == "2" and scene.vllm.is_paused
    scene.server = VllmServer(scene.vllm, syncline.open_store(scene.url), scene.url, OPTIONS)


@pytest.mark.parametrize("step", ["syncline_open", "syncline_stage", "pause", "reset_caches"])
def test_the_name_that_a_dead_driver_gave_is_not_restored(scene, monkeypatch, step):
    """Taking back named version 1 as the second, and went on; a failed staging left that for others to go on with."""
    left_by_a_dead_driver(scene, monkeypatch)
    scene.vllm.fail[step] = refused(step)
    with pytest.raises(SynclineError):
        scene.server.sync(None)
    assert scene.vllm.name == "1" and not scene.vllm.is_paused
    scene.check()


@pytest.mark.parametrize("step", ["syncline_open", "reset_caches"])
def test_a_name_that_taking_back_left_is_not_restored(scene, step):
    """Version 2 was named, and taking it back failed where the name was to be put back."""

    def reached(step):
        if step == "labelled":
            scene.vllm.fail["set_label"] = refused("set_label")
            raise CommitError("stopped")

    with pytest.raises(OutcomeUnknownError):
        bring(scene.vllm, scene.url, 2, OPTIONS, reached=reached)
    assert scene.vllm.name == "2" and scene.vllm.is_paused
    scene.vllm.fail[step] = refused(step)
    with pytest.raises(SynclineError):
        bring(scene.vllm, scene.url, 2, OPTIONS)
    assert scene.vllm.name == "1" and not scene.vllm.is_paused
    scene.check()


@pytest.mark.parametrize(("name", "kept"), [("2", "default"), ("mine", "mine")])
def test_weights_that_are_no_version_are_not_named_as_one(tmp_path, name, kept):
    scene = Scene(str(tmp_path / "run"))
    scene.server.close()
    vllm = FakeVllm(scene.base)
    vllm.name, vllm.fail["reset_caches"] = name, refused("reset_caches")
    with pytest.raises(SynclineError):
        bring(vllm, scene.url, 2, OPTIONS)
    assert vllm.name == kept and vllm.bits() == as_bytes(scene.base)


def test_workers_of_two_versions_are_not_gone_on_with(scene):
    """One worker has finished version 2, and the other has taken it back."""
    bring(scene.vllm, scene.url, 1, OPTIONS)
    scene.vllm.is_paused = True

    def lie(method, answers):
        if method in ("syncline_status", "syncline_undo"):
            return [answers[0], {**answers[1], "version": 2, "sha256": "0" * 64}]
        return answers

    scene.vllm.answer = lie
    scene.vllm.fail["pause"] = refused("pause")
    with pytest.raises(TornUpdateError, match="a mix of two versions"):
        bring(scene.vllm, scene.url, 2, OPTIONS, repair=True)
    assert scene.vllm.is_paused


@pytest.mark.parametrize("is_repair", [False, True])
def test_a_vllm_of_several_engines_is_refused_and_not_touched(scene, is_repair):
    """Only the first engine's workers answer: a version was named that the second had not taken."""
    scene.vllm.count = 2
    scene.vllm.log.clear()
    with pytest.raises(ConfigError, match="found 2 .--data-parallel-size."):
        scene.server.sync(None, repair=is_repair)
    assert scene.vllm.log == [] and scene.vllm.name == "1"


@pytest.mark.parametrize("step", ["syncline_open", "syncline_stage", "reset_caches"])
def test_a_failure_is_no_reason_to_end_anothers_pause(scene, step):
    scene.vllm.fail[step] = refused(step)
    with pytest.raises(SynclineError):
        scene.server.sync(None)
    scene.vllm.is_paused = True
    with pytest.raises(CommitError, match="paused by somebody else"):
        scene.server.sync(None)
    assert scene.vllm.is_paused
    scene.check()


def test_a_pause_that_was_not_answered_and_came_late_is_ended(scene):
    scene.vllm.fail["pause"] = LOST
    with pytest.raises(TransportTimeoutError):
        scene.server.sync(None)
    scene.vllm.is_paused = True
    scene.server.sync(None)
    assert not scene.vllm.is_paused and scene.server.is_serving()
    scene.check()


def start_anew(scene):
    """Let the vLLM stand as after a start from its checkpoint."""
    fresh = FakeVllm(scene.base)
    scene.vllm.sessions, scene.vllm.weights = fresh.sessions, fresh.weights
    scene.vllm.name = "default"


def test_a_version_that_a_vllm_has_lost_is_not_said_to_be_held(scene):
    start_anew(scene)
    assert not scene.server.is_serving() and scene.server.held() is None


def test_a_version_that_a_vllm_has_lost_is_forgotten_when_nothing_can_be_followed(
    scene, tmp_path, monkeypatch
):
    """With a store that was gone, too, the follower went on saying that it served the version."""
    start_anew(scene)
    shutil.move(scene.url, tmp_path / "away")
    with pytest.raises(SynclineError):
        scene.server.sync(None)
    assert scene.server.held() is None
    shutil.move(tmp_path / "away", scene.url)
    scene.server.sync(None)
    assert scene.server.is_serving()

    def dead(*_, **__):
        raise PeerLostError("nobody listens")

    for name in ("call", "label", "paused"):
        monkeypatch.setattr(scene.vllm, name, dead)
    with pytest.raises(PeerLostError):
        scene.server.sync(None)
    assert scene.server.held() is None
