"""The live paths whose buckets lie in GPU memory. None of this has run: no GPU was there to run it on."""

from __future__ import annotations

import multiprocessing
import tempfile
from pathlib import Path

import numpy as np
import pytest

from syncline import MemoryEngine, MemoryStore, Publisher, Receiver
from syncline.abc import Inlet, Outlet
from syncline.channels import (
    CollectiveInlet,
    CollectiveOutlet,
    SharedMemoryInlet,
    SharedMemoryOutlet,
)
from syncline.channels.cuda_ipc import CudaView
from syncline.errors import FormatError, TransportUnavailableError

WAIT_S = 120.0
VERSIONS = 3


def _weights(version: int) -> dict[str, np.ndarray]:
    made = {"w": np.random.default_rng(1).integers(0, 1 << 16, (300, 500), np.uint16)}
    made["w"][::7] += version
    return made


def _engine(transport: str, where: str, failed: str) -> None:
    inlet: Inlet = (
        SharedMemoryInlet(where, name="engine", timeout_s=WAIT_S)
        if transport == "cuda"
        else CollectiveInlet(where, name="engine", timeout_s=WAIT_S)
    )
    engine = MemoryEngine()
    receiver = Receiver(inlet, engine, verify="full")
    for version in range(1, VERSIONS + 1):
        receiver.sync()
        if not np.array_equal(engine.view("w"), _weights(version)["w"].reshape(-1)):
            Path(failed).write_text(f"version {version} has other bits")
    inlet.close()


@pytest.mark.gpu
@pytest.mark.parametrize("transport", ["cuda", "nccl"])
def test_versions_arrive_through_gpu_memory(transport):
    with tempfile.TemporaryDirectory(prefix="live-") as folder:
        failed = f"{folder}/failed"
        outlet: Outlet
        if transport == "cuda":
            where = f"{folder}/path"
            outlet = SharedMemoryOutlet(where, device=0)
        else:
            outlet = CollectiveOutlet("127.0.0.1:0", backend="nccl")
            where = outlet.address
        publisher = Publisher(MemoryStore(), live=outlet, bucket_bytes=65536, live_timeout_s=WAIT_S)
        engine = multiprocessing.get_context("spawn").Process(
            target=_engine, args=(transport, where, failed)
        )
        engine.start()
        try:
            outlet.wait(1, WAIT_S)
            for version in range(1, VERSIONS + 1):
                publisher.publish(_weights(version)).delivery.require()
        finally:
            outlet.close()
            engine.join(WAIT_S)
            engine.kill()
        assert engine.exitcode == 0
        assert not Path(failed).exists()


def test_a_handle_is_64_plain_bytes():
    for handle in ("", "0" * 127, "g" * 128, "80" * 63):
        with pytest.raises(FormatError, match="128 digits"):
            CudaView(handle, 4096)


def test_without_a_gpu_it_is_said():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(TransportUnavailableError, match="needs a GPU"):
        CudaView("00" * 64, 4096)
    with pytest.raises(TransportUnavailableError, match="nccl|GPU"):
        CollectiveOutlet("127.0.0.1:0", backend="nccl")
