"""What engines that were killed leave on the machine: removed once the tests that killed them have ended."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SHARED = Path("/dev/shm")
BEGINNINGS = ("psm_", "sem.mp-", "sgl_shm_", "sglang_loads_", "vllm_dist_")


@contextmanager
def removed() -> Iterator[None]:
    """Remove, at the end, segments that were made meanwhile and that no process has any more, and vLLM's sockets."""
    before = _segments()
    with tempfile.TemporaryDirectory(prefix="vllm-") as sockets:
        os.environ["VLLM_RPC_BASE_PATH"] = sockets
        try:
            yield
        finally:
            del os.environ["VLLM_RPC_BASE_PATH"]
    # In this order: what is made from here on is somebody else's.
    made = _segments() - before
    used = _used()
    for path in (SHARED / name for name in made):
        with suppress(FileNotFoundError):
            if path.stat().st_ino not in used:
                path.unlink()


def commands() -> list[bytes]:
    """Return the command lines of all other processes."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if int(process.name) != os.getpid():
                found.append((process / "cmdline").read_bytes())
    return found


def _segments() -> set[str]:
    return {path.name for path in SHARED.iterdir() if path.name.startswith(BEGINNINGS)}


def _used() -> set[int]:
    """Return the inodes of what any process has mapped or open; under which name may have changed since."""
    found: set[int] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            lines = (process / "maps").read_text().splitlines()
            found |= {int(line.split()[4]) for line in lines if str(SHARED) in line}
            for link in (process / "fd").iterdir():
                with suppress(OSError):
                    if str(SHARED) in str(link.readlink()):
                        found.add(link.stat().st_ino)
    return found
