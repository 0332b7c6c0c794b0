"""What Syncline leaves in a process when all of it has been closed: nothing, and this looks whether that is so.

Looked at where Linux shows it: threads and sockets that are ours, shared memory without a name that is open or
mapped, segments with our mark, and temporary files with our name.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hosting import ports_of

GRACE_S = 10.0
"""For threads that have been told to end; nothing waits that long where they do."""
OPEN_WHILE_THEY_LIVE = ("mooncake", "nixl", "nixl_cu12")
"""Libraries whose ports are open until their process ends."""
_PROC, _SHARED = Path("/proc/self"), Path("/dev/shm")


@contextmanager
def none() -> Iterator[None]:
    """Fail if anything of ours is there at the end that was not there at the beginning."""
    before = found()
    yield
    deadline_s = time.monotonic() + GRACE_S
    while left := found() - before:
        if time.monotonic() > deadline_s:
            raise AssertionError(f"left behind: {', '.join(sorted(left))}")
        gc.collect()
        time.sleep(0.02)


def found() -> set[str]:
    """Return what of ours is there now, each in a few words."""
    if not _PROC.is_dir():
        return set()
    return {*_threads(), *_ports(), *_memory(), *_files()}


def _threads() -> Iterator[str]:
    pool = f"syncline-{os.getpid()}"  # the one pool, which is there for good
    for thread in threading.enumerate():
        if thread.name.startswith("syncline-") and not thread.name.startswith(pool):
            yield f"thread {thread.name} ({thread.ident})"


def _ports() -> Iterator[str]:
    if not any(name in sys.modules for name in OPEN_WHILE_THEY_LIVE):
        yield from (f"port {address}" for address in ports_of(os.getpid()))


def _memory() -> Iterator[str]:
    for link in (_PROC / "fd").iterdir():
        with suppress(OSError):
            if "memfd:syncline" in (target := str(link.readlink())):
                yield f"descriptor {link.name} of {target}"
    for line in (_PROC / "maps").read_text().splitlines():
        if "memfd:syncline" in line:
            yield f"map {line.split()[0]} of memfd:syncline"


def _files() -> Iterator[str]:
    yield from (f"file {path}" for path in list(_made) if path.exists())
    for path in _SHARED.iterdir():
        if "syncline" in path.name or f"_{os.getpid()}_" in path.name:
            yield f"file {path}"


_made: set[Path] = set()


def _note(event: str, arguments: tuple[object, ...]) -> None:
    """Note which temporary files and directories of ours this process makes; others share the place."""
    if event in ("tempfile.mkdtemp", "tempfile.mkstemp"):
        path = Path(os.fsdecode(str(arguments[0])))
        if path.name.startswith("syncline-"):
            _made.add(path)


sys.addaudithook(_note)
