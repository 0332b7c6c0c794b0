"""A version handed to checkpoint-engine servers: a stand-in with the routes of release 0.4.2 over Unix sockets."""

from __future__ import annotations

import http.server
import json
import socketserver
import threading
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from hosting import Run
from syncline import CheckpointDir, Receiver
from syncline.errors import (
    BaseVersionError,
    ConfigError,
    EndpointError,
    PeerLostError,
    TransportTimeoutError,
)
from syncline.hosts.checkpoint_engine import CheckpointEngine


class Job:
    """What all servers of a job share: `gather-metas` and `update` meet at a barrier, as collectives do."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.stuck = threading.Event()
        self.asked: list[tuple[int, str, str, object]] = []
        self.held: list[dict[str, list[str]]] = [{} for _ in range(size)]
        self.engines: list[dict[str, bytes]] = [{} for _ in range(size)]
        self.fails: dict[tuple[int, str], str] = {}


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True

    def __init__(self, path: str, rank: int, job: Job) -> None:
        self.rank, self.job = rank, job
        super().__init__(path, Handler)

    def handle_error(self, *_: object) -> None:
        """Say nothing: clients that went away are what is tested."""


class Handler(http.server.BaseHTTPRequestHandler):
    def address_string(self) -> str:
        return "unix"

    def log_message(self, *_: object) -> None:
        pass

    def handle_any(self) -> None:
        rank, job = self.server.rank, self.server.job
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        job.asked.append((rank, self.command, self.path, body))
        what = self.path.rsplit("/", 1)[-1]
        kind = job.fails.get((rank, what))
        if kind == "hang":
            job.stuck.wait(60)
        if kind == "500":
            return self.answer(500, "on purpose")
        name = self.path.split("/")[3] if self.path.count("/") > 2 else ""
        if what == "files":
            if name in job.held[rank]:
                del job.held[rank][name]  # as 0.4.2 does
                return self.answer(500, "already registered")
            job.held[rank][name] = body["files"]
        elif self.command == "DELETE":
            del job.held[rank][name]
        elif what in ("gather-metas", "update"):
            job.barrier.wait(20)
        if what == "update":
            for files in job.held:
                for file in files[name]:
                    job.engines[rank] |= {n: a.tobytes() for n, a in load_file(file).items()}
        return self.answer(200, "")

    do_GET = do_POST = do_DELETE = handle_any  # noqa: N815 - names that http.server calls

    def answer(self, status: int, text: str) -> None:
        raw = json.dumps(text).encode() if text else b""
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


@pytest.fixture
def job(tmp_path):
    job = Job(2)
    servers = [Server(str(tmp_path / f"{rank}.sock"), rank, job) for rank in range(2)]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    job.sockets = [str(tmp_path / f"{rank}.sock") for rank in range(2)]
    yield job
    job.stuck.set()
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def pulled(tmp_path) -> tuple[Run, Path]:
    run = Run()
    run.publish(1)
    Receiver(run.store, CheckpointDir(tmp_path / "ckpt")).sync()
    return run, tmp_path / "ckpt"


def test_a_version_is_registered_gathered_and_updated_on_all(job, pulled):
    run, directory = pulled
    before = {p: p.read_bytes() for p in directory.glob("*") if p.is_file()}
    servers = CheckpointEngine(job.sockets)
    done = servers.hand_over(
        directory, timeout_s=30, update_url="http://localhost/collective_rpc", ranks=[1]
    )
    assert done.version == 1
    for engine in job.engines:
        assert engine == {n: a.tobytes() for n, a in run.states[0].items()}
    said = next(body for _, _, path, body in job.asked if path.endswith("/update"))
    assert said["ranks"] == [1] and said["update_url"] == "http://localhost/collective_rpc"
    assert 0 < said["timeout"] <= 30 and said["uds"] is None
    assert {p: p.read_bytes() for p in directory.glob("*") if p.is_file()} == before
    order = [path.rsplit("/", 1)[-1] for rank, _, path, _ in job.asked if rank == 0]
    assert order == ["healthz", "files", "gather-metas", "update"]


def test_the_same_version_again_is_not_registered_again(job, pulled):
    """checkpoint-engine deletes a checkpoint that is registered a second time."""
    servers = CheckpointEngine(job.sockets)
    first = servers.hand_over(pulled[1], timeout_s=30)
    assert servers.hand_over(pulled[1], timeout_s=30) == first
    assert all(list(held) == [first.name] for held in job.held)
    servers.forget(first.name, timeout_s=30)
    assert job.held == [{}, {}]


def test_another_version_has_another_name(job, pulled):
    run, directory = pulled
    servers = CheckpointEngine(job.sockets)
    first = servers.hand_over(directory, timeout_s=30)
    run.publish(2)
    Receiver(run.store, CheckpointDir(directory)).sync()
    second = servers.hand_over(directory, timeout_s=30)
    assert first.name != second.name and second.version == 2
    assert job.engines[0] == {n: a.tobytes() for n, a in run.states[1].items()}


def test_a_server_that_refuses_is_named_and_the_others_take_it_back(job, pulled):
    job.fails[1, "files"] = "500"
    with pytest.raises(EndpointError, match=r"1\.sock.*on purpose") as caught:
        CheckpointEngine(job.sockets).hand_over(pulled[1], timeout_s=30)
    assert caught.value.status == 500
    assert job.held == [{}, {}]
    job.fails.clear()
    CheckpointEngine(job.sockets).hand_over(pulled[1], timeout_s=30)


def test_an_update_that_hangs_ends_by_the_deadline(job, pulled):
    job.fails |= {(0, "update"): "hang", (1, "update"): "hang"}
    with pytest.raises(TransportTimeoutError, match="update"):
        CheckpointEngine(job.sockets).hand_over(pulled[1], timeout_s=1.0)


def test_a_server_that_is_not_there(job, pulled, tmp_path):
    with pytest.raises(PeerLostError, match=r"2\.sock"):
        CheckpointEngine([*job.sockets, str(tmp_path / "2.sock")]).hand_over(
            pulled[1], timeout_s=10
        )
    assert job.held == [{}, {}]


def test_what_is_refused_before_anything_is_asked(job, pulled, tmp_path, monkeypatch):
    with pytest.raises(ConfigError):
        CheckpointEngine([])
    with pytest.raises(ConfigError):
        CheckpointEngine(["a", "a"])
    empty = tmp_path / "empty"
    CheckpointDir(empty)
    with pytest.raises(BaseVersionError):
        CheckpointEngine(job.sockets).hand_over(empty, timeout_s=5)
    monkeypatch.setattr("syncline.hosts.checkpoint_engine._IN_PLACE", tmp_path)
    with pytest.raises(ConfigError, match="deletes"):
        CheckpointEngine(job.sockets).hand_over(pulled[1], timeout_s=5)
    assert job.asked == []


def test_why_it_was_not_registered_is_said_also_where_it_cannot_be_taken_back(
    job, pulled, monkeypatch
):
    job.fails[1, "files"] = "500"
    servers = CheckpointEngine(job.sockets)
    monkeypatch.setattr("syncline.hosts.checkpoint_engine._TAKE_BACK_S", 0.0)
    with pytest.raises(EndpointError, match="on purpose"):
        servers.hand_over(pulled[1], timeout_s=30)
