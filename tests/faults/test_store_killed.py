"""SIGKILL at every named step of a filesystem store: whole objects or none, and the next process goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from syncline.errors import ObjectExistsError, ObjectNotFoundError, VersionConflictError
from syncline.stores import FilesystemStore, filesystem

CHILD = """
import os, signal, sys
from syncline.stores import FilesystemStore

job, path, step = sys.argv[1:]

def observe(reached):
    if reached.name == step:
        os.kill(os.getpid(), signal.SIGKILL)

store = FilesystemStore(path, observe=observe)
if job == "put":
    store.put("v1/part.safetensors", [b"whole " * 1000, b"object"])
elif job == "begin":
    store.compare_and_swap("HEAD.json", None, b"new")
else:
    store.compare_and_swap("HEAD.json", b"old", b"new")
"""

CONTENT = b"whole " * 1000 + b"object"
PUT = [step for step in filesystem.STEPS if step.startswith("put.")]
SWAP = [step for step in filesystem.STEPS if step.startswith("swap.")]


def kill(job: str, path: Path, step: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, job, str(path), step],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, f"{job} never reached {step}: {done.stderr}"


def hidden(path: Path) -> list[str]:
    return [entry.name for entry in path.rglob(".*") if entry.name != ".syncline-lock"]


@pytest.mark.parametrize("step", PUT)
def test_killed_while_putting(tmp_path: Path, step: str) -> None:
    path = tmp_path / "run"
    FilesystemStore(path).compare_and_swap("HEAD.json", None, b"old")
    kill("put", path, step)
    store = FilesystemStore(path)
    is_there = step in ("put.linked", "put.directory_flushed")
    listed = {info.key: info.size_bytes for info in store.list()}
    assert listed == {"HEAD.json": 3} | ({"v1/part.safetensors": len(CONTENT)} if is_there else {})
    readers_glob = sorted(entry.name for entry in (path / "v1").glob("*.safetensors"))
    assert readers_glob == (["part.safetensors"] if is_there else [])
    if is_there:
        assert store.get("v1/part.safetensors") == CONTENT
        with pytest.raises(ObjectExistsError):
            store.put("v1/part.safetensors", [b"other"])
    else:
        with pytest.raises(ObjectNotFoundError):
            store.get("v1/part.safetensors")
        store.put("v1/part.safetensors", [b"other"])
        assert store.get("v1/part.safetensors") == b"other"
    store.put("v1/next", [b"x"])
    assert hidden(path) == []


@pytest.mark.parametrize("step", PUT)
def test_leftovers_go_with_the_last_object(tmp_path: Path, step: str) -> None:
    """A publisher removes what was begun by listing and deleting; the directory goes too."""
    path = tmp_path / "run"
    FilesystemStore(path).compare_and_swap("HEAD.json", None, b"old")
    kill("put", path, step)
    store = FilesystemStore(path)
    store.delete("v1/part.safetensors")
    assert sorted(entry.name for entry in path.iterdir()) == [".syncline-lock", "HEAD.json"]


@pytest.mark.parametrize("step", SWAP)
@pytest.mark.parametrize("job", ["begin", "swap"])
def test_killed_while_swapping(tmp_path: Path, step: str, job: str) -> None:
    path = tmp_path / "run"
    old = None
    if job == "swap":
        old = b"old"
        FilesystemStore(path).compare_and_swap("HEAD.json", None, old)
    kill(job, path, step)
    store = FilesystemStore(path)
    if step in ("swap.renamed", "swap.directory_flushed"):
        assert store.get("HEAD.json") == b"new"
        with pytest.raises(VersionConflictError):
            store.compare_and_swap("HEAD.json", old, b"late")
        old = b"new"
    store.compare_and_swap("HEAD.json", old, b"next")
    assert store.get("HEAD.json") == b"next"
    assert hidden(path) == []


def test_every_step_is_killed_at() -> None:
    assert (*PUT, *SWAP) == filesystem.STEPS
