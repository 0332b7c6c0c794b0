"""Trainer or engine killed, or stopped, at named steps of a delivery: the others finish, or fail and say who it was."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from syncline import MemoryEngine, Publisher, Receiver, open_store
from syncline.abc import Inlet, Outlet
from syncline.channels import (
    CollectiveInlet,
    CollectiveOutlet,
    SharedMemoryInlet,
    SharedMemoryOutlet,
)
from syncline.errors import CommitError, TransportError
from syncline.sync.checks import verify_engine
from syncline.sync.live import deliver, take
from syncline.types import Step

TRANSPORTS = ("shared-memory", *(("collective",) if find_spec("torch") else ()))
VERSIONS = 3
FATAL_VERSION = 2
TIMEOUT_S = 20.0
STOPPED_S = 3.0
"""What is waited for those that stand still: long for those that only share a core."""
DEADLINE_S = 120.0
SHAPE = (64, 64)
SLOW = partial(pytest.param, marks=pytest.mark.slow)

pytestmark = pytest.mark.skipif(
    not Path("/dev/shm").is_dir(), reason="looks for what is left behind where Linux shows it"
)


def _weights(version: int) -> dict[str, np.ndarray]:
    """Return the weights of a version: half of the units differ from the one before."""
    rng = np.random.default_rng(5)
    made = {f"layer.{i}": rng.integers(0, 1 << 16, SHAPE, np.uint16) for i in range(4)}
    for array in made.values():
        array[::2] += version
    return made


class _Bomb:
    """Kills or stops this process when it reaches a step while a version is on its way."""

    def __init__(self, step: str | None, how: signal.Signals) -> None:
        self.step = step
        self.how = how
        self.is_armed = False

    def __call__(self, at: Step) -> None:
        if self.is_armed and at.name == self.step:
            self.is_armed = False
            os.kill(os.getpid(), self.how)


def _outlet(transport: str, folder: Path) -> Outlet:
    if transport == "shared-memory":
        return SharedMemoryOutlet(str(folder / "path"))
    outlet = CollectiveOutlet("127.0.0.1:0")
    part = folder / "address.part"
    part.write_text(outlet.address)
    part.rename(folder / "address")
    return outlet


def _inlet(transport: str, folder: Path, name: str, timeout_s: float) -> Inlet:
    if transport == "shared-memory":
        return SharedMemoryInlet(str(folder / "path"), name=name, timeout_s=timeout_s)
    deadline_s = time.monotonic() + DEADLINE_S
    while not (folder / "address").exists():
        if time.monotonic() > deadline_s:
            raise TimeoutError("no trainer wrote its address")
        time.sleep(0.01)
    address = (folder / "address").read_text()
    return CollectiveInlet(address, name=name, timeout_s=timeout_s)


def _trainer(transport: str, folder: Path, step: str | None, how: signal.Signals) -> None:
    bomb, outlet = _Bomb(step, how), _outlet(transport, folder)
    timeout_s = TIMEOUT_S if how == signal.SIGKILL else STOPPED_S
    publisher = Publisher(
        open_store(folder / "run"),
        live=outlet,
        observe=bomb,
        bucket_bytes=4096,
        live_timeout_s=timeout_s,
    )
    outlet.wait(2, DEADLINE_S)  # type: ignore[attr-defined]
    missed = []
    for version in range(1, VERSIONS + 1):
        bomb.is_armed = version == FATAL_VERSION
        report = publisher.publish(_weights(version))
        missed.append(dict(report.delivery.missed))
    outlet.close()
    (folder / "trainer.json").write_text(json.dumps(missed))


def _engine(transport: str, folder: Path, name: str, step: str | None, how: signal.Signals) -> None:
    # An engine waits through the attempts that another one, which stands still, costs the trainer.
    is_waiting = how == signal.SIGKILL or (step is None and not (folder / "trainer stops").exists())
    timeout_s = TIMEOUT_S if is_waiting else STOPPED_S
    bomb, inlet = _Bomb(step, how), _inlet(transport, folder, name, timeout_s)
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
    inlet.close()
    found = {
        "version": None if held is None else held.version,
        "error": error,
        "open": [link for link in _links() if "memfd" in link],
        "mapped": "memfd:syncline" in Path("/proc/self/maps").read_text(),
    }
    (folder / f"{name}.json").write_text(json.dumps(found))


def _links() -> list[str]:
    links = []
    for fd in Path("/proc/self/fd").iterdir():
        try:
            links.append(str(fd.readlink()))
        except FileNotFoundError:
            continue  # the one that lists
    return links


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="live-"))  # the path of a Unix socket is short
    yield made
    shutil.rmtree(made)


def _run(
    transport: str, folder: Path, victim: str, step: str, how: signal.Signals = signal.SIGKILL
) -> dict[str, Any]:
    """Run a trainer and two engines, one of which dies or stops; return what the others wrote.

    One that stopped goes on when the others have ended; what it wrote then is returned, too.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["syncline", *(["torch.distributed"] if find_spec("torch") else [])]
    )
    processes = {
        "trainer": context.Process(
            target=_trainer, args=(transport, folder, step if victim == "trainer" else None, how)
        )
    }
    for name in ("a", "b"):
        processes[name] = context.Process(
            target=_engine, args=(transport, folder, name, step if victim == name else None, how)
        )
    if victim == "trainer" and how == signal.SIGSTOP:
        (folder / "trainer stops").touch()
    before = set(Path("/dev/shm").iterdir())
    for process in processes.values():
        process.start()
    deadline_s = time.monotonic() + DEADLINE_S
    try:
        for name in sorted(processes, key=lambda name: name == victim):
            if how == signal.SIGSTOP and name == victim:
                os.kill(processes[name].pid, signal.SIGCONT)
            processes[name].join(max(0.0, deadline_s - time.monotonic()))
        codes = {name: process.exitcode for name, process in processes.items()}
    finally:
        for process in processes.values():
            process.kill()
            process.join()
    if how == signal.SIGKILL:
        assert codes.pop(victim) == -signal.SIGKILL
    assert set(codes.values()) == {0}, codes
    # Other programs on this machine may have put segments there meanwhile; ours would name us.
    ours = ("syncline", *(str(process.pid) for process in processes.values()))
    left = {each.name for each in set(Path("/dev/shm").iterdir()) - before}
    assert not [name for name in left if any(mark in name for mark in ours)]
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in codes}


@pytest.mark.parametrize("step", take.STEPS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_engine_that_dies_is_named_and_the_rest_goes_on(transport, step, folder):
    found = _run(transport, folder, "b", step)
    assert found["a"]["version"] == VERSIONS
    assert found["a"]["error"] is None
    first, second, third = found["trainer"]
    assert first == {}
    if step != "take.done":  # by then the trainer has heard that the version is in
        assert set(second) == {"b"}
    assert set(third) <= {"b"}
    assert found["a"]["open"] == []
    assert not found["a"]["mapped"]


@pytest.mark.parametrize("step", deliver.STEPS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_trainer_that_dies_leaves_engines_on_whole_versions(transport, step, folder):
    found = _run(transport, folder, "trainer", step)
    for name in ("a", "b"):
        assert found[name]["version"] in (FATAL_VERSION - 1, FATAL_VERSION)
        assert "trainer" in found[name]["error"]
        assert found[name]["open"] == []
        assert not found[name]["mapped"]
    if step in (
        "deliver.offered",
        "deliver.ready",
        "deliver.opened",
        "deliver.bucket_sent",
        "deliver.sent",
    ):
        assert {found[name]["version"] for name in ("a", "b")} == {FATAL_VERSION - 1}
    # The next trainer takes the path or port over, and the run goes on.
    if transport == "collective":
        CollectiveOutlet((folder / "address").read_text()).close()
    else:
        SharedMemoryOutlet(str(folder / "path")).close()
    engine = MemoryEngine()
    assert Receiver(open_store(folder / "run"), engine, verify="full").sync().version == 2


@pytest.mark.parametrize("step", ["take.bucket", *map(SLOW, ("take.answered", "take.voted"))])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_engine_that_stands_still_is_named_and_the_rest_goes_on(transport, step, folder):
    found = _run(transport, folder, "b", step, signal.SIGSTOP)
    assert found["a"]["version"] == VERSIONS
    assert found["a"]["error"] is None
    first, second, third = found["trainer"]
    assert (first, set(second), set(third) - {"b"}) == ({}, {"b"}, set())
    assert found["b"]["version"] in (FATAL_VERSION - 1, FATAL_VERSION)
    assert "trainer" in found["b"]["error"]
    for name in ("a", "b"):
        assert found[name]["open"] == []
        assert not found[name]["mapped"]


@pytest.mark.parametrize(
    "step", ["deliver.bucket_sent", *map(SLOW, ("deliver.offered", "deliver.voted"))]
)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_trainer_that_stands_still_keeps_engines_until_their_deadline(transport, step, folder):
    found = _run(transport, folder, "trainer", step, signal.SIGSTOP)
    for name in ("a", "b"):
        assert found[name]["version"] == FATAL_VERSION - 1
        assert "Timeout" in found[name]["error"]
        assert found[name]["open"] == []
        assert not found[name]["mapped"]
    first, second, third = found["trainer"]
    assert (first, set(second), third) == ({}, {"a", "b"}, {})
