"""checkpoint-engine 0.4.2 under a CPU stub with Gloo: its own server and its own engine's side, where there is no GPU.

Nothing of its source is changed. What it asks a device for is answered here, memory is not pinned, and the buffer that it
shares with an engine is a mapped file in place of a CUDA handle. Run in the environment of `make last-hop-env`:

    cpu_stub.py serve ...                      as `python -m checkpoint_engine ...`
    cpu_stub.py engine SOCKET FOLDER RANK...   as a vLLM with a worker for each rank, which notes what it was given

Both end when their standard input does.
"""

from __future__ import annotations

import http.server
import json
import os
import runpy
import socketserver
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import zmq
from checkpoint_engine import ps
from checkpoint_engine.device_utils import DeviceManager
from checkpoint_engine.worker import update_weights_from_ipc
from safetensors.torch import save_file

JOB = os.environ["STUB_JOB"]
"""Tells the devices of one job from those of another, as the names of sockets are made of them."""
MEMORY_BYTES = 1 << 28
REFUSES = "refuses"
"""A file of this name in the folder of an engine lets its workers refuse what they are given."""


def device(rank: int) -> str:
    return f"{JOB}-{rank}"


def nothing(*_: object) -> None:
    """Stand for what only a device has to do."""


DEVICES = SimpleNamespace(
    device_count=lambda: int(os.environ.get("WORLD_SIZE", "1")),
    get_device_properties=lambda rank: SimpleNamespace(uuid=device(rank)),
    mem_get_info=lambda: (MEMORY_BYTES, MEMORY_BYTES),
    memory_allocated=lambda: 0,
    memory_reserved=lambda: 0,
    set_device=nothing,
    synchronize=nothing,
    empty_cache=nothing,
    ipc_collect=nothing,
)


def map_file(path: str, size: int, *_: object) -> torch.Tensor:
    """Return the buffer of the other side, and take its file away. Argument 6 is what they set to a device."""
    mapped = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    Path(path).unlink()
    return mapped


def share(buffer: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
    """Move a buffer into a file, and return how another process maps it."""
    descriptor, path = tempfile.mkstemp(dir=os.environ["STUB_FOLDER"])
    os.close(descriptor)
    size = buffer.numel()
    buffer.set_(torch.from_file(path, shared=True, size=size, dtype=torch.uint8))
    return map_file, (path, size, None, None, None, None, None)


def unpinned(empty: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*sizes: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return empty(*sizes, **options)

    return made


def stub() -> None:
    DeviceManager._detect_device_type = lambda self: "cpu"
    DeviceManager._setup_device_module = lambda self: setattr(self, "device_module", DEVICES)
    DeviceManager.backend = "gloo"
    DeviceManager.transfer_engine_protocol = "tcp"
    DeviceManager.rdma_device = lambda self, rank: ""
    ps.reduce_tensor = share
    torch.empty = unpinned(torch.empty)


class Engine(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True

    def __init__(self, path: str, folder: Path, ranks: list[int]) -> None:
        self.folder, self.ranks = folder, ranks
        self.context = zmq.Context()
        super().__init__(path, Asked)

    def update(self, handles: dict[str, str]) -> None:
        with ThreadPoolExecutor(len(self.ranks)) as workers:
            list(
                workers.map(
                    lambda rank: self.work(rank, handles[f"GPU-{device(rank)}"]), self.ranks
                )
            )

    def work(self, rank: int, handle: str) -> None:
        came: dict[str, torch.Tensor] = {}

        def load(weights: list[tuple[str, torch.Tensor]]) -> None:
            if (self.folder / REFUSES).exists():
                raise RuntimeError(f"the worker of rank {rank} refuses on purpose")
            for name, tensor in weights:
                if name in came:
                    raise RuntimeError(f"{name} came twice")
                came[name] = tensor.clone()

        def note() -> None:
            save_file(came, self.folder / f"{rank}.part")
            (self.folder / f"{rank}.part").rename(self.folder / f"{rank}.safetensors")

        update_weights_from_ipc(self.context, handle, rank, run=load, post_hook=note)


class Asked(http.server.BaseHTTPRequestHandler):
    server: Engine

    def address_string(self) -> str:
        return "unix"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            self.server.update(*body["args"])
            status = 200
        except RuntimeError as error:  # what the server sends to the workers when one has failed
            self.log_error("%s", error)
            status = 500
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()


def end_with_input() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    # The functions that travel by name are those of the module, which has another name while it is the program.
    sys.path.insert(0, str(Path(__file__).parent))
    import cpu_stub

    cpu_stub.stub()
    threading.Thread(target=end_with_input, daemon=True).start()
    what, *rest = sys.argv[1:]
    if what == "engine":
        path, folder, *ranks = rest
        cpu_stub.Engine(path, Path(folder), [int(rank) for rank in ranks]).serve_forever()
    else:
        sys.argv[1:] = rest
        runpy.run_module("checkpoint_engine", run_name="__main__", alter_sys=True)
