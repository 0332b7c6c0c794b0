"""Whatever is posted, the server answers it, keeps to its rules, and serves on."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hot_load_servers import Run
from syncline import MemoryEngine
from syncline.hotload import identity
from syncline.hotload.client import PATH
from syncline.serving import Replica, hot_load_app
from syncline.serving.app import CHECK_PATH

RUN = Run()
for _ in range(3):
    RUN.publish()

IDENTITY = st.one_of(
    st.sampled_from(["1", "2", "3", "4", "weight_v000002", "weight_v000009", "../1", "HEAD.json"]),
    st.text(max_size=20),
    st.integers(),
    st.none(),
)
METADATA = st.dictionaries(
    st.sampled_from(
        ["previous_snapshot_identity", "compression_format", "checksum_format", "more"]
    ),
    IDENTITY | st.sampled_from(["zstd", "xxh3-128", "alder32"]),
)
ORDER = st.dictionaries(
    st.sampled_from(["identity", "incremental_snapshot_metadata", "reset_prompt_cache", "more"]),
    IDENTITY | METADATA | st.booleans() | st.just("new_session"),
)
LEGAL = st.fixed_dictionaries(
    {"identity": IDENTITY}, optional={"incremental_snapshot_metadata": METADATA}
)


def ask(app: Any, method: str, path: str, body: bytes, query: bytes = b"") -> tuple[int, Any]:
    """Put one request straight into the application."""
    sent: list[dict[str, Any]] = []
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": query,
        "headers": [(b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], json.loads(b"".join(m.get("body", b"") for m in sent[1:]))


@pytest.fixture(scope="module")
def app() -> Any:
    return hot_load_app(Replica(RUN.store, MemoryEngine()))


def check(status: int, answer: Any) -> None:
    if status == 202:
        assert answer["accepted"]
        return
    assert status in (400, 404, 409)
    assert set(answer["error"]) >= {"type", "message"}


@given(body=st.binary(max_size=200))
def test_any_bytes(app: Any, body: bytes) -> None:
    check(*ask(app, "POST", PATH, body))


@given(order=ORDER | LEGAL)
def test_any_fields(app: Any, order: dict[str, Any]) -> None:
    status, answer = ask(app, "POST", PATH, json.dumps(order).encode())
    check(status, answer)
    if status == 202:
        assert order["identity"] in ("1", "2", "3", "weight_v000002")
        metadata = order.get("incremental_snapshot_metadata")
        if metadata is not None:
            version, previous = (
                identity.parse(text, "identity")[0]
                for text in (order["identity"], metadata["previous_snapshot_identity"])
            )
            assert (previous, version) in ((1, 2), (2, 3))


@given(query=st.text(st.characters(codec="ascii", min_codepoint=33), max_size=60))
def test_any_query(app: Any, query: str) -> None:
    status, answer = ask(app, "GET", CHECK_PATH, b"", query.encode())
    if status == 200:
        assert answer == {"current_versions": [None]}
    else:
        check(status, answer)
