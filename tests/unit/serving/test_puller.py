"""A replica whose engine pulls by itself: readiness, restarts, failures, and what Prometheus sees."""

from __future__ import annotations

import re
import time

import pytest

import syncline
from syncline.cli import main
from syncline.serving import Puller, Replica
from syncline.serving.metrics import METRICS, text
from syncline.vllm.commit import CommitOptions
from syncline.vllm.server import VllmServer
from vllm_fakes import FakeVllm, as_bytes, changed, refused, tensors

OPTIONS = CommitOptions(stage_timeout_s=10, drain_timeout_s=10, step_timeout_s=10, poll_s=0.001)


def wait_for(is_so):
    until_s = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.005)


@pytest.fixture
def followed(tmp_path):
    base = tensors(1)
    url = str(tmp_path / "run")
    publisher = syncline.Publisher(syncline.open_store(url))
    publisher.publish(base)
    vllm = FakeVllm(base)
    server = VllmServer(vllm, syncline.open_store(url), url, OPTIONS)
    assert isinstance(server, Puller)
    with Replica(syncline.open_store(url), server, follow_s=0.01) as replica:
        wait_for(lambda: replica.status().readiness)
        yield vllm, replica, publisher, base
    server.close()


def at(replica, version):
    status = replica.status()
    return status.readiness and status.identity == f"weight_v{version:06}"


def test_it_follows_what_becomes_current(followed):
    vllm, replica, publisher, base = followed
    second = changed(base, 2)
    publisher.publish(second)
    wait_for(lambda: at(replica, 2))
    assert vllm.bits() == as_bytes(second)
    assert vllm.name == "2"


def test_a_server_that_was_started_anew_is_not_ready_until_it_has_caught_up(followed):
    vllm, replica, publisher, base = followed
    second = changed(base, 2)
    publisher.publish(second)
    wait_for(lambda: at(replica, 2))
    fresh = FakeVllm(base)
    vllm.fail["syncline_open"] = refused("syncline_open")
    vllm.sessions, vllm.weights, vllm.name = fresh.sessions, fresh.weights, "default"
    wait_for(lambda: not replica.status().readiness)
    wait_for(lambda: at(replica, 2))
    assert vllm.bits() == as_bytes(second)


def test_a_failure_is_the_reason_and_counted_and_tried_again(followed):
    vllm, replica, publisher, base = followed
    reasons = set()

    def note():
        reasons.add(replica.status().reason)
        return at(replica, 2)

    vllm.fail["reset_caches"] = refused("reset_caches")
    publisher.publish(changed(base, 2))
    wait_for(note)
    figures = replica.figures()
    assert figures["syncline_failures_total"] == 1
    assert figures["syncline_loads_total"] == 2
    assert figures["syncline_version"] == 2


def test_an_engine_that_raises_when_it_is_looked_at_is_not_serving(followed, monkeypatch):
    """The replica's thread ended, and went on being ready with the version of then."""
    _, replica, publisher, base = followed
    server = replica._engine
    is_broken = True

    def is_serving():
        if is_broken:
            raise RuntimeError("on purpose")
        return VllmServer.is_serving(server)

    def sync(version, *, repair=False):
        raise RuntimeError("on purpose, too")

    with monkeypatch.context() as patch:
        patch.setattr(server, "sync", sync)
        patch.setattr(server, "is_serving", is_serving)
        wait_for(lambda: not replica.status().readiness)
        assert replica._thread.is_alive()
    is_broken = False
    publisher.publish(changed(base, 2))
    wait_for(lambda: at(replica, 2))


def test_metrics_are_prometheus_text(followed):
    _, replica, _, _ = followed
    lines = text([replica]).splitlines()
    samples = [line for line in lines if not line.startswith("#")]
    found = [line.split("{")[0] for line in samples]
    assert found == [name for name in METRICS if name in replica.figures()]
    assert {"syncline_pause_seconds", "syncline_failures_total"} <= set(found)
    assert all(re.fullmatch(r'syncline_\w+\{replica="0"\} [\d.e-]+', line) for line in samples)
    assert 'syncline_ready{replica="0"} 1' in samples
    assert 'syncline_version{replica="0"} 1' in samples


def test_a_repair_puts_right_what_something_else_changed(followed, tmp_path):
    vllm, replica, publisher, base = followed
    replica.close()
    replica._engine.close()  # as when its process ends
    next(iter(vllm.weights[1].live.values()))[0] ^= 1
    assert vllm.bits() != as_bytes(base)
    store = syncline.open_store(tmp_path / "run")
    server = VllmServer(vllm, store, str(tmp_path / "run"), OPTIONS)
    with Replica(store, server, follow_s=0.01, repair=True) as second:
        wait_for(lambda: at(second, 1))
        assert vllm.bits() == as_bytes(base)
        vllm.log.clear()
        publisher.publish(changed(base, 2))
        wait_for(lambda: at(second, 2))
    server.close()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--store", "run"],
        ["--store", "run", "--engine", "vllm"],
        ["directory", "--store", "run", "--engine", "vllm", "--url", "http://127.0.0.1:8000"],
        ["directory", "--store", "run", "--url", "http://127.0.0.1:8000"],
    ],
)
def test_what_to_serve_is_said_once(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["serve", *arguments])
    assert ended.value.code == 2
    assert "--url" in capsys.readouterr().err
