"""`syncline serve --engine vllm` beside a real vLLM of two workers: the gate, and a repair."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import urllib.request

import pytest

from vllm_serving import environment, status_of

PROMPTS = [[3 + (7 * i * i + 3 * i) % 90 for i in range(count)] for count in (5, 30, 301)]
DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture
def follower(server, trainer, tmp_path):
    """Start the command, return its URL; it is stopped when the test ends."""
    with contextlib.ExitStack() as stack:

        def start(*options: object) -> str:
            log = stack.enter_context((tmp_path / "follower.log").open("ab"))
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "syncline.cli", "serve", "--engine", "vllm"),
                    *("--url", server.url, "--store", str(trainer.store)),
                    *("--poll-s", "0.2", "--json", *map(str, options)),
                ],
                env=environment(tmp_path),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            stack.callback(_stop, process)
            return json.loads(process.stdout.readline())["url"]

        yield start


@pytest.fixture
def probes(trainer):
    from syncline.gate import draw_probes

    return draw_probes(98, scorer=trainer.scorer(), lengths=(4, 30, 300), continuation=6)


@pytest.fixture
def scored(trainer, probes, publish):
    """Publish a version with the trainer's scores: one that is new, or that got broken on the way."""

    def publish_scored(change=None):
        version = publish() if change is None else trainer.broken(change)
        trainer.score(version, probes)
        return version

    return publish_scored


def test_broken_weights_are_flagged_and_served_on(server, trainer, scored, follower):
    good = scored()
    url = follower("--gate", "flag")
    check_passes(url, server, trainer, good)
    broken = scored(swap_gate_and_up)
    wait_for(lambda: is_ready(url, broken) and figure(url, "gate_is_flagged") == 1)
    assert figure(url, "gate_mean_difference_nats") > 0.01
    assert json.loads(server.get("/weight_info")[1]) == {"weight_version": str(broken)}
    check_tokens(server, trainer, broken)
    check_passes(url, server, trainer, scored())


def test_broken_weights_are_rolled_back_and_passed_over(
    server, trainer, scored, follower, tmp_path
):
    good = scored()
    url = follower("--gate", "rollback", "--gate-limits", tmp_path / "limits.json")
    check_passes(url, server, trainer, good)
    assert (tmp_path / "limits.json").exists()
    hashes = server.hashes()
    scored(put_nan)
    wait_for(lambda: "was flagged by the gate and put back" in reason(url))
    assert figure(url, "version") == good
    assert figure(url, "gate_is_flagged") == 1
    assert server.hashes() == hashes
    assert json.loads(server.get("/weight_info")[1]) == {"weight_version": str(good)}
    check_tokens(server, trainer, good)
    check_passes(url, server, trainer, scored())


def test_nan_of_one_version_does_not_reach_the_answers_of_the_next(
    server, trainer, follow, publish
):
    """It stayed in unused slots of the KV cache, where attention multiplies it by 0."""
    broken = trainer.broken(put_nan)
    follow(broken)
    for prompt in PROMPTS:
        assert server.generate(prompt, 4)["token_ids"] == [0] * 4
    check_tokens(server, trainer, follow().version)
    assert "the memory of the KV cache was cleared" in server.log.read_text()


def test_what_something_else_changed_is_put_right_by_a_repair(
    server, trainer, publish, follow, follower
):
    follow()
    hashes = server.hashes()
    server.rpc("faulty_flip", "1", "model.norm.weight")
    assert server.hashes() != hashes
    url = follower("--repair")
    wait_for(lambda: is_ready(url, max(trainer.versions)))
    assert server.hashes() == hashes
    version = publish()
    wait_for(lambda: is_ready(url, version))
    check_tokens(server, trainer, version)


def test_the_command_judges_what_a_server_computes(server, trainer, probes, follow, tmp_path):
    limits = ("--limits", tmp_path / "limits.json")
    trainer.score(follow().version, probes)
    learned = gate(trainer, server, *limits)
    assert (learned.returncode, json.loads(learned.stdout)["verdict"]) == (0, "learned")
    trainer.score(follow().version, probes)
    passed = gate(trainer, server, *limits)
    assert (passed.returncode, json.loads(passed.stdout)["verdict"]) == (0, "passed")
    broken = trainer.broken(swap_gate_and_up)
    trainer.score(broken, probes)
    follow(broken)
    flagged = gate(trainer, server, *limits)
    assert (flagged.returncode, json.loads(flagged.stdout)["verdict"]) == (3, "flagged")


def gate(trainer, server, *options):
    return subprocess.run(
        [
            *(sys.executable, "-m", "syncline.cli", "gate", str(trainer.store), server.url),
            *("--json", *map(str, options)),
        ],
        env=environment(trainer.store.parent / "gate"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def swap_gate_and_up(weights):
    one, other = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up"))
    weights[one], weights[other] = weights[other], weights[one]


def put_nan(weights):
    weights[DOWN].view(-1)[3] = float("nan")


def check_passes(url, server, trainer, version):
    wait_for(lambda: is_ready(url, version) and figure(url, "gate_is_flagged") == 0)
    check_tokens(server, trainer, version)


def check_tokens(server, trainer, version):
    for prompt in PROMPTS:
        expected = trainer.tokens(version, prompt, 8)
        assert server.generate(prompt, 8)["token_ids"] == expected


def is_ready(url, version):
    found = status_of(url)
    return found["readiness"] and found["current_snapshot_identity"] == f"weight_v{version:06}"


def reason(url):
    return str(status_of(url)["readiness_reason"])


def figure(url, name):
    with urllib.request.urlopen(url + "/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    [value] = [line.split()[-1] for line in lines if line.startswith(f"syncline_{name}{{")]
    return float(value)


def wait_for(is_so):
    until_s = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < until_s, "it did not come"
        time.sleep(0.1)


def _stop(process):
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
