"""The ASGI gate: 409 for weights that are not served, and not a byte changed for everybody else."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import FormatError
from syncline.hotload import WeightVersion
from syncline.serving import WeightVersionGate
from syncline.serving.admission import Admission
from syncline.serving.gate import wanted_version

PINNED = {"text": "hi", "weight_version": {"exact_version": 7}}


class Host:
    """An engine host's application: it echoes the body, and says what it saw."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.has_begun = asyncio.Event()
        self.go = asyncio.Event()
        self.go.set()
        self.failure: Exception | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        self.bodies.append(body)
        self.has_begun.set()
        await self.go.wait()
        if self.failure is not None:
            raise self.failure
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})


async def ask(
    gate: Any, *pieces: bytes, path: str = "/generate", **scope: Any
) -> tuple[int, bytes]:
    """Send one request in pieces and return status and body of the answer."""
    messages = [{"type": "http.request", "body": p, "more_body": True} for p in pieces]
    messages.append({"type": "http.request", "body": b"", "more_body": False})
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    whole = {"type": "http", "method": "POST", "path": path, "headers": [], **scope}
    await gate(whole, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


def served(version: int | None) -> Admission:
    admission = Admission()
    admission.settle(version)
    return admission


@pytest.mark.parametrize(
    ("version", "status", "kind"),
    [
        (7, 200, None),
        (6, 409, "WeightVersionNotReady"),
        (8, 409, "WeightVersionTooOld"),
        (None, 409, "WeightVersionNotReady"),
    ],
)
def test_a_pinned_request(version: int | None, status: int, kind: str | None) -> None:
    async def go() -> None:
        host, body = Host(), json.dumps(PINNED).encode()
        gate = WeightVersionGate(host, admission=served(version))
        found, answer = await ask(gate, body[:9], body[9:])
        assert found == status
        if kind is None:
            assert (answer, host.bodies) == (body, [body])
        else:
            assert json.loads(answer)["error"]["type"] == kind
            assert json.loads(answer)["error"]["current_version"] == version
            assert host.bodies == []

    asyncio.run(go())


@pytest.mark.parametrize(
    ("body", "scope"),
    [
        (b'{"text": "hi"}', {}),
        (b"", {}),
        (b"not json", {}),
        (b'"weight_version"', {}),
        (b'{"weight_version": null}', {}),
        (json.dumps(PINNED).encode(), {"method": "GET"}),
        (json.dumps(PINNED).encode(), {"path": "/elsewhere"}),
        (b"--x weight_version", {"headers": [(b"content-type", b"Multipart/form-data; x")]}),
    ],
)
def test_other_requests_pass_untouched(body: bytes, scope: dict[str, Any]) -> None:
    async def go() -> None:
        host = Host()
        gate = WeightVersionGate(host, admission=served(None), paths=["/generate"])
        assert await ask(gate, body, **scope) == (200, body)
        assert host.bodies == [body]

    asyncio.run(go())


@pytest.mark.parametrize(
    "body",
    [
        b'{"weight_version": 7}',
        b'{"weight_version": {"exact": 7}}',
        b'{"weight_version": {"exact_version": 7}, "weight_version": {}}',
        b'{"weight_version": {"exact_version": 7}',
        b'{"weight_\\u0076ersion": []}',
    ],
)
def test_fields_that_are_not_legal_are_400(body: bytes) -> None:
    async def go() -> None:
        host = Host()
        status, answer = await ask(WeightVersionGate(host, admission=served(7)), body)
        assert (status, json.loads(answer)["error"]["type"]) == (400, "InvalidWeightVersion")
        assert host.bodies == []

    asyncio.run(go())


def test_a_body_that_is_too_long_is_not_kept() -> None:
    async def go() -> None:
        host = Host()
        gate = WeightVersionGate(host, admission=served(7), limit_bytes=100)
        assert (await ask(gate, b"x" * 60, b"x" * 41))[0] == 413
        assert (await ask(gate, b"x" * 60, b"x" * 40))[0] == 200

    asyncio.run(go())


def test_a_request_is_inside_until_its_answer_has_ended_whatever_happens() -> None:
    async def go() -> None:
        admission, host = served(7), Host()
        gate = WeightVersionGate(host, admission=admission)
        host.go.clear()
        running = asyncio.create_task(ask(gate, json.dumps(PINNED).encode()))
        await host.has_begun.wait()
        assert admission._inside == {WeightVersion(exact=7): 1}
        host.failure = RuntimeError("the engine broke")
        host.go.set()
        with pytest.raises(RuntimeError, match="broke"):
            await running
        assert not admission._inside
        host.failure = None
        host.go.clear()
        host.has_begun.clear()
        running = asyncio.create_task(ask(gate, json.dumps(PINNED).encode()))
        await host.has_begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert not admission._inside

    asyncio.run(go())


def test_a_request_waits_for_a_commit_and_gets_the_new_weights() -> None:
    async def go() -> None:
        admission, host = served(6), Host()
        gate = WeightVersionGate(host, admission=admission)
        admission.let_pass(7, 0)
        running = asyncio.create_task(ask(gate, json.dumps(PINNED).encode()))
        await asyncio.sleep(0.03)
        assert host.bodies == []
        admission.settle(7)
        assert (await running)[0] == 200

    asyncio.run(go())


def test_a_commit_that_never_ends_is_not_ready() -> None:
    async def go() -> None:
        admission = served(6)
        gate = WeightVersionGate(Host(), admission=admission, patience_s=0.02)
        admission.let_pass(7, 0)
        status, answer = await ask(gate, json.dumps(PINNED).encode())
        error = json.loads(answer)["error"]
        assert (status, error["type"]) == (409, "WeightVersionNotReady")
        assert (error["target_version"], error["current_version"]) == (7, 6)

    asyncio.run(go())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=6,
)


@given(st.dictionaries(st.text(), JSON, max_size=4), st.integers(0, 100), st.booleans())
def test_the_field_is_found_however_it_is_spelled(
    document: dict[str, Any], version: int, is_escaped: bool
) -> None:
    document.pop("weight_version", None)
    assert wanted_version(json.dumps(document).encode()).is_any
    text = json.dumps({**document, "weight_version": {"exact_version": version}})
    if is_escaped:
        text = text.replace("weight_version", "".join(f"\\u{ord(c):04x}" for c in "weight_version"))
    assert wanted_version(text.encode()) == WeightVersion(exact=version)


@given(st.binary())
def test_bodies_of_any_bytes(body: bytes) -> None:
    try:
        assert wanted_version(body).is_any
    except FormatError:
        assert b"\\u" in body or b"weight_version" in body


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-32-be"])
def test_a_body_in_any_encoding_that_a_host_reads_is_held_to_the_field(encoding: str) -> None:
    body = json.dumps(PINNED).encode(encoding)
    assert json.loads(body) == PINNED
    assert wanted_version(body) == WeightVersion(exact=7)


@pytest.mark.parametrize("start", [b"\x89PNG", b"\xff\xfe", b"\x00\x00", b"[", b""])
def test_bytes_that_are_no_object_pass_whatever_is_in_them(start: bytes) -> None:
    assert wanted_version(start + b"\\u0077 weight_version \xff\x00").is_any


def test_a_client_that_goes_midway_is_never_taken_for_one_that_sent_all() -> None:
    async def go() -> None:
        seen: list[Any] = []
        messages = [
            {"type": "http.request", "body": b"half", "more_body": True},
            {"type": "http.disconnect"},
            {"type": "http.disconnect"},
        ]

        async def receive() -> Any:
            return messages.pop(0)

        async def host(_scope: Any, receive: Any, _send: Any) -> None:
            seen.extend([await receive(), await receive()])

        gate = WeightVersionGate(host, admission=served(7))
        scope = {"type": "http", "method": "POST", "path": "/generate", "headers": []}
        await gate(scope, receive, host)
        assert [one.get("more_body") for one in seen] == [True, None]
        assert seen[1]["type"] == "http.disconnect"

    asyncio.run(go())
