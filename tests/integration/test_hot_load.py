"""The real client against the real server on uvicorn, and what anybody else may send to it."""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
import urllib3
from fastapi import FastAPI

from hot_load_servers import Run, Scripted, engine_of, eventually, running, scripted, served
from syncline import MemoryEngine
from syncline.errors import ConfigError, EndpointError, PeerLostError
from syncline.hotload import FIREWORKS
from syncline.hotload.client import PATH
from syncline.serving import HotLoadClient, Replica, WeightVersionGate, hot_load_app, serve
from syncline.serving.app import CHECK_PATH
from syncline.serving.body import LIMIT_BYTES

TOKEN = "the-token"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def run() -> Run:
    made = Run()
    made.publish()
    made.publish()
    return made


@pytest.fixture
def server(run: Run) -> Iterator[str]:
    with served(run, token=TOKEN) as (url, _):
        yield url


def post(url: str, body: object, **headers: str) -> tuple[int, Any]:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = urllib3.request(
        "POST",
        url + PATH,
        body=raw,
        headers={"Content-Type": "application/json", **BEARER, **headers},
        retries=False,
    )
    return answer.status, answer.json()


def test_from_publish_to_ready(run: Run) -> None:
    with served(run, token=TOKEN) as (url, replica):
        client = HotLoadClient(url, token=TOKEN)
        run.publish()
        client.tell("weight_v000003", previous="weight_v000002")
        loaded = client.wait("weight_v000003", poll_s=0.01)
        assert (loaded.ready, loaded.replicas) == (1, 1)
        assert run.is_in(engine_of(replica), 3)
        client.tell("3")
        assert client.wait("3", poll_s=0.01).identity == "3"
        run.publish(full=True)
        client.tell("4")
        client.wait("4", poll_s=0.01)
        assert run.is_in(engine_of(replica), 4)


def test_several_replicas_take_it_or_none_does(run: Run) -> None:
    engines = [MemoryEngine(), MemoryEngine()]
    resets: list[object] = []
    replicas = [
        Replica(run.store, engines[0], name="a", reset_cache=resets.append),
        Replica(run.store, engines[1], name="b"),
    ]
    with replicas[0], replicas[1], running(hot_load_app(replicas)) as url:
        client = HotLoadClient(url)
        assert client.wait("weight_v000002", poll_s=0.01).replicas == 2
        run.publish()
        with pytest.raises(EndpointError, match="replica b has no prompt cache"):
            client.tell("3", reset_prompt_cache="new_session")
        assert [r.identity for r in client.status()] == ["weight_v000002"] * 2
        client.tell("3")
        assert client.wait("3", poll_s=0.01).ready == 2
        assert [r.name for r in client.status()] == ["a", "b"]
    assert all(run.is_in(engine, 3) for engine in engines)
    with pytest.raises(ConfigError, match="each of its own name"):
        hot_load_app([replicas[0], replicas[0]])
    with pytest.raises(ConfigError, match="at least one"):
        hot_load_app([])


@pytest.mark.parametrize("token", [None, "wrong", TOKEN + "x"])
def test_a_wrong_token(run: Run, server: str, token: str | None) -> None:
    with pytest.raises(EndpointError) as caught:
        HotLoadClient(server, token=token).tell("1")
    assert caught.value.status == 401
    for path in (PATH, CHECK_PATH, "/nothing"):
        answer = urllib3.request("GET", server + path, retries=False)
        assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert TOKEN not in answer.data.decode()
    assert HotLoadClient(server, token=TOKEN).status()[0].identity == "weight_v000002"


def test_without_a_token_a_body_is_not_even_read(server: str) -> None:
    host = urlsplit(server)
    connection = http.client.HTTPConnection(str(host.hostname), host.port, timeout=10)
    connection.putrequest("POST", PATH)
    connection.putheader("Content-Length", str(1 << 40))
    connection.endheaders()
    assert connection.getresponse().status == 401
    connection.close()


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (b"", ""),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[" * 50_000, "nested too deeply"),
        (b'{"identity": NaN}', "finite"),
        (b'{"identity": "1", "identity": "2"}', "twice"),
        ([], ""),
        ({}, "identity"),
        ({"identity": 2}, "identity"),
        ({"identity": None}, "identity"),
        ({"identity": ""}, "identity"),
        ({"identity": "2", "run": "x"}, "run"),
        ({"identity": "2", "reset_prompt_cache": "yes"}, "reset_prompt_cache"),
        ({"identity": "2", "reset_prompt_cache": 1}, "reset_prompt_cache"),
        ({"identity": "2", "reset_prompt_cache": True}, "reset_prompt_cache"),
        ({"identity": "2", "incremental_snapshot_metadata": {}}, "previous_snapshot_identity"),
        ({"identity": "2", "incremental_snapshot_metadata": []}, "incremental_snapshot_metadata"),
        (
            {
                "identity": "2",
                "incremental_snapshot_metadata": {
                    "previous_snapshot_identity": "1",
                    "checksum_format": "md5",
                },
            },
            "checksum_format",
        ),
        (
            {
                "identity": "2",
                "incremental_snapshot_metadata": {
                    "previous_snapshot_identity": "1",
                    "compression_format": "arc_v2",
                },
            },
            "compression_format",
        ),
        (
            {
                "identity": "2",
                "incremental_snapshot_metadata": {"previous_snapshot_identity": "../1"},
            },
            "previous_snapshot_identity",
        ),
    ],
)
def test_bodies_that_are_not_legal_are_400(server: str, body: object, where: str) -> None:
    status, answer = post(server, body)
    assert (status, answer["error"]["type"]) == (400, "BadRequest")
    assert where in answer["error"]["message"]
    assert HotLoadClient(server, token=TOKEN).status()[0].readiness


@pytest.mark.parametrize(
    "identity",
    [
        "../../etc/passwd",
        "..",
        ".",
        "/etc/passwd",
        "weight_v000002/../../x",
        "weight_v000002\x00",
        "..%2f..%2fetc",
        "file:///etc/passwd",
        "HEAD.json",
        "weight_v2",
        "0",
        "-1",
        "2 ",
        "２",
        "9" * 200,
        "x" * 255,
    ],
)
def test_hostile_identities_never_reach_the_store(
    run: Run, server: str, identity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    get = run.store.get
    monkeypatch.setattr(run.store, "get", lambda key, *a: asked.append(key) or get(key, *a))
    status, answer = post(server, {"identity": identity})
    assert (status, answer["error"]["type"]) == (400, "BadRequest")
    assert asked == []


def test_a_huge_body_is_refused_while_it_comes(server: str) -> None:
    status, answer = post(server, b'{"identity": "' + b"x" * LIMIT_BYTES + b'"}')
    assert (status, answer["error"]["type"]) == (413, "RequestTooLarge")
    host = urlsplit(server)
    connection = http.client.HTTPConnection(str(host.hostname), host.port, timeout=10)
    pieces = 0

    def endless() -> Iterator[bytes]:
        nonlocal pieces
        while pieces < 1000:
            pieces += 1
            yield b"x" * 65536

    headers = {"Content-Type": "application/json", **BEARER}
    try:
        connection.request("POST", PATH, body=endless(), headers=headers, encode_chunked=True)
        assert connection.getresponse().status == 413
    except (BrokenPipeError, ConnectionResetError):
        assert pieces < 1000  # it hung up in the middle of the body
    connection.close()


def test_a_body_that_never_ends_and_a_connection_that_is_cut(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("syncline.serving.body.TIME_LIMIT_S", 0.1)
    host = urlsplit(server)
    start = (
        f"POST {PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
        'Content-Type: application/json\r\nContent-Length: 20\r\n\r\n{"id'
    ).encode()
    with socket.create_connection((host.hostname, host.port), timeout=10) as slow:
        slow.sendall(start)
        assert slow.recv(100).startswith(b"HTTP/1.1 408 ")
    for end in range(0, len(start), 17):
        with socket.create_connection((host.hostname, host.port), timeout=10) as cut:
            cut.sendall(start[:end])
    assert HotLoadClient(server, token=TOKEN).status()[0].readiness


def test_a_form_of_a_web_page_is_no_order(server: str) -> None:
    status, _ = post(server, {"identity": "1"}, **{"Content-Type": "text/plain"})
    assert status == 400
    assert HotLoadClient(server, token=TOKEN).status()[0].identity == "weight_v000002"


def test_versions_that_are_not_there_or_not_made_on_that(server: str) -> None:
    status, answer = post(server, {"identity": "3"})
    assert (status, answer["error"]["type"]) == (404, "SnapshotNotFound")
    metadata = {"previous_snapshot_identity": "weight_v000009"}
    status, answer = post(server, {"identity": "2", "incremental_snapshot_metadata": metadata})
    assert (status, answer["error"]["type"]) == (409, "SnapshotLineage")
    assert "it is a delta on version 1" in answer["error"]["message"]


def test_a_delta_on_what_is_not_held_is_taken_if_a_path_leads_there(run: Run) -> None:
    with served(run, token=TOKEN) as (url, replica):
        for _ in range(3):
            run.publish()
        metadata = {"previous_snapshot_identity": "4", "checksum_format": "alder32"}
        status, answer = post(url, {"identity": "5", "incremental_snapshot_metadata": metadata})
        assert (status, answer) == (
            202,
            {"accepted": True, "identity": "5", "already_current": False},
        )
        HotLoadClient(url, token=TOKEN).wait("5", poll_s=0.01)
        assert run.is_in(engine_of(replica), 5)
        assert post(url, {"identity": "5"})[1]["already_current"]


def test_a_store_that_cannot_be_read_is_503(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from syncline.errors import StoreError

    def fail(*_: object) -> bytes:
        raise StoreError("the share is gone")

    with served(run) as (url, _):
        monkeypatch.setattr(run.store, "get", fail)
        with pytest.raises(EndpointError, match="the share is gone") as caught:
            HotLoadClient(url).tell("1", timeout_s=0.3)
        assert caught.value.status == 503


def test_two_clients_at_once(run: Run) -> None:
    with served(run, token=TOKEN) as (url, replica):
        for _ in range(4):
            run.publish()
        clients = [HotLoadClient(url, token=TOKEN) for _ in range(6)]
        threads = [
            threading.Thread(target=client.tell, args=(str(version),))
            for version, client in enumerate(clients, start=1)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        eventually(lambda: replica.status().stage == "done", "the last order was followed")
        assert run.is_in(engine_of(replica), replica.admission.served)


def test_would_a_request_be_served(server: str) -> None:
    def check(query: str) -> tuple[int, Any]:
        answer = urllib3.request("GET", f"{server}{CHECK_PATH}?{query}", headers=BEARER)
        return answer.status, answer.json()

    assert check("exact_version=2") == (200, {"current_versions": [2]})
    assert check("")[0] == 200
    assert check("min_version=weight_v000001")[0] == 200
    assert check("exact_version=3")[1]["error"]["type"] == "WeightVersionNotReady"
    assert check("min_required_version=3")[0] == 409
    assert check("exact_version=1")[1]["error"] == {
        "type": "WeightVersionTooOld",
        "message": "version 1 was asked for, version 2 is served",
        "target_version": 1,
        "current_version": 2,
    }
    assert check("exact_version=newest")[0] == 400
    assert check("exact_version=" + "1" * 300)[0] == 400
    for query in ("exact_verison=2", "exact_version=2&exact_version=3", "exact_version=2&x=1"):
        assert check(query)[0] == 400  # nothing that was asked is left out


def test_a_host_with_the_api_and_the_gate(run: Run) -> None:
    replica = Replica(run.store, MemoryEngine())
    host = FastAPI()

    @host.post("/generate")
    def generate(body: dict[str, Any]) -> dict[str, Any]:
        return {"version": replica.admission.served, "text": body["text"]}

    host.add_middleware(WeightVersionGate, admission=replica.admission, paths=["/generate"])
    host.mount("/", hot_load_app(replica, token=TOKEN))
    with replica, running(host) as url:
        client = HotLoadClient(url, token=TOKEN)
        client.wait("weight_v000002", poll_s=0.01)

        def ask(**wanted: int) -> tuple[int, Any]:
            answer = urllib3.request(
                "POST", f"{url}/generate", json={"text": "hi", "weight_version": wanted}
            )
            return answer.status, answer.json()

        assert ask(exact_version=2) == (200, {"version": 2, "text": "hi"})
        assert ask(min_required_version=3)[0] == 409
        run.publish()
        client.tell("3")
        client.wait("3", poll_s=0.01)
        assert ask(min_version=3) == (200, {"version": 3, "text": "hi"})
        assert ask(exact_version=2)[1]["error"]["type"] == "WeightVersionTooOld"


def test_the_description_is_open_and_lists_what_there_is(server: str) -> None:
    answer = urllib3.request("GET", f"{server}/openapi.json")
    paths = answer.json()["paths"]
    assert {path: sorted(methods) for path, methods in paths.items()} == {
        PATH: ["get", "post"],
        CHECK_PATH: ["get"],
        "/metrics": ["get"],
    }
    fields = answer.json()["components"]["schemas"]["HotLoad"]["properties"]
    assert set(fields) == {"identity", "incremental_snapshot_metadata", "reset_prompt_cache"}
    page = urllib3.request("GET", f"{server}/docs")
    assert (page.status, "openapi.json" in page.data.decode()) == (200, True)


def test_a_server_that_others_reach_needs_a_token(run: Run) -> None:
    engine = MemoryEngine()
    with pytest.raises(ConfigError, match=r"host 0\.0\.0\.0: expected a token"):
        serve(Replica(run.store, engine), host="0.0.0.0")
    assert engine.held() is None


def test_a_publisher_tells_deployments_and_reports_who_did_not_listen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DEPLOYMENT_TOKEN", TOKEN)
    first = Run()
    first.publish()
    with (
        served(first, token=TOKEN) as (url, replica),
        served(first, token="another") as (closed, _),
        scripted(Scripted()) as dead,
    ):
        pass
    with (
        served(first, token=TOKEN) as (url, replica),
        served(first, token="another") as (closed, _),
    ):
        run = Run(
            first.store,
            notify=f"{url}, {closed},{dead}",
            notify_token_env="DEPLOYMENT_TOKEN",
            notify_timeout_s=1.0,
        )
        run.weights["w"][0] += 5
        report = run.publisher.publish(run.weights)
        assert report.version == run.publisher.version == 2
        assert [notice.url for notice in report.notices] == [
            address + PATH for address in (url, closed, dead)
        ]
        errors = [notice.error for notice in report.notices]
        assert errors[0] is None
        assert "401" in str(errors[1])
        assert str(errors[2]).startswith("PeerLostError")
        assert {notice.identity for notice in report.notices} == {"weight_v000002"}
        assert TOKEN not in repr(report)
        assert json.loads(json.dumps(report.as_dict()))["notices"][0]["error"] is None
        HotLoadClient(url, token=TOKEN).wait("weight_v000002", poll_s=0.01)
        assert engine_of(replica).view("w").tobytes() == run.weights["w"].tobytes()


def test_a_publisher_tells_of_deltas_of_full_versions_and_of_anchors() -> None:
    script = Scripted()
    with scripted(script) as url:
        client = HotLoadClient(url, token=TOKEN, dialect=FIREWORKS, deployment="d")
        run = Run(notify=client, encoding="xor", anchor_every=2)
        for _ in range(3):
            run.publish()
    told = [asked[3] for asked in script.asked]
    assert told == [
        {"identity": "weight_v000001"},
        {
            "identity": "weight_v000002",
            "incremental_snapshot_metadata": {
                "previous_snapshot_identity": "weight_v000001",
                "compression_format": "zstd",
                "checksum_format": "xxh3-128",
            },
        },
        {"identity": "weight_v000004"},
    ]
    assert script.asked[0][2]["fireworks-deployment"] == "d"


def test_a_publisher_in_the_slime_layout_names_its_checksum_as_fireworks_does() -> None:
    script = Scripted()
    with scripted(script) as url:
        client = HotLoadClient(url, dialect=FIREWORKS)
        run = Run(notify=client, layout="slime", checksum="adler32")
        run.publish()
        run.publish()
        with served(run) as (ours, replica):
            HotLoadClient(ours).tell("2", previous="1", checksum_format="adler32")
            assert run.is_in(engine_of(replica), 2)
    metadata = script.asked[1][3]["incremental_snapshot_metadata"]
    assert (metadata["compression_format"], metadata["checksum_format"]) == ("zstd", "alder32")


@pytest.mark.parametrize(
    "options",
    [
        {"notify": "http://a,http://a"},
        {"notify": ""},
        {"notify": "http://a,"},
        {"notify": ["ftp://a"]},
        {"notify": "http://a", "notify_token_env": "NOT_SET_ANYWHERE"},
        {"notify": "http://a", "notify_timeout_s": 0},
    ],
)
def test_notify_options_that_cannot_be_used_touch_no_store(options: dict[str, Any]) -> None:
    run = Run()
    head = run.store.get("HEAD.json")
    with pytest.raises(ConfigError):
        Run(run.store, **options)
    assert run.store.get("HEAD.json") == head


def test_a_server_that_ended_leaves_no_thread(run: Run) -> None:
    before = set(threading.enumerate())
    with served(run) as (url, replica):
        run.publish()
        HotLoadClient(url).tell("3")
        eventually(lambda: replica.admission.served == 3, "the order was followed")
        assert set(threading.enumerate()) > before

    def left() -> set[threading.Thread]:
        # The library's compute pool, one for the whole process, stays.
        pool = f"syncline-{os.getpid()}_"
        return {t for t in threading.enumerate() if not t.name.startswith(pool)} - before

    eventually(lambda: not left(), "its threads have ended")


def test_a_server_that_stops_is_peer_lost(run: Run) -> None:
    with served(run) as (url, _):
        client = HotLoadClient(url)
        client.status()
    with pytest.raises(PeerLostError):
        client.status(timeout_s=0.3)
