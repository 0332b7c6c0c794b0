"""A commit on a real vLLM of two workers: what requests before, across and after it see."""

from __future__ import annotations

import json
import time

import pytest

PROMPT = [3 + (7 * i * i + 3 * i) % 90 for i in range(301)]
LONG = 2000


def test_a_prompt_that_was_cached_gives_the_new_versions_output(server, trainer, follow):
    old = follow().version
    before = server.generate(PROMPT, 24)
    assert before["token_ids"] == trainer.tokens(old, PROMPT, 24)
    new = follow().version
    after = server.generate(PROMPT, 24)
    assert after["token_ids"] == trainer.tokens(new, PROMPT, 24)
    assert after["token_ids"] != before["token_ids"]
    assert after["weight_versions"] == [{"version": str(new), "start": 0, "end": 24}]


@pytest.mark.usefixtures("slow_steps")
def test_a_request_that_is_kept_goes_on_with_the_new_weights_and_says_where(
    server, trainer, follow, publish
):
    old = follow().version
    new = publish()
    running = []
    follow(new, pause="keep", when_staged=lambda: running.append(server.begin(PROMPT[:20], LONG)))
    found = running[0].result()
    tokens = found["token_ids"]
    first, second = found["weight_versions"]
    assert (first["version"], second["version"]) == (str(old), str(new))
    assert 0 == first["start"] < first["end"] == second["start"] < second["end"] == LONG
    at = second["start"]
    everything = PROMPT[:20] + tokens
    by_old, by_new = (trainer.choices(v, everything)[19:-1] for v in (old, new))
    assert tokens[:at] == by_old[:at]
    assert tokens[at:] == by_new[at:]
    assert by_old[at:] != by_new[at:]


@pytest.mark.usefixtures("slow_steps")
def test_a_request_that_is_waited_for_ends_with_the_old_weights(server, trainer, follow, publish):
    old = follow().version
    new = publish()
    running = []
    follow(new, pause="wait", when_staged=lambda: running.append(server.begin(PROMPT[:20], LONG)))
    found = running[0].result()
    assert found["weight_versions"] == [{"version": str(old), "start": 0, "end": LONG}]
    assert found["token_ids"] == trainer.tokens(old, PROMPT[:20], LONG)
    assert server.generate(PROMPT, 8)["token_ids"] == trainer.tokens(new, PROMPT, 8)


@pytest.mark.usefixtures("slow_steps")
def test_a_request_that_is_aborted_has_tokens_of_the_old_weights_alone(
    server, trainer, follow, publish
):
    old = follow().version
    new = publish()
    running = []
    follow(new, pause="abort", when_staged=lambda: running.append(server.begin(PROMPT[:20], LONG)))
    found = running[0].result()
    assert found["finish_reason"] == "abort"
    count = len(found["token_ids"])
    assert 0 < count < LONG
    assert found["weight_versions"] == [{"version": str(old), "start": 0, "end": count}]


@pytest.mark.usefixtures("slow_steps")
def test_a_pause_that_takes_too_long_is_given_up(server, trainer, follow, publish):
    from syncline.errors import TransportTimeoutError

    old = follow().version
    new = publish()
    running = []
    with pytest.raises(TransportTimeoutError, match="/pause"):
        follow(
            new,
            pause="wait",
            drain_timeout_s=0.05,
            when_staged=lambda: running.append(server.begin(PROMPT[:20], LONG)),
        )
    assert running[0].result()["weight_versions"] == [
        {"version": str(old), "start": 0, "end": LONG}
    ]
    assert server.generate(PROMPT, 8)["token_ids"] == trainer.tokens(old, PROMPT, 8)


def test_vllms_own_lifecycle_drives_the_engine(server, trainer, follow):
    follow()
    version = trainer.step(7)
    store = {"store": str(trainer.store)}
    for path, body in (
        ("/init_weight_transfer_engine", {"init_info": store}),
        ("/start_weight_update", None),
        ("/update_weights", {"update_info": {"version": version, "phase": "stage"}}),
    ):
        assert server.post(path, body)[0] == 200
    while server.rpc("syncline_status")[0]["stage"] == "staging":
        time.sleep(0.05)
    for path, body in (
        ("/pause?mode=keep", None),
        ("/update_weights", {"update_info": {"version": version, "phase": "apply"}}),
        ("/reset_prefix_cache?reset_running_requests=true", None),
        ("/finish_weight_update", {"weight_version": str(version)}),
        ("/resume", None),
    ):
        assert server.post(path, body)[0] == 200
    assert json.loads(server.get("/weight_info")[1]) == {"weight_version": str(version)}
    assert server.generate(PROMPT, 24)["token_ids"] == trainer.tokens(version, PROMPT, 24)
