"""FSDP2 in processes of its own over Gloo: they publish together, and a process that dies harms nobody."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from syncline import MemoryEngine, Publisher, Ranks, Receiver, ShardedPublisher, open_store
from syncline.errors import ConfigError, PeerLostError, TransportError, TransportTimeoutError
from syncline.sources import fsdp_layout
from syncline.sync.history import History

torch = pytest.importorskip("torch", reason="the ranks are torch processes")

WORLD = 4
STEPS = 3
VICTIM = 2
MESHES = ((4,), (2, 2))


def _module() -> Any:
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Embedding(13, 6), torch.nn.Linear(6, 10), torch.nn.LayerNorm(10)
    )


def _train(module: Any, step: int) -> None:
    """Change every parameter a little, the same way whatever its sharding."""
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.mul_(1 + 0.01 * (step + number))


def _half(module: Any) -> Any:
    return ((name, p.to(torch.bfloat16)) for name, p in module.named_parameters())


def _fsdp(sizes: tuple[int, ...]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module = _module()
    names = ("replicate", "shard")[-len(sizes) :]
    fully_shard(module, mesh=init_device_mesh("cpu", sizes, mesh_dim_names=names))
    return module


def _publish(folder: Path, sizes: tuple[int, ...]) -> None:
    module = _fsdp(sizes)
    layout = fsdp_layout(_half(module))
    publisher = ShardedPublisher(open_store(folder), layout, Ranks.torch(timeout_s=60))
    for step in range(STEPS):
        report = publisher.publish(_half(module))
        assert report.version == step + 1
        _train(module, step)


def _talk(rank: int) -> None:
    """What a channel promises, between processes; each rank checks its side."""
    ranks = Ranks.torch(timeout_s=60)
    large = bytes(range(256)) * 4000
    if rank == 0:
        channel = ranks._channels[1]
        with pytest.raises(TransportTimeoutError):
            channel.receive(0.05)
        for message in (b"", b"short", large, b"last"):
            channel.send(message)
        assert channel.receive(60.0) == large
        channel.close()
        channel.close()
        with pytest.raises(ConfigError):
            channel.send(b"after closing")
    if rank == 1:
        channel = ranks._channels[0]
        assert [channel.receive(60.0) for _ in range(4)] == [b"", b"short", large, b"last"]
        channel.send(large)
        for _ in range(2):
            with pytest.raises(PeerLostError):
                channel.receive(60.0)
        with pytest.raises(PeerLostError):
            channel.send(b"too late")


def _die(rank: int, folder: Path) -> None:
    """One rank ends in the middle: its changes are sent, its part is not written."""
    import torch.distributed as dist

    module = _fsdp((WORLD,))
    layout = fsdp_layout(_half(module))
    ranks = Ranks.torch(timeout_s=60)
    publisher = ShardedPublisher(open_store(folder / "died"), layout, ranks)
    publisher.publish(_half(module))
    _train(module, 0)
    dist.barrier()
    ranks.timeout_s = 4
    if rank == VICTIM:
        publisher._writer = lambda phases: os._exit(0)
    try:
        publisher.publish(_half(module))
    except TransportError as error:
        (folder / f"error{rank}").write_text(str(error))
    # The process with the ranks' store ends last, so that the others hear its answer.
    others = set(range(WORLD)) - {VICTIM}
    while rank == 0 and not all((folder / f"error{other}").exists() for other in others):
        time.sleep(0.05)
    os._exit(0)


def _all_of_it(rank: int, port: int, where: str) -> None:
    import torch.distributed as dist

    address, folder = f"tcp://127.0.0.1:{port}", Path(where)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=WORLD)
    _talk(rank)
    for sizes in MESHES:
        _publish(folder / str(len(sizes)), sizes)
    _die(rank, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores that the processes wrote; they import torch once for all tests, which takes them longest."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(_all_of_it, (port, str(folder)), nprocs=WORLD)
    return folder


@pytest.mark.parametrize("sizes", MESHES)
def test_fsdp_ranks_publish_what_one_process_would(
    folder: Path, tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    ours, theirs = open_store(folder / str(len(sizes))), open_store(tmp_path / "single")
    single, module = Publisher(theirs), _module()
    for step in range(STEPS):
        single.publish(_half(module))
        _train(module, step)
    for version in range(1, STEPS + 1):
        engines = MemoryEngine(), MemoryEngine()
        for store, engine in zip((ours, theirs), engines, strict=True):
            Receiver(store, engine, verify="full").sync(version)
        mine, other = (History.open(s).find(version).manifest for s in (ours, theirs))
        assert mine.fingerprint == other.fingerprint
        assert [(e.meta, e.fingerprint, e.changed) for e in mine.tensors] == [
            (e.meta, e.fingerprint, e.changed) for e in other.tensors
        ]
        for name in engines[1].tensors():
            np.testing.assert_array_equal(engines[0].view(name), engines[1].view(name))


def test_a_process_that_dies_is_named_and_the_old_version_served(folder: Path) -> None:
    for rank in set(range(WORLD)) - {VICTIM}:
        text = (folder / f"error{rank}").read_text()
        assert f"rank {VICTIM} did not send its result to rank 0" in text
    engine, store = MemoryEngine(), open_store(folder / "died")
    assert Receiver(store, engine, verify="full").sync().version == 1
    assert {info.key.split("/")[0] for info in store.list("weight_v")} == {"weight_v000001"}
