"""Every live path there is, made for a test and taken down after it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from syncline.abc import Inlet, Outlet
from syncline.channels import (
    CollectiveInlet,
    CollectiveOutlet,
    MemoryInlet,
    MemoryOutlet,
    SharedMemoryInlet,
    SharedMemoryOutlet,
)

PATHS = ("memory", "shared-memory", *(("collective",) if find_spec("torch") else ()))
WAIT_S = 20.0

MakeInlet = Callable[[str], Inlet]


@contextmanager
def live_path(kind: str, timeout_s: float = WAIT_S) -> Iterator[tuple[Outlet, MakeInlet]]:
    """Yield an outlet, and what makes an inlet with a name."""
    inlets: list[Inlet] = []
    # The path of a Unix socket is short, the test's own directory may not be.
    folder = Path(tempfile.mkdtemp(prefix="live-"))
    outlet: Outlet
    if kind == "memory":
        outlet = MemoryOutlet()
    elif kind == "shared-memory":
        outlet = SharedMemoryOutlet(str(folder / "path"))
    else:
        outlet = CollectiveOutlet("127.0.0.1:0")

    def made(name: str) -> Inlet:
        inlet: Inlet
        if isinstance(outlet, MemoryOutlet):
            inlet = MemoryInlet(outlet, name=name, timeout_s=timeout_s)
        elif isinstance(outlet, CollectiveOutlet):
            inlet = CollectiveInlet(outlet.address, name=name, timeout_s=timeout_s)
        else:
            inlet = SharedMemoryInlet(str(folder / "path"), name=name, timeout_s=timeout_s)
        inlets.append(inlet)
        return inlet

    try:
        yield outlet, made
    finally:
        for inlet in inlets:
            inlet.close()
        outlet.close()
        with suppress(FileNotFoundError):
            assert not list(folder.iterdir())
        shutil.rmtree(folder)
