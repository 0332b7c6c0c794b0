"""What engines leave on the machine, above all killed ones: removed once their tests have ended."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

SHARED = Path("/dev/shm")
BEGINNINGS = ("psm_", "sem.mp-", "sgl_shm_", "sglang_loads_", "vllm_dist_")


@contextmanager
def removed() -> Iterator[None]:
    """Remove, at the end, temporary files, and segments that were made meanwhile and that no process has any more.

    Temporary files are those of engines in this process and of processes that it starts: sockets of both
    engines, vLLM's meeting points, compiled code.
    """
    before = _segments()
    with (
        # A short name: a socket's path has at most 107 characters.
        tempfile.TemporaryDirectory(prefix="engines-", ignore_cleanup_errors=True) as folder,
        mock.patch.dict(os.environ, TMPDIR=folder),
        mock.patch.object(tempfile, "tempdir", folder),
    ):
        yield
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
