"""The client against a scripted deployment: what it sends, what it repeats, what it makes of answers."""

from __future__ import annotations

import json
import logging
import traceback
from typing import Any

import pytest

from hot_load_servers import Scripted, scripted
from syncline.errors import (
    CommitError,
    ConfigError,
    EndpointError,
    FormatError,
    PeerLostError,
    SynclineError,
    TransportError,
    TransportTimeoutError,
)
from syncline.hotload import FIREWORKS, Dialect, HotLoadClient
from syncline.hotload.client import PATH
from syncline.hotload.status import ReplicaStatus

SECRET = "a-very-secret-token"


def replica(
    identity: str | None = "v2", *, ready: bool = True, **more: object
) -> dict[str, object]:
    return {"readiness": ready, "current_snapshot_identity": identity, **more}


def answer(*replicas: object) -> tuple[int, dict[str, str], bytes]:
    return 200, {}, json.dumps({"replicas": replicas}).encode()


def test_a_delta_is_told_as_fireworks_wants_it() -> None:
    script = Scripted()
    with scripted(script) as url:
        client = HotLoadClient(
            url,
            token=SECRET,
            model="accounts/a/models/m",
            deployment="accounts/a/deployments/d",
            dialect=FIREWORKS,
        )
        client.tell(
            "step-8",
            previous="step-7",
            compression_format="arc_v2",
            checksum_format="adler32",
            reset_prompt_cache=True,
        )
        loaded = client.wait("step-8", timeout_s=5)
    assert (loaded.ready, loaded.replicas) == (2, 2)
    method, path, headers, body = script.asked[0]
    assert (method, path) == ("POST", PATH)
    assert body == {
        "identity": "step-8",
        "incremental_snapshot_metadata": {
            "previous_snapshot_identity": "step-7",
            "compression_format": "arc_v2",
            "checksum_format": "alder32",
        },
        "reset_prompt_cache": True,
    }
    assert headers["Authorization"] == f"Bearer {SECRET}"
    assert headers["fireworks-model"] == "accounts/a/models/m"
    assert headers["fireworks-deployment"] == "accounts/a/deployments/d"
    assert headers["Content-Type"] == "application/json"
    assert script.asked[1][0] == "GET"


def test_a_full_version_is_told_with_its_identity_alone() -> None:
    script = Scripted()
    with scripted(script) as url:
        HotLoadClient(f"{url}{PATH}/").tell("base")
    assert [(asked[1], asked[3]) for asked in script.asked] == [(PATH, {"identity": "base"})]
    assert "Authorization" not in script.asked[0][2]


@pytest.mark.parametrize("reset", [True, False, "new_session"])
def test_both_spellings_of_a_reset_are_sent_as_they_are(reset: Any) -> None:
    script = Scripted()
    with scripted(script) as url:
        HotLoadClient(url).tell("base", reset_prompt_cache=reset)
    assert script.asked[0][3]["reset_prompt_cache"] == reset


def test_a_dialect_of_ones_own() -> None:
    script = Scripted()
    with scripted(script) as url:
        client = HotLoadClient(url, model="m", dialect=Dialect("mine", "X-Model", "X-Deployment"))
        client.tell("b", previous="a", checksum_format="adler32")
    assert script.asked[0][2]["X-Model"] == "m"
    metadata = script.asked[0][3]["incremental_snapshot_metadata"]
    assert metadata["checksum_format"] == "adler32"


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_a_server_that_cannot_is_asked_again(status: int) -> None:
    script = Scripted(replies=[(status, {}, b"busy")] * 2)
    with scripted(script) as url:
        HotLoadClient(url).tell("base", timeout_s=30)
    assert len(script.asked) == 3
    assert len({json.dumps(asked[3]) for asked in script.asked}) == 1


def test_a_server_that_never_can_ends_with_its_status() -> None:
    script = Scripted(replies=[(503, {}, b"no \x00 room")] * 100)
    with (
        scripted(script) as url,
        pytest.raises(EndpointError, match="expected 2xx, found 503: 'no ") as caught,
    ):
        HotLoadClient(url).tell("base", timeout_s=0.5)
    assert caught.value.status == 503
    assert len(script.asked) > 1


def test_retry_after_is_kept_to_and_never_beyond_the_deadline() -> None:
    script = Scripted(replies=[(429, {"Retry-After": "3600"}, b"")])
    with scripted(script) as url, pytest.raises(EndpointError):
        HotLoadClient(url).tell("base", timeout_s=5)
    assert len(script.asked) == 1
    script = Scripted(replies=[(429, {"Retry-After": value}, b"") for value in ("x", "nan", "-1")])
    with scripted(script) as url:
        HotLoadClient(url).tell("base", timeout_s=30)
    assert len(script.asked) == 4


@pytest.mark.parametrize("status", [301, 307, 400, 401, 403, 404, 409, 413, 422])
def test_a_refusal_and_a_redirect_are_not_repeated(status: int) -> None:
    script = Scripted(replies=[(status, {"Location": "http://127.0.0.1:1/"}, b"why")])
    with scripted(script) as url, pytest.raises(EndpointError, match="'why'") as caught:
        HotLoadClient(url, token=SECRET).tell("base")
    assert caught.value.status == status
    assert len(script.asked) == 1


def test_cut_connections_are_repeated() -> None:
    script = Scripted(cut=2)
    with scripted(script) as url:
        HotLoadClient(url).tell("base", timeout_s=30)
    assert len(script.asked) == 3


def test_connections_that_are_always_cut_end_with_peer_lost() -> None:
    script = Scripted(cut=1000)
    with scripted(script) as url, pytest.raises(PeerLostError, match=PATH):
        HotLoadClient(url).tell("base", timeout_s=0.4)
    assert len(script.asked) > 1


def test_an_answer_that_is_cut_short_is_asked_for_again() -> None:
    cut = {"Content-Length": "1000", "Connection": "close"}
    script = Scripted(replies=[(200, cut, b'{"replicas": []}')])
    with scripted(script) as url:
        assert len(HotLoadClient(url).status(timeout_s=30)) == 2
    assert len(script.asked) == 2


def test_nobody_there() -> None:
    with scripted(Scripted()) as url:
        pass
    with pytest.raises(PeerLostError, match="refused"):
        HotLoadClient(url).tell("base", timeout_s=0.3)


def test_a_server_that_says_nothing() -> None:
    with (
        scripted(Scripted(silent_s=1.0)) as url,
        pytest.raises(TransportTimeoutError, match="no answer"),
    ):
        HotLoadClient(url).tell("base", timeout_s=0.2)


def test_an_answer_that_drips_in() -> None:
    with (
        scripted(Scripted(drip_s=0.05, replicas=50)) as url,
        pytest.raises(TransportTimeoutError, match=r"did not end in time|no answer"),
    ):
        HotLoadClient(url).status(timeout_s=0.3)


def test_an_attempt_that_takes_too_long_is_repeated() -> None:
    script = Scripted(silent_s=0.5)
    with scripted(script) as url, pytest.raises(TransportTimeoutError):
        HotLoadClient(url, attempt_timeout_s=0.1).tell("base", timeout_s=0.6)
    assert len(script.asked) > 1


def test_an_endless_answer_is_cut_off() -> None:
    huge = b" " * (9 << 20)
    with (
        scripted(Scripted(replies=[(200, {}, huge)])) as url,
        pytest.raises(TransportError, match="longer than"),
    ):
        HotLoadClient(url).status()


@pytest.mark.parametrize(
    ("body", "match"),
    [
        (b"<html>", "not JSON"),
        (b"\xff", "not UTF-8"),
        (b"[]", "must be an object"),
        (b"{}", "replicas is missing"),
        (b'{"replicas": {}}', "replicas must be a list"),
        (b'{"replicas": [7]}', r"replicas\[0\] must be an object"),
        (b'{"replicas": [{"readiness": "yes"}]}', r"replicas\[0\].readiness"),
        (b'{"replicas": [{"current_snapshot_identity": 7}]}', "current_snapshot_identity"),
        (b'{"replicas": [{"loading_state": "done"}]}', "loading_state must be an object"),
        (b'{"replicas": [], "replicas": []}', "twice"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_answers_that_are_none(body: bytes, match: str) -> None:
    script = Scripted(replies=[(200, {}, body)])
    with scripted(script) as url, pytest.raises(FormatError, match=match):
        HotLoadClient(url).status()


def test_what_the_order_is_answered_does_not_matter() -> None:
    with scripted(Scripted(replies=[(202, {}, b"<ok>")])) as url:
        HotLoadClient(url).tell("base")


def test_waiting_counts_ready_replicas_at_the_identity() -> None:
    script = Scripted(
        replies=[
            answer(),
            answer(replica("v1"), replica("v2", ready=False), replica("v2")),
            answer(replica("v2"), replica("v1"), replica("v2")),
            answer(*[replica("v2")] * 3),
        ]
    )
    with scripted(script) as url:
        client = HotLoadClient(url)
        loaded = client.wait("v2", ready_fraction=0.66, poll_s=0.01)
        assert (loaded.ready, loaded.replicas) == (2, 3)
        assert len(script.asked) == 3
        assert client.wait("v2", poll_s=0.01).ready == 3


def test_fewer_replicas_than_expected_are_not_enough() -> None:
    script = Scripted(replies=[answer(replica()), answer(replica(), replica())])
    with scripted(script) as url:
        assert HotLoadClient(url).wait("v2", min_replicas=2, poll_s=0.01).replicas == 2


def test_waiting_ends_with_the_reasons() -> None:
    waits = answer(replica("v1", ready=False, readiness_reason="loading, 40 %", replica="r7"))
    with (
        scripted(Scripted(replies=[waits] * 1000)) as url,
        pytest.raises(TransportTimeoutError, match=r"r7 serves v1 \(loading, 40 %\)"),
    ):
        HotLoadClient(url).wait("v2", poll_s=0.05, timeout_s=2)


def test_an_answer_that_does_not_come_in_time_does_not_hide_the_reasons(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits = answer(replica("v1", ready=False, readiness_reason="loading, 40 %", replica="r7"))
    script = Scripted(replies=[waits])
    with scripted(script) as url:
        client = HotLoadClient(url)
        first = client._status

        def no_second(deadline_s: float) -> tuple[ReplicaStatus, ...]:
            if script.asked:
                raise TransportTimeoutError("no answer in time")
            return first(deadline_s)

        monkeypatch.setattr(client, "_status", no_second)
        with pytest.raises(TransportTimeoutError, match=r"r7 serves v1 \(loading, 40 %\)"):
            client.wait("v2", poll_s=0.01, timeout_s=30)


def test_waiting_ends_at_once_when_it_is_hopeless() -> None:
    failed = replica("v1", ready=False, readiness_reason="disk", loading_state={"stage": "error"})
    script = Scripted(replies=[answer(failed, replica())] * 2)
    with scripted(script) as url:
        client = HotLoadClient(url)
        assert client.wait("v2", ready_fraction=0.5).ready == 1
        with pytest.raises(CommitError, match="1 of 2 replicas could not load v2.*disk"):
            client.wait("v2", ready_fraction=0.6)


def test_waiting_survives_a_server_that_restarts() -> None:
    script = Scripted(identity="v2", cut=2)
    with scripted(script) as url:
        assert HotLoadClient(url).wait("v2", timeout_s=30).ready == 2


def test_the_token_is_in_no_log_repr_or_error(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("MY_TOKEN", SECRET)
    script = Scripted(replies=[(401, {}, b"no"), (500, {}, b"")], cut=1)
    shown = ""
    with scripted(script) as url:
        client = HotLoadClient(url, token_env="MY_TOKEN")
        for _ in range(3):
            try:
                client.tell("base", timeout_s=0.05)
            except SynclineError as error:
                shown += "".join(traceback.format_exception(error))
        shown += repr(client) + str(client) + repr(vars(client)) + repr(vars(client._endpoint))
    assert script.asked[0][2]["Authorization"] == f"Bearer {SECRET}"
    assert "401" in shown
    assert SECRET not in shown
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    "arguments",
    [
        {"url": "ftp://host"},
        {"url": "host:80"},
        {"url": "http://"},
        {"url": "http://user:s3cret@host"},
        {"url": "http://host/?key=s3cret"},
        {"url": "http://host:99999"},
        {"url": "http://ho st"},
        {"url": "http://h", "token": ""},
        {"url": "http://h", "token": "s3cret\r\nX: y"},
        {"url": "http://h", "token": "a", "token_env": "B"},
        {"url": "http://h", "token_env": "NOT_SET_ANYWHERE"},
        {"url": "http://h", "model": "a\nb"},
        {"url": "http://h", "headers": {"X": "ü"}},
        {"url": "http://h", "attempt_timeout_s": 0},
    ],
)
def test_arguments_that_cannot_be_used(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        HotLoadClient(**arguments)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("identity", ["", ".", "..", "../x", "a/b", "a\\b", "a\nb", "x" * 256, 7])
def test_identities_that_leave_their_directory(identity: Any) -> None:
    script = Scripted()
    with scripted(script) as url:
        client = HotLoadClient(url)
        for call in (
            lambda: client.tell(identity),
            lambda: client.tell("ok", previous=identity),
            lambda: client.wait(identity),
        ):
            with pytest.raises(ConfigError, match="path segment"):
                call()
    assert script.asked == []


def test_other_arguments_of_calls() -> None:
    client = HotLoadClient("http://127.0.0.1:1")
    for call in (
        lambda: client.tell("a", reset_prompt_cache="always"),  # type: ignore[arg-type]
        lambda: client.tell("a", timeout_s=0),
        lambda: client.wait("a", ready_fraction=0),
        lambda: client.wait("a", ready_fraction=1.1),
        lambda: client.session_headers("a b"),
    ):
        with pytest.raises(ConfigError):
            call()
    with pytest.raises(PeerLostError):
        client.status(timeout_s=0.2)
