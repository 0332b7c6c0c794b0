"""A version handed to checkpoint-engine servers: a stand-in with the routes of release 0.4.2 over Unix sockets.

`tests/last_hop` has the real ones."""

from __future__ import annotations

import http.server
import json
import signal
import socketserver
import threading
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from hosting import Run
from syncline import CheckpointDir, Receiver
from syncline.errors import (
    BaseVersionError,
    ConfigError,
    EndpointError,
    MovedOnError,
    PeerLostError,
    TransportError,
    TransportTimeoutError,
)
from syncline.hosts.checkpoint_engine import CheckpointEngine, EngineCall


class Job:
    """What all servers of a job share: `gather-metas` and `update` meet at a barrier, as collectives do."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.stuck = threading.Event()
        self.has_registered = threading.Event()
        self.asked: list[tuple[int, str, str, object]] = []
        self.held: list[dict[str, list[str]]] = [{} for _ in range(size)]
        self.engines: list[dict[str, bytes]] = [{} for _ in range(size)]
        self.fails: dict[tuple[int, str], str] = {}
        self.metas: str | None = None
        self.name = ""

    def gathered(self) -> str:
        """Say what all hold of what was gathered last; who has nothing is left out."""
        shares = {}
        for rank, held in enumerate(self.held):
            names = [{"name": n} for file in held.get(self.name, []) for n in load_file(file)]
            if names:
                shares[rank] = {"memory_buffer_metas_list": [{"metas": names}]}
        return json.dumps(shares)


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
        if kind == "interrupt":
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.2)  # and go on with it
        if kind == "500":
            return self.answer(500, '"on purpose"')
        name = self.path.split("/")[3] if self.path.count("/") > 2 else ""
        if what == "files":
            if name in job.held[rank]:
                del job.held[rank][name]  # as 0.4.2 does
                return self.answer(500, '"already registered"')
            job.held[rank][name] = body["files"]
            if kind == "interrupt":
                job.has_registered.set()
        elif self.command == "DELETE":
            job.held[rank].pop(name, None)
        elif what == "metas":
            return self.answer(200, job.gathered() if job.metas is None else job.metas)
        elif what in ("gather-metas", "update"):
            job.name = name
            job.barrier.wait(20)
        if what == "update":
            for files in job.held:
                for file in files.get(name, []):
                    job.engines[rank] |= {n: a.tobytes() for n, a in load_file(file).items()}
        return self.answer(200, "")

    do_GET = do_POST = do_DELETE = handle_any  # noqa: N815 - names that http.server calls

    def answer(self, status: int, text: str) -> None:
        raw = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


URL = "http://localhost/collective_rpc"


def updates(job: Job) -> dict[int, dict]:
    """Return what each server was asked last for an update."""
    return {rank: dict(body) for rank, _, path, body in job.asked if path.endswith("/update")}


@pytest.fixture
def job(tmp_path):
    job = Job(2)
    servers = [Server(str(tmp_path / f"{rank}.sock"), rank, job) for rank in range(2)]
    for server in servers:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    job.sockets = [str(tmp_path / f"{rank}.sock") for rank in range(2)]
    yield job
    job.stuck.set()
    job.barrier.abort()  # where another was never asked
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
    done = servers.hand_over(directory, timeout_s=30, engines=[EngineCall(URL)])
    assert done.version == 1
    for engine in job.engines:
        assert engine == {n: a.tobytes() for n, a in run.states[0].items()}
    assert {p: p.read_bytes() for p in directory.glob("*") if p.is_file()} == before
    order = [path.rsplit("/", 1)[-1] for rank, _, path, _ in job.asked if rank == 0]
    assert order == ["healthz", done.name, "files", "gather-metas", "metas", "update"]


def test_every_engine_is_asked_once_by_the_server_of_its_first_rank(job, pulled):
    """Two that ask the same engine take each other's messages."""
    servers = CheckpointEngine(job.sockets)
    servers.hand_over(pulled[1], timeout_s=30, engines=[EngineCall(URL, uds="engine.sock")])
    asked = updates(job)
    assert 0 < asked[0].pop("timeout") <= 30 and 0 < asked[1].pop("timeout") <= 30
    nobody = {"ranks": [], "update_url": None, "inference_group_ranks": [], "uds": None}
    one = {"ranks": [], "update_url": URL, "inference_group_ranks": [0, 1], "uds": "engine.sock"}
    assert asked == {0: one, 1: nobody}
    servers.hand_over(
        pulled[1], timeout_s=30, engines=[EngineCall(URL, (1,)), EngineCall(URL, (0,))]
    )
    assert [updates(job)[rank]["inference_group_ranks"] for rank in range(2)] == [[0], [1]]
    servers.hand_over(pulled[1], timeout_s=30, engines=[EngineCall(URL)], ranks=[1])
    asked = updates(job)
    assert (asked[0]["update_url"], asked[1]["update_url"]) == (None, URL)
    assert asked[1]["inference_group_ranks"] == [1] and asked[0]["ranks"] == [1]


@pytest.mark.parametrize(
    ("engines", "ranks"),
    [
        ([], [2]),
        ([], [-1]),
        ([], [0, 0]),
        ([EngineCall(URL), EngineCall(URL)], []),
        ([EngineCall(URL, (0,))], []),
        ([EngineCall(URL, (0, 1))], [1]),
        ([EngineCall(URL, (0, 1)), EngineCall(URL, (1,))], []),
        ([EngineCall("/collective_rpc", uds="engine.sock")], []),
        ([EngineCall("unix://engine.sock")], []),
    ],
)
def test_what_its_servers_would_wait_for_or_update_nothing_by_is_refused(
    job, pulled, engines, ranks
):
    with pytest.raises(ConfigError, match="expected"):
        CheckpointEngine(job.sockets).hand_over(
            pulled[1], timeout_s=5, engines=engines, ranks=ranks
        )
    assert job.asked == []


def test_what_another_object_registered_is_registered_anew(job, pulled):
    first = CheckpointEngine(job.sockets).hand_over(pulled[1], timeout_s=30)
    assert CheckpointEngine(job.sockets).hand_over(pulled[1], timeout_s=30) == first


def test_a_server_that_lost_its_share_is_found_out(job, pulled):
    servers = CheckpointEngine(job.sockets)
    servers.hand_over(pulled[1], timeout_s=30)
    for held in job.held:
        held.clear()
    job.engines[0].clear()
    with pytest.raises(TransportError, match="7 tensors of the version, each once; found 0"):
        servers.hand_over(pulled[1], timeout_s=30)
    assert job.engines[0] == {}, "no update was asked for"
    servers.hand_over(pulled[1], timeout_s=30)
    assert len(job.engines[0]) == 7


@pytest.mark.parametrize("said", ["", "[]", "{}", '{"0": {}}', '{"0": []}', "nothing"])
def test_metas_that_are_not_those_of_the_version_are_refused(job, pulled, said):
    job.metas = said
    with pytest.raises(TransportError, match="metas|each once"):
        CheckpointEngine(job.sockets).hand_over(pulled[1], timeout_s=30)
    assert updates(job) == {} and job.held == [{}, {}]


def test_a_directory_that_changes_meanwhile_is_not_handed_over(job, pulled, monkeypatch):
    run, directory = pulled
    register = CheckpointEngine._register

    def slow(self, *arguments):
        register(self, *arguments)
        run.publish(2)
        Receiver(run.store, CheckpointDir(directory)).sync()

    monkeypatch.setattr(CheckpointEngine, "_register", slow)
    with pytest.raises(MovedOnError, match="version 1"):
        CheckpointEngine(job.sockets).hand_over(directory, timeout_s=30)
    assert updates(job) == {} and job.held == [{}, {}]


def test_after_an_update_that_failed_the_version_is_registered_anew(job, pulled):
    servers = CheckpointEngine(job.sockets)
    servers.hand_over(pulled[1], timeout_s=30)
    job.fails |= {(0, "update"): "500", (1, "update"): "500"}
    with pytest.raises(EndpointError, match="on purpose"):
        servers.hand_over(pulled[1], timeout_s=30)
    assert job.held == [{}, {}]
    job.fails.clear()
    servers.hand_over(pulled[1], timeout_s=30)
    assert all(job.held)


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


@pytest.fixture
def ctrl_c():
    """Let SIGINT raise `KeyboardInterrupt`, also where the tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("at", ["files", "gather-metas", "metas", "update"])
def test_after_ctrl_c_nothing_stays_registered(job, pulled, ctrl_c, at):
    job.fails[0, at] = "interrupt"
    with pytest.raises(KeyboardInterrupt):
        CheckpointEngine(job.sockets).hand_over(pulled[1], timeout_s=30)
    assert at != "files" or job.has_registered.wait(10)
    assert job.held == [{}, {}]


def test_ctrl_c_is_heard_where_a_server_hangs(job, pulled, ctrl_c, monkeypatch):
    monkeypatch.setattr("syncline.hosts.checkpoint_engine._UNDER_WAY_S", 0.1)
    job.fails |= {(0, "update"): "interrupt", (1, "update"): "hang"}
    with pytest.raises(KeyboardInterrupt):
        CheckpointEngine(job.sockets).hand_over(pulled[1], timeout_s=30)
    assert job.held == [{}, {}]


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
