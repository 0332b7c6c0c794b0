"""The routes of a vLLM server that a commit uses, asked of a server that only listens."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest import mock

import pytest

from syncline.errors import EndpointError, FormatError, PeerLostError, TransportTimeoutError
from syncline.hotload import Token
from syncline.vllm.control import HttpControl, OfflineControl

ANSWERS = {
    "/collective_rpc": {"results": [{"error": None, "rank": 0}]},
    "/reset_prefix_cache": {"success": True},
    "/weight_info": {"weight_version": "7"},
    "/pause": {"status": "paused"},
    "/resume": {"status": "resumed"},
    "/is_paused": {"is_paused": False},
    "/server_info": {
        "vllm_config": {
            "parallel_config": {"data_parallel_size": 1, "data_parallel_external_lb": False}
        }
    },
    "/update_weight_version": {"success": True, "new_version": "8"},
}


@pytest.fixture
def listening():
    """A server that notes what is asked; `answers` says what it answers, a number is a status."""
    asked, answers = [], dict(ANSWERS)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            length = int(self.headers.get("Content-Length", 0))
            body = json.loads(self.rfile.read(length)) if length else None
            asked.append((self.command, self.path, body, self.headers.get("Authorization")))
            answer = answers.get(self.path.split("?")[0], {})
            if callable(answer):
                answer = answer()
            status = answer if isinstance(answer, int) else 200
            raw = b"" if answer == {} else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        do_GET = do_POST  # noqa: N815 - the name that http.server looks for

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    server.asked, server.answers = asked, answers
    server.handle_error = lambda *_: None  # a client that gave up is no fault
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_every_step_asks_its_routes(listening):
    control = HttpControl(listening.url, Token("s3cret"))
    assert control.call("syncline_stage", "7", "", timeout_s=5) == [{"error": None, "rank": 0}]
    control.pause("keep", 5)
    control.reset_caches(5)
    assert control.label(5) == "7"
    control.set_label("8", 5)
    control.resume(5)
    assert [entry[:3] for entry in listening.asked] == [
        ("POST", "/collective_rpc", {"method": "syncline_stage", "args": ["7", ""]}),
        ("POST", "/pause?mode=keep&clear_cache=true", None),
        ("POST", "/reset_prefix_cache?reset_running_requests=true&reset_external=true", None),
        ("POST", "/reset_mm_cache", None),
        ("POST", "/reset_encoder_cache", None),
        ("GET", "/weight_info", None),
        ("POST", "/update_weight_version", {"new_version": "8"}),
        ("POST", "/resume", None),
    ]
    assert {entry[3] for entry in listening.asked} == {"Bearer s3cret"}


def test_a_failure_is_asked_once_and_said(listening):
    listening.answers["/pause"] = 500
    with pytest.raises(EndpointError, match="/pause.*expected 2xx, found 500"):
        HttpControl(listening.url).pause("keep", 5)
    assert len(listening.asked) == 1


def test_caches_that_are_still_held_are_an_error(listening):
    listening.answers["/reset_prefix_cache"] = {"success": False}
    with pytest.raises(EndpointError, match="still held"):
        HttpControl(listening.url).reset_caches(5)


@pytest.mark.parametrize(
    "route", ["/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"]
)
def test_a_cache_that_cannot_be_reset_is_an_error(listening, route):
    listening.answers[route] = 500
    with pytest.raises(EndpointError, match=f"{route}.*expected 2xx, found 500"):
        HttpControl(listening.url).reset_caches(5)


def test_a_vllm_in_this_process_forgets_in_all_places():
    llm = mock.Mock()
    llm.reset_prefix_cache.return_value = True
    OfflineControl(llm).reset_caches(5)
    assert llm.mock_calls == [
        mock.call.reset_prefix_cache(reset_connector=True),
        mock.call.llm_engine.reset_mm_cache(),
        mock.call.llm_engine.reset_encoder_cache(),
    ]
    llm.reset_prefix_cache.return_value = False
    with pytest.raises(EndpointError, match="could not be reset"):
        OfflineControl(llm).reset_caches(5)


@pytest.mark.parametrize("answer", [{}, {"results": None}, {"results": ["x"]}])
def test_workers_without_the_methods_are_an_error(listening, answer):
    listening.answers["/collective_rpc"] = answer
    with pytest.raises(FormatError, match="--weight-transfer-config"):
        HttpControl(listening.url).call("syncline_status", timeout_s=5)


def test_no_answer_in_time_is_an_error(listening):
    held = threading.Event()
    listening.answers["/resume"] = lambda: held.wait(20) and 200
    started_s = time.monotonic()
    with pytest.raises(TransportTimeoutError, match="/resume: no answer in 0.2 s"):
        HttpControl(listening.url).resume(0.2)
    assert time.monotonic() - started_s < 15
    held.set()


def test_nobody_there_is_an_error():
    with pytest.raises(PeerLostError):
        HttpControl("http://127.0.0.1:1").label(5)


@pytest.mark.parametrize("answer", [{}, {"status": "ok"}, {"success": False}, {"error": "no"}])
@pytest.mark.parametrize(
    ("route", "ask"),
    [
        ("/pause", lambda control: control.pause("keep", 5)),
        ("/resume", lambda control: control.resume(5)),
        ("/reset_prefix_cache", lambda control: control.reset_caches(5)),
        ("/update_weight_version", lambda control: control.set_label("8", 5)),
    ],
)
def test_success_that_does_not_say_that_it_was_done_is_an_error(listening, route, ask, answer):
    listening.answers[route] = answer
    with pytest.raises(EndpointError, match=f"{route}: expected"):
        ask(HttpControl(listening.url))


@pytest.mark.parametrize("answer", [{}, {"is_paused": None}, {"is_paused": "false"}])
def test_whether_it_is_paused_is_told_or_an_error(listening, answer):
    assert HttpControl(listening.url).paused(5) is False
    listening.answers["/is_paused"] = answer
    with pytest.raises(FormatError, match="/is_paused: expected true or false"):
        HttpControl(listening.url).paused(5)


@pytest.mark.parametrize(
    ("size", "is_alone", "count"), [(1, False, 1), (3, False, 3), (3, True, 1)]
)
def test_engines_behind_one_address_are_counted(listening, size, is_alone, count):
    """Where something else spreads requests, each engine has a server of its own."""
    parallel = {"data_parallel_size": size, "data_parallel_external_lb": is_alone}
    listening.answers["/server_info"] = {"vllm_config": {"parallel_config": parallel}}
    assert HttpControl(listening.url).engines(5) == count
    assert listening.asked[0][:2] == ("GET", "/server_info?config_format=json")
    llm = mock.Mock()
    llm.llm_engine.vllm_config.parallel_config.data_parallel_size = size
    assert OfflineControl(llm).engines(5) == size


@pytest.mark.parametrize(
    "parallel", [None, [], {}, {"data_parallel_size": True, "data_parallel_external_lb": False}]
)
def test_a_number_of_engines_that_is_not_told_is_an_error(listening, parallel):
    listening.answers["/server_info"] = {"vllm_config": {"parallel_config": parallel}}
    with pytest.raises(FormatError, match="/server_info: expected vllm_config.parallel_config"):
        HttpControl(listening.url).engines(5)
    listening.answers["/server_info"] = 404
    with pytest.raises(EndpointError, match="/server_info.*found 404"):
        HttpControl(listening.url).engines(5)
