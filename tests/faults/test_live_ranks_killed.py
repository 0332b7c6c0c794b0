"""Two trainer ranks and two engines over Gloo; one of them killed while a version is on its way."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from syncline import MemoryEngine, Ranks, Receiver, ShardedPublisher, open_store
from syncline.errors import CommitError, SynclineError, TransportError
from syncline.layouts.sharded import Shard, Sharding, dtensor_layout
from syncline.sync.checks import verify_engine
from syncline.sync.history import History
from syncline.types import Step, TensorMeta

pytest.importorskip("torch", reason="the ranks are torch processes")

WORLD, ENGINES = 2, ("a", "b")
VERSIONS, FATAL_VERSION = 3, 2
TIMEOUT_S, DEADLINE_S = 5.0, 120.0
START_S = 60.0
NAMES = [f"layer.{number}" for number in range(4)]
SHAPE = (32, 64)
SLOW = pytest.mark.slow


def _layout() -> Any:
    metas = [TensorMeta(name, "F32", SHAPE) for name in NAMES]
    cuts = {name: Sharding((WORLD,), (Shard(at % 2),)) for at, name in enumerate(NAMES)}
    return dtensor_layout(metas, cuts)


def _whole(version: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    made = {name: rng.standard_normal(SHAPE, np.float32) for name in NAMES}
    for array in made.values():
        array[::2] += version
    return made


def _shard(version: int, rank: int) -> dict[str, np.ndarray]:
    cut = (
        np.split(array, WORLD, at % 2)[rank] for at, array in enumerate(_whole(version).values())
    )
    return dict(zip(NAMES, map(np.ascontiguousarray, cut), strict=True))


class _Bomb:
    def __init__(self, step: str | None) -> None:
        self.step = step
        self.is_armed = False

    def __call__(self, at: Step) -> None:
        if self.is_armed and at.name == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def _write(path: Path, found: Any) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(found))
    part.rename(path)


def _trainer(rank: int, port: int, folder: Path, step: str | None, kind: str) -> None:
    import torch.distributed as dist

    from syncline.channels import CollectiveOutlet

    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD
    )
    bomb, outlet = _Bomb(step), CollectiveOutlet("127.0.0.1:0")
    ranks = Ranks.torch(timeout_s=START_S)
    publisher = ShardedPublisher(
        open_store(folder / "run"),
        _layout(),
        ranks,
        live=outlet,
        observe=bomb,
        bucket_bytes=4096,
        live_timeout_s=TIMEOUT_S,
        live_kind=kind,
    )
    if rank == 0:
        _write(folder / "address", outlet.address)
        outlet.wait(len(ENGINES), DEADLINE_S)
    missed, error = [], None
    try:
        for version in range(1, VERSIONS + 1):
            bomb.is_armed = version == FATAL_VERSION
            report = publisher.publish(_shard(version, rank))
            missed.append(dict(report.delivery.missed))
            ranks.timeout_s = TIMEOUT_S  # all are here
    except SynclineError as caught:
        error = f"{type(caught).__name__}: {caught}"
    outlet.close()
    _write(folder / f"rank{rank}.json", {"missed": missed, "error": error})
    while rank == 0 and step is None and not (folder / "over").exists():
        time.sleep(0.02)  # the ranks' store lives here
    os._exit(0)


def _engine(name: str, folder: Path, step: str | None) -> None:
    from syncline.channels import CollectiveInlet

    while not (folder / "address").exists():
        time.sleep(0.02)
    address = json.loads((folder / "address").read_text())
    bomb = _Bomb(step)
    inlet = CollectiveInlet(address, name=name, timeout_s=START_S)
    engine = MemoryEngine()
    receiver = Receiver(inlet, engine, observe=bomb)
    error = None
    try:
        for version in range(1, VERSIONS + 1):
            bomb.is_armed = version == FATAL_VERSION
            receiver.sync()
    except (TransportError, CommitError) as caught:
        error = f"{type(caught).__name__}: {caught}"
    held = engine.held()
    if held is not None:
        verify_engine(engine, held.manifest)
        for tensor, wanted in _whole(held.version).items():
            np.testing.assert_array_equal(engine.view(tensor), wanted.view(np.uint32).ravel())
    inlet.close()
    _write(
        folder / f"{name}.json", {"version": None if held is None else held.version, "error": error}
    )


def _run(
    folder: Path, victim: str | None, step: str | None, kind: str = "auto"
) -> dict[str, dict[str, Any]]:
    """Let all live through it; return what those that were not killed wrote down."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    processes = {}
    for rank in range(WORLD):
        mine = step if victim == f"rank{rank}" else None
        processes[f"rank{rank}"] = context.Process(
            target=_trainer, args=(rank, port, folder, mine, kind)
        )
    for name in ENGINES:
        mine = step if victim == name else None
        processes[name] = context.Process(target=_engine, args=(name, folder, mine))
    for process in processes.values():
        process.start()
    try:
        deadline_s = time.monotonic() + DEADLINE_S
        waiting = set(processes) - {victim, "rank0" if victim != "rank0" else ""}
        wanted = {name for name in processes if name != victim}
        while not all((folder / f"{name}.json").exists() for name in wanted):
            assert time.monotonic() < deadline_s, f"{waiting} hang"
            time.sleep(0.05)
        (folder / "over").touch()
        for process in processes.values():
            process.join(DEADLINE_S)
        if victim is not None:
            assert processes[victim].exitcode == -signal.SIGKILL
    finally:
        for process in processes.values():
            process.kill()
            process.join()
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in wanted}


@pytest.mark.parametrize("kind", ["auto", pytest.param("full", marks=SLOW)])
def test_two_ranks_and_two_engines(tmp_path, kind):
    found = _run(tmp_path, None, None, kind)
    for rank in range(WORLD):
        assert found[f"rank{rank}"]["missed"] == [{}] * VERSIONS
        assert found[f"rank{rank}"]["error"] is None
    for name in ENGINES:
        assert found[name] == {"version": VERSIONS, "error": None}


@pytest.mark.parametrize(
    ("step", "kind"),
    [
        ("deliver.bucket_sent", "auto"),
        pytest.param("deliver.opened", "full", marks=SLOW),
        pytest.param("deliver.opened", "auto", marks=SLOW),
        pytest.param("deliver.bucket_sent", "full", marks=SLOW),
    ],
)
def test_a_killed_rank_is_named_and_nothing_is_half_visible(tmp_path, step, kind):
    found = _run(tmp_path, "rank1", step, kind)
    leader = found["rank0"]
    assert set(leader["missed"][1]) == set(ENGINES)
    assert all("rank 1" in why for why in leader["missed"][1].values())
    assert "rank 1" in leader["error"]
    for name in ENGINES:
        assert found[name]["version"] == FATAL_VERSION - 1
        assert found[name]["error"] is not None
    current = History.open(open_store(tmp_path / "run")).current
    assert current.version == FATAL_VERSION


@pytest.mark.parametrize(
    ("step", "versions"),
    [
        pytest.param("deliver.bucket_sent", (1,), marks=SLOW),
        ("deliver.voted", (1,)),
        pytest.param("deliver.answered", (1,), marks=SLOW),
        pytest.param("deliver.decided", (2,), marks=SLOW),
    ],
)
def test_a_killed_leader_is_named_and_nothing_is_half_visible(tmp_path, step, versions):
    found = _run(tmp_path, "rank0", step)
    assert "rank 0" in found["rank1"]["error"]
    for name in ENGINES:
        assert found[name]["version"] in versions
        assert found[name]["error"] is not None


@pytest.mark.parametrize("step", ["take.bucket", pytest.param("take.voted", marks=SLOW)])
def test_a_killed_engine_is_named_and_the_other_is_served(tmp_path, step):
    found = _run(tmp_path, "a", step)
    for rank in range(WORLD):
        assert found[f"rank{rank}"]["error"] is None
        assert set(found[f"rank{rank}"]["missed"][1]) == {"a"}
        assert found[f"rank{rank}"]["missed"][2] == {}
    assert found["b"] == {"version": VERSIONS, "error": None}
