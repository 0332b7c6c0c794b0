"""What goes wrong with a real vLLM: one clear error, in its log and on the route, and the old version served."""

from __future__ import annotations

import json
import re
import time

import pytest
import torch

import syncline
from syncline.errors import CommitError, OutcomeUnknownError, SynclineError
from vllm_serving import Served

PROMPT = [3 + (7 * i * i + 3 * i) % 90 for i in range(301)]


@pytest.fixture
def unchanged(server, trainer, follow):
    """Check that what was served before is served after: every bit of every worker, tokens and name."""
    old = follow().version
    hashes = server.hashes()
    yield old
    assert server.hashes() == hashes
    found = server.generate(PROMPT, 12)
    assert found["token_ids"] == trainer.tokens(old, PROMPT, 12)
    assert found["weight_versions"] == [{"version": str(old), "start": 0, "end": 12}]
    assert json.loads(server.get("/is_paused")[1]) == {"is_paused": False}


def native_update(server, store, version, **more):
    """Update through vLLM's own routes; return what the last one that was asked answered."""
    asked = (
        ("/init_weight_transfer_engine", {"init_info": {"store": str(store)}}),
        ("/start_weight_update", None),
        ("/update_weights", {"update_info": {"version": version, **more}}),
        ("/finish_weight_update", {"weight_version": str(version)}),
    )
    for path, body in asked:
        status, text = server.post(path, body)
        if status != 200:
            return status, text
    return status, text


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_between_two_writes_on_one_worker_restores_both(
    server, trainer, follow, unchanged, rank
):
    version = trainer.step(10 + rank)
    server.rpc("faulty_arm", str(rank), "between")
    with pytest.raises(CommitError, match=f"worker {rank} of 2: MemoryError: injected between"):
        follow(version)
    assert f"worker {rank} of 2: MemoryError: injected between" in server.log.read_text()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_on_one_worker_restores_both(server, trainer, follow, unchanged, rank):
    version = trainer.step(20 + rank)
    server.rpc("faulty_arm", str(rank), "raise")
    with pytest.raises(CommitError, match=f"worker {rank} of 2: MemoryError: injected"):
        follow(version)
    assert f"worker {rank} of 2: MemoryError: injected in the middle" in server.log.read_text()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_is_answered_on_vllms_own_route_and_leaves_it_usable(
    server, trainer, unchanged, rank
):
    version = trainer.step(30 + rank)
    server.rpc("faulty_arm", str(rank), "raise")
    status, text = native_update(server, trainer.store, version)
    assert status == 500
    assert (
        f"worker {rank} of 2: MemoryError: injected in the middle; every worker was put back"
        in text
    )
    assert [answer["rank"] for answer in server.rpc("syncline_status")] == [0, 1]


def test_a_version_that_is_not_there(server, trainer, unchanged):
    status, text = native_update(server, trainer.store, 10_000)
    assert status == 500
    assert "BaseVersionError: version 10000 is not in this run" in text


def test_a_store_that_is_gone(server, trainer, follow, unchanged):
    version = trainer.step(40)
    away = trainer.store.with_name("away")
    trainer.store.rename(away)
    try:
        with pytest.raises(CommitError, match=r"no HEAD\.json in"):
            follow(version)
        status, text = native_update(server, trainer.store, version)
        assert status == 500
        assert "no HEAD.json in" in text
        assert "no HEAD.json in" in server.log.read_text()
    finally:
        away.rename(trainer.store)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w | {"more.weight": torch.zeros(2)}, "missing more.weight"),
        (lambda w: {n: t for n, t in w.items() if n != "model.norm.weight"}, "unknown model.norm"),
        (lambda w: w | {"model.norm.weight": torch.zeros(65)}, r"F32 \[64\] instead of F32 \[65\]"),
        (lambda w: w, "the engine follows run"),
    ],
    ids=["wrong model", "missing tensor", "wrong shape", "wrong base"],
)
def test_a_run_that_is_not_this_models(server, trainer, follow, unchanged, tmp_path, change, words):
    publisher = syncline.Publisher(syncline.open_store(tmp_path / "other"))
    publisher.publish(change(trainer.weights))
    repair = words != "the engine follows run"
    with pytest.raises(CommitError, match=words):
        follow(1, store=tmp_path / "other", repair=repair)
    assert re.search(words, server.log.read_text())
    status, text = native_update(server, tmp_path / "other", 1, repair=repair)
    assert status == 500
    assert re.search(words, json.loads(text)["error"]["message"])


def test_a_damaged_part_is_refused_before_the_pause(server, trainer, follow, unchanged):
    version = trainer.step(50)
    part = next((trainer.store / f"weight_v{version:06}").glob("*.safetensors"))
    whole = part.read_bytes()
    part.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    try:
        with pytest.raises(CommitError, match="the object is damaged"):
            follow(version)
    finally:
        part.write_bytes(whole)


def test_a_worker_that_hangs_is_reported_and_recovers(server, trainer, follow, unchanged):
    version = trainer.step(60)
    server.rpc("faulty_arm", "1", "hang")
    with pytest.raises((OutcomeUnknownError, SynclineError), match="no answer in"):
        follow(version, step_timeout_s=1.0)
    server.post("/resume")


@pytest.mark.slow
def test_a_vllm_that_is_killed_during_apply_catches_up_after_its_restart(
    server, trainer, follow, control, tmp_path
):
    from syncline.serving import Replica
    from syncline.vllm.commit import CommitOptions
    from syncline.vllm.server import VllmServer

    follow()
    store = syncline.open_store(trainer.store)
    followed = VllmServer(control, store, str(trainer.store), CommitOptions(step_timeout_s=20.0))
    with Replica(store, followed, follow_s=0.2) as replica:
        wait_for(lambda: replica.status().readiness)
        server.rpc("faulty_arm", "1", "die")
        version = trainer.step(70)
        wait_for(lambda: not replica.status().readiness and server.get("/health")[0] != 200)
        server.wait_ended()
        wait_for(lambda: replica.status().stage == "error")
        assert replica.status().identity is None
        server.start()
        wait_for(lambda: replica.status().readiness)
        assert replica.status().identity == f"weight_v{version:06}"
        assert replica.figures()["syncline_failures_total"] >= 1
    assert server.generate(PROMPT, 12)["token_ids"] == trainer.tokens(version, PROMPT, 12)


@pytest.mark.slow
def test_a_vllm_that_cannot_catch_up_does_not_start(model, tmp_path):
    config = {"syncline": {"store": str(tmp_path / "nothing")}}
    served = Served(model, tmp_path, more=("--additional-config", json.dumps(config)))
    try:
        with pytest.raises(RuntimeError, match="vLLM did not start"):
            served.start()
    finally:
        served.stop()
    assert "no HEAD.json in" in served.log.read_text()


def wait_for(is_so, timeout_s=120.0):
    until_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < until_s, "it did not come"
        time.sleep(0.05)
