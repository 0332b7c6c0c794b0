"""Versions handed to real checkpoint-engine servers: release 0.4.2 under a CPU stub with Gloo, in an environment of its own.

`make last-hop-env` makes it; `make test-long` runs it. CUDA handles, pinned memory, NCCL and RDMA are not tried so.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from hosting import Weights, weights
from syncline import CheckpointDir, MemoryStore, Publisher, Receiver
from syncline.errors import EndpointError, TransportError, TransportTimeoutError
from syncline.hosts.checkpoint_engine import CheckpointEngine, EngineCall

ROOT = Path(__file__).parents[2]
ENVIRONMENT = Path(os.environ.get("SYNCLINE_LAST_HOP_ENV", ROOT / ".venvs" / "last-hop"))
STUB = Path(__file__).with_name("cpu_stub.py")
START_S, UPDATE_S = 120.0, 60.0
SHARD_BYTES = 60_000

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (ENVIRONMENT / ".made-from").exists(),
        reason="checkpoint-engine is not installed; run make last-hop-env",
    ),
]


def test_the_environment_is_the_one_that_is_asked_for():
    listed = Path(__file__).with_name("packages.txt").read_text()
    assert (ENVIRONMENT / ".made-from").read_text().startswith(listed), "run make last-hop-env"


class Job:
    """Two servers of one job, an engine with a worker beside each, and two with a worker beside one."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack
        self.sockets = [str(folder / f"{rank}.sock") for rank in range(2)]
        self._environment = {
            **os.environ,
            "PYTHONPATH": "",
            "STUB_JOB": f"{os.getpid()}-{time.monotonic_ns()}",
            "STUB_FOLDER": str(folder),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port() - 1),  # theirs is the next
            "PS_MAX_BUCKET_SIZE_GB": str(2.0**-14),
        }
        for rank, path in enumerate(self.sockets):
            self._start("serve", "--uds", path, RANK=str(rank))
        self.both, *self.alone = [self._engine(*ranks) for ranks in ((0, 1), (0,), (1,))]
        self._wait_for([*self.sockets, *(str(e.uds) for e in (self.both, *self.alone))])

    def _engine(self, *ranks: int) -> EngineCall:
        path = self.folder / f"engine-{'-'.join(map(str, ranks))}"
        path.mkdir()
        self._start("engine", f"{path}.sock", str(path), *map(str, ranks))
        return EngineCall("http://localhost/collective_rpc", ranks, f"{path}.sock")

    def _start(self, *arguments: str, **variables: str) -> None:
        log = self._stack.enter_context((self.folder / "log").open("a"))
        process = subprocess.Popen(
            [ENVIRONMENT / "bin" / "python", STUB, *arguments],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={**self._environment, **variables},
        )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        self._stack.callback(process.stdin.close)

    def _wait_for(self, paths: list[str]) -> None:
        deadline_s = time.monotonic() + START_S
        while missing := [path for path in paths if not Path(path).exists()]:
            log = self.folder / "log"
            assert time.monotonic() < deadline_s, f"nothing at {missing}: {log.read_text()[-4000:]}"
            time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def folder_of(engine: EngineCall) -> Path:
    return Path(str(engine.uds)).with_suffix("")


def check(engine: EngineCall, expected: Weights) -> None:
    """Every worker of the engine was given every tensor, bit for bit, since this was asked last."""
    for rank in engine.ranks:
        path = folder_of(engine) / f"{rank}.safetensors"
        found = load_file(path)
        path.unlink()
        assert set(found) == set(expected)
        for name, array in expected.items():
            assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
            assert found[name].tobytes() == array.tobytes(), name


def check_nothing_came(engine: EngineCall) -> None:
    assert not list(folder_of(engine).glob("*.safetensors"))


class Pulled:
    """A run, and a checkpoint directory that follows it."""

    def __init__(self, path: Path, first: Weights) -> None:
        self._store = MemoryStore()
        self._publisher = Publisher(self._store)
        self._receiver = Receiver(self._store, CheckpointDir(path, shard_bytes=SHARD_BYTES))
        self.path, self.weights = path, first
        self._follow()

    def change(self) -> None:
        """Change a few elements of each tensor, so that what is pulled is a delta."""
        self.weights = {name: array.copy() for name, array in self.weights.items()}
        for array in self.weights.values():
            array.reshape(-1).view(np.uint8)[:: 997 * array.itemsize] ^= 1
        self._follow()

    def _follow(self) -> None:
        self._publisher.publish(self.weights)
        self._receiver.sync()


def drawn(seed: int) -> Weights:
    raw = np.random.default_rng(seed).integers(0, 1 << 16, (160, 33), np.uint16)
    return {**weights(seed), "h.bf16": raw.view(ml_dtypes.bfloat16)}


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Iterator[Job]:
    with ExitStack() as stack:
        yield Job(tmp_path_factory.mktemp("job"), stack)


def test_a_version_and_the_delta_after_it_arrive_bit_for_bit(job, tmp_path):
    """One engine over both servers: asked by both, as it once was, it took the messages of one for the other's."""
    pulled = Pulled(tmp_path / "ckpt", drawn(1))
    servers = CheckpointEngine(job.sockets)
    names = []
    for version in (1, 2):
        done = servers.hand_over(pulled.path, timeout_s=UPDATE_S, engines=[job.both])
        assert done.version == version and all(done.files.values())
        check(job.both, pulled.weights)
        names.append(done.name)
        pulled.change()
    for name in names:
        servers.forget(name, timeout_s=UPDATE_S)


def test_each_engine_is_asked_by_the_server_beside_it(job, tmp_path):
    pulled = Pulled(tmp_path / "ckpt", {"a": np.arange(5, dtype=np.float32)})
    done = CheckpointEngine(job.sockets).hand_over(
        pulled.path, timeout_s=UPDATE_S, engines=job.alone
    )
    assert sorted(map(len, done.files.values())) == [0, 1], "one server has no file of its own"
    for engine in job.alone:
        check(engine, pulled.weights)


def test_one_rank_reads_peer_to_peer(job, tmp_path):
    if "fail to initialize p2p store" in (job.folder / "log").read_text():
        pytest.skip("Mooncake needs Debian's libibverbs1 libnl-3-200 libnl-route-3-200")
    pulled = Pulled(tmp_path / "ckpt", drawn(2))
    servers = CheckpointEngine(job.sockets)
    for _ in range(2):
        servers.hand_over(pulled.path, timeout_s=UPDATE_S, engines=job.alone[1:], ranks=[1])
        check(job.alone[1], pulled.weights)
        check_nothing_came(job.alone[0])
        pulled.change()


def test_what_another_object_registered_is_registered_anew(job, tmp_path):
    """As after a restart of who hands over. checkpoint-engine deletes what is registered twice."""
    pulled = Pulled(tmp_path / "ckpt", drawn(3))
    for _ in range(2):
        CheckpointEngine(job.sockets).hand_over(pulled.path, timeout_s=UPDATE_S, engines=[job.both])
        check(job.both, pulled.weights)


def test_a_server_that_lost_its_share_is_found_out(job, tmp_path):
    """It gathers and updates as if all were well, and engines would get a part of the version."""
    pulled = Pulled(tmp_path / "ckpt", drawn(4))
    servers = CheckpointEngine(job.sockets)
    done = servers.hand_over(pulled.path, timeout_s=UPDATE_S, engines=[job.both])
    check(job.both, pulled.weights)
    CheckpointEngine(job.sockets[1:]).forget(done.name, timeout_s=UPDATE_S)
    with pytest.raises(TransportError, match="each once"):
        servers.hand_over(pulled.path, timeout_s=UPDATE_S, engines=[job.both])
    check_nothing_came(job.both)
    servers.hand_over(pulled.path, timeout_s=UPDATE_S, engines=[job.both])
    check(job.both, pulled.weights)


def test_an_engine_that_refuses_is_told_and_the_next_hand_over_works(job, tmp_path):
    pulled = Pulled(tmp_path / "ckpt", drawn(5))
    servers = CheckpointEngine(job.sockets)
    refuses = folder_of(job.both) / "refuses"
    refuses.touch()
    try:
        with pytest.raises(EndpointError, match="remote errors"):
            servers.hand_over(pulled.path, timeout_s=UPDATE_S, engines=[job.both])
    finally:
        refuses.unlink()
    check_nothing_came(job.both)
    servers.hand_over(pulled.path, timeout_s=UPDATE_S, engines=[job.both])
    check(job.both, pulled.weights)


def test_release_0_4_2_does_not_tell_that_an_engine_refused_its_last_bucket(job, tmp_path):
    """What the page on parameter servers warns of; nothing that its routes answer gives it away."""
    pulled = Pulled(tmp_path / "ckpt", {"a": np.arange(7, dtype=np.float32)})
    refuses = folder_of(job.both) / "refuses"
    refuses.touch()
    try:
        CheckpointEngine(job.sockets).hand_over(pulled.path, timeout_s=UPDATE_S, engines=[job.both])
    finally:
        refuses.unlink()
    check(job.both, {})


def test_an_engine_that_is_gone_is_told_by_the_deadline(tmp_path):
    """The servers never answer again, so this job is its own."""
    pulled = Pulled(tmp_path / "ckpt", drawn(6))
    with ExitStack() as stack:
        job = Job(tmp_path, stack)
        servers = CheckpointEngine(job.sockets)
        gone = replace(job.both, uds=str(tmp_path / "gone.sock"))
        with pytest.raises(TransportTimeoutError, match="restart it and its engines"):
            servers.hand_over(pulled.path, timeout_s=8.0, engines=[gone])
        with pytest.raises(TransportTimeoutError, match="healthz"):
            servers.hand_over(pulled.path, timeout_s=1.0, engines=[job.both])
        check_nothing_came(job.both)
