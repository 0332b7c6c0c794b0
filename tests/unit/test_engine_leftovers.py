"""What tests of engines remove at their end belongs to processes that are gone, never to engines that run beside them."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import engine_leftovers

pytestmark = pytest.mark.skipif(
    not engine_leftovers.SHARED.is_dir(), reason="segments lie elsewhere here"
)

LEAVES_ONE = """
import os
from multiprocessing import resource_tracker, shared_memory
segment = shared_memory.SharedMemory(create=True, size=4096)
resource_tracker.unregister(segment._name, "shared_memory")
print(segment.name, flush=True)
os._exit(0)
"""


def test_a_semaphore_that_a_living_process_has_made_stays():
    """Its maker has it mapped under another name, which is deleted."""
    with engine_leftovers.removed():
        semaphore = multiprocessing.get_context("spawn").Semaphore()
    name = semaphore._semlock.name.removeprefix("/")
    assert (engine_leftovers.SHARED / f"sem.{name}").exists()


def test_a_segment_that_is_made_during_the_removal_stays(monkeypatch):
    made = []
    looked = engine_leftovers._used

    def meanwhile():
        used = looked()
        made.append(engine_leftovers.SHARED / f"psm_{os.getpid()}_{time.monotonic_ns()}")
        made[0].touch()
        return used

    monkeypatch.setattr(engine_leftovers, "_used", meanwhile)
    with engine_leftovers.removed():
        pass
    try:
        assert made[0].exists()
    finally:
        made[0].unlink(missing_ok=True)


def test_a_segment_of_a_process_that_was_killed_is_removed():
    with engine_leftovers.removed():
        done = subprocess.run(
            [sys.executable, "-c", LEAVES_ONE], capture_output=True, text=True, check=True
        )
        left = engine_leftovers.SHARED / done.stdout.strip()
        assert left.exists()
    assert not left.exists()


def test_temporary_files_of_engines_here_and_in_processes_are_removed():
    makes = "import os, tempfile; print(tempfile.mkstemp()[1], flush=True); os._exit(0)"
    with engine_leftovers.removed():
        handle, here = tempfile.mkstemp()
        os.close(handle)
        done = subprocess.run(
            [sys.executable, "-c", makes], capture_output=True, text=True, check=True
        )
        left = [Path(here), Path(done.stdout.strip())]
        assert all(path.exists() for path in left)
    assert not any(path.exists() for path in left)
    assert Path(tempfile.gettempdir()).exists()
