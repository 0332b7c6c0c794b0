"""Overwriting a checkpoint in place: what fails half-way is undone, what is flushed comes before what says so."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import engine_cases
from engine_cases import as_bytes, change, draw, held_bits, records, spans, version_of
from syncline import MemoryStore, Publisher, Receiver, durable
from syncline.engines import CheckpointDir, checkpoint_dir
from syncline.engines.checkpoint_dir import read_state
from syncline.errors import CommitError, TornUpdateError
from syncline.types import Step

OLD = draw(1)
NEW = change(OLD, 2)
V1, V2 = version_of(1, OLD), version_of(2, NEW)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    CheckpointDir(tmp_path / "model", shard_bytes=60_000).create(V1, spans(OLD), {})
    return tmp_path / "model"


def check(engine: CheckpointDir, version: int) -> None:
    """This engine and one opened anew hold the version; nothing else is left over."""
    for at in (engine, CheckpointDir(engine.path)):
        assert at.held() == {1: V1, 2: V2}[version]
        assert held_bits(at) == as_bytes({1: OLD, 2: NEW}[version])
    hidden = sorted(entry.name for entry in (engine.path / ".syncline").iterdir())
    assert hidden == ["lock", "state.json"]


def apply(engine: CheckpointDir) -> None:
    engine.apply(records(OLD, NEW, window_units=20_000), V2)


class Disk:
    """Lets system calls pass until one is refused."""

    def __init__(
        self, patch: pytest.MonkeyPatch, call: str, fail_at: int, *, for_good: bool
    ) -> None:
        self.left = fail_at
        self.for_good = for_good
        self.was_refused = False
        self._call = getattr(os, call)
        patch.setattr(os, call, self)

    def __call__(self, *arguments: object, **keywords: object) -> object:
        self.left -= 1
        if self.left == 0 or (self.for_good and self.left < 0):
            self.was_refused = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._call(*arguments, **keywords)


@pytest.mark.parametrize("fail_at", [1, 2, 3, 5, 8, 13, 21])
@pytest.mark.parametrize("call", ["open", "preadv", "pwrite", "write", "fsync"])
def test_one_refused_call_is_undone(
    path: Path, monkeypatch: pytest.MonkeyPatch, call: str, fail_at: int
) -> None:
    """Where there are fewer calls than that, nothing is refused and the update goes through."""
    engine = CheckpointDir(path)
    is_refused = False
    with monkeypatch.context() as patch:
        disk = Disk(patch, call, fail_at, for_good=False)
        try:
            apply(engine)
        except CommitError as error:
            is_refused = True
            assert "No space left on device" in str(error)
    assert is_refused or fail_at > 2
    assert disk.was_refused or not is_refused
    check(engine, 1 if is_refused else 2)
    if is_refused:
        apply(engine)
        check(engine, 2)


@pytest.mark.parametrize("fail_at", [1, 4, 9])
def test_a_disk_that_fails_for_good_leaves_a_journal_that_finishes_later(
    path: Path, monkeypatch: pytest.MonkeyPatch, fail_at: int
) -> None:
    engine = CheckpointDir(path)
    with monkeypatch.context() as patch:
        Disk(patch, "pwrite", fail_at, for_good=True)
        with pytest.raises(TornUpdateError, match="undoing it failed too"):
            apply(engine)
        state = read_state(path)
        assert state is not None
        assert state.is_changing
        for use in (engine.held, lambda: CheckpointDir(path)):
            with pytest.raises(TornUpdateError, match=r"left in the middle .* version 2.*No space"):
                use()
    check(engine, 2)


@pytest.mark.parametrize(
    "step", [step for step in checkpoint_dir.STEPS if step.startswith("apply.")]
)
def test_an_error_at_any_step_is_undone(path: Path, step: str) -> None:
    def observe(at: Step) -> None:
        if at.name == step:
            raise RuntimeError("observed")

    engine = CheckpointDir(path, observe=observe)
    with pytest.raises((CommitError, RuntimeError), match="observed"):
        apply(engine)
    engine = CheckpointDir(path)
    check(engine, 2 if step == "apply.journal_removed" else 1)


def test_a_failing_state_file_is_undone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace, calls = durable.replace, []

    def refuse_second(target: Path, data: bytes) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        replace(target, data)

    monkeypatch.setattr(durable, "replace", refuse_second)
    engine = CheckpointDir(path)
    with pytest.raises(CommitError, match=r"state\.json: Input/output error"):
        apply(engine)
    assert len(calls) == 3
    check(engine, 1)


def test_a_damaged_journal_is_not_redone(path: Path) -> None:
    kill_while_applying(path)
    journal = path / ".syncline" / "journal"
    damaged = bytearray(journal.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    journal.write_bytes(damaged)
    with pytest.raises(TornUpdateError, match=r"left in the middle.*digest does not fit"):
        CheckpointDir(path)
    journal.unlink()
    with pytest.raises(TornUpdateError, match="No such file"):
        CheckpointDir(path)
    state = read_state(path)
    assert state is not None
    assert state.is_changing


CHILD = """
import os, signal, sys
from engine_cases import change, draw, records, version_of
from syncline.engines import CheckpointDir

def observe(at):
    if at.name == "apply.marked":
        os.kill(os.getpid(), signal.SIGKILL)

old = draw(1)
new = change(old, 2)
CheckpointDir(sys.argv[1], observe=observe).apply(records(old, new), version_of(2, new))
"""


def kill_while_applying(path: Path) -> None:
    assert child(CHILD, path).returncode == -signal.SIGKILL


def child(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    search = os.pathsep.join([str(Path(engine_cases.__file__).parent), *sys.path])
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_journal_that_no_state_names_is_forgotten(path: Path) -> None:
    (path / ".syncline" / "journal").write_bytes(b"left by a process that died before it was whole")
    engine = CheckpointDir(path)
    assert held_bits(engine) == as_bytes(OLD)
    apply(engine)
    check(engine, 2)


def test_what_says_so_comes_after_what_it_says(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Power may fail anywhere: every flush comes before the state that relies on it."""
    events: list[str] = []
    fsync, pwrite, replace = os.fsync, os.pwrite, durable.replace

    def opened(fd: int) -> str:
        return Path(f"/proc/self/fd/{fd}").readlink().name

    def traced_fsync(fd: int) -> None:
        fsync(fd)
        events.append(f"flush {opened(fd)}")

    def traced_pwrite(fd: int, data: bytes, at: int) -> int:
        events.append(f"write {opened(fd)}")
        return pwrite(fd, data, at)

    def traced_replace(target: Path, data: bytes) -> None:
        replace(target, data)
        events.append("applying" if b'"applying"' in data else "clean")

    monkeypatch.setattr(os, "fsync", traced_fsync)
    monkeypatch.setattr(os, "pwrite", traced_pwrite)
    monkeypatch.setattr(durable, "replace", traced_replace)
    apply(CheckpointDir(path))
    marked, clean = events.index("applying"), events.index("clean")
    writes = [at for at, event in enumerate(events) if event.startswith("write")]
    assert events.index("flush journal") < events.index("flush .syncline") < marked
    assert marked < writes[0]
    assert writes[-1] < clean
    for name in {events[at].removeprefix("write ") for at in writes}:
        last = max(at for at in writes if events[at] == f"write {name}")
        assert last < events.index(f"flush {name}", last) < clean
    assert events.count("applying") == events.count("clean") == 1


QUOTA = """
import resource, sys
from engine_cases import change, draw, records, version_of
from syncline.engines import CheckpointDir
from syncline.errors import CommitError

old = draw(1)
new = change(old, 2, share=1.0)
engine = CheckpointDir(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    engine.apply(records(old, new), version_of(2, new))
except CommitError as error:
    print(error)
"""


def test_a_quota_on_the_journal_is_a_clear_error(path: Path) -> None:
    """A real limit of the system: the journal may not grow, the weights stay as they are."""
    done = child(QUOTA, path, 100_000)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("the journal cannot be written: File too large")
    check(CheckpointDir(path), 1)


@pytest.mark.parametrize(
    "step", [step for step in checkpoint_dir.STEPS if step.startswith("create.")]
)
@pytest.mark.parametrize("is_there", [False, True])
def test_an_error_while_creating_leaves_nothing(tmp_path: Path, step: str, is_there: bool) -> None:
    def observe(at: Step) -> None:
        if at.name == step:
            raise RuntimeError("observed")

    if is_there:
        (tmp_path / "model").mkdir()
    with pytest.raises((CommitError, RuntimeError), match="observed"):
        CheckpointDir(tmp_path / "model", observe=observe).create(V1, spans(OLD), {})
    assert list(tmp_path.rglob("*.*")) == []
    engine = CheckpointDir(tmp_path / "model")
    assert engine.held() is None
    engine.create(V1, spans(OLD), {})
    assert held_bits(engine) == as_bytes(OLD)


def test_what_a_killed_creation_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / ".model.syncline-new"
    (left / ".syncline").mkdir(parents=True)
    (left / "folder").mkdir()
    for name in (".syncline/state.json.next", "model.safetensors", "folder/x"):
        (left / name).write_bytes(b"half")
    engine = CheckpointDir(tmp_path / "model")
    engine.create(V1, spans(OLD), {})
    check(engine, 1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
    assert not (tmp_path / "model" / "folder").exists()


def test_disk_that_is_full_when_the_journal_is_closed_is_a_commit_error(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    store = MemoryStore()
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal(200_000).astype(np.float32) for name in "ab"}
    publisher = Publisher(store)
    publisher.publish(weights)
    engine = CheckpointDir(tmp_path / "model")
    Receiver(store, engine).sync()
    before = {name: value.copy() for name, value in weights.items()}
    weights["a"][::3] += 1
    weights["b"][::2] *= 2
    publisher.publish(weights)
    resource.setrlimit(resource.RLIMIT_FSIZE, (800_000, hard))
    try:
        with pytest.raises(CommitError, match="File too large"):
            Receiver(store, engine).sync()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert engine.held().version == 1
    assert (engine.view("b").view(np.float32) == before["b"]).all()
    assert Receiver(store, engine).sync().version == 2
