"""DTensor and FSDP2 over Gloo processes as an oracle: what torch puts where is what our blocks say."""

from __future__ import annotations

import socket
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from syncline.layouts import check, gather, plain, scatter
from syncline.layouts.sharded import (
    Shard,
    Sharding,
    dtensor_layout,
    dtensor_sharding,
    flat_layout,
)
from syncline.types import TensorMeta

torch = pytest.importorskip("torch", reason="the oracle is torch itself")

WORLD = 4
SHAPES = {"rows": (10, 6), "few": (3, 5), "odd": (7, 9, 2), "vector": (13,), "even": (8, 4)}


def _meta(name: str) -> TensorMeta:
    return TensorMeta(name, "I32", SHAPES[name])


def _values(name: str) -> np.ndarray:
    return np.arange(prod(SHAPES[name]), dtype=np.int32).reshape(SHAPES[name]) + 1


def _placements(tensor_name: str) -> list[tuple[tuple[int, ...], list[Any]]]:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor import Shard as Cut
    from torch.distributed.tensor.placement_types import _StridedShard

    last = len(SHAPES[tensor_name]) - 1
    found: list[tuple[tuple[int, ...], list[Any]]] = [
        ((4,), [Cut(0)]),
        ((4,), [Cut(last)]),
        ((2, 2), [Replicate(), Cut(0)]),
        ((2, 2), [Cut(0), Cut(last)]),
        ((2, 2), [Cut(0), Cut(0)]),
        ((2, 2), [Replicate(), Replicate()]),
    ]
    if tensor_name == "even":
        found.append(((2, 2), [_StridedShard(0, split_factor=2), Cut(0)]))
    return found


def _distribute(rank: int, port: int, folder: str) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD
    )
    saved: dict[str, np.ndarray] = {}
    for name in SHAPES:
        for number, (sizes, placements) in enumerate(_placements(name)):
            mesh = init_device_mesh("cpu", sizes)
            tensor = distribute_tensor(torch.from_numpy(_values(name)), mesh, placements)
            saved[f"{name}.{number}"] = tensor.to_local().numpy()
            sharding = dtensor_sharding(tensor)
            assert sharding.mesh == sizes
            saved[f"{name}.{number}.axes"] = np.array(
                [
                    [-1, 0] if axis is None else [axis.dim, axis.split_factor]
                    for axis in sharding.axes
                ]
            )
    linear = torch.nn.Linear(6, 10)
    with torch.no_grad():
        linear.weight.copy_(torch.from_numpy(_values("rows")))
    sharded = fully_shard(linear, mesh=init_device_mesh("cpu", (WORLD,)))
    saved["fsdp2"] = sharded.weight.to_local().detach().numpy().astype(np.int32)
    modules = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(2, 7))
    with torch.no_grad():
        for number, parameter in enumerate(modules.parameters()):
            flat = torch.arange(parameter.numel(), dtype=torch.float32) + 100 * (number + 1)
            parameter.copy_(flat.reshape(parameter.shape))
    wrapped = Fsdp1(modules, device_id=torch.device("cpu"))
    (flat_parameter,) = list(wrapped.parameters())
    saved["fsdp1"] = flat_parameter.detach().numpy().astype(np.int32)
    np.savez(Path(folder) / f"{rank}.npz", **saved)
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, np.ndarray]]:
    folder = tmp_path_factory.mktemp("mesh")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_distribute, (port, str(folder)), nprocs=WORLD)
    return [dict(np.load(folder / f"{rank}.npz")) for rank in range(WORLD)]


@pytest.mark.parametrize("name", SHAPES)
def test_blocks_say_what_dtensor_does(name: str, saved: list[dict[str, np.ndarray]]) -> None:
    meta, bits = _meta(name), _values(name).ravel().view(np.uint32)
    for number, (sizes, _) in enumerate(_placements(name)):
        axes = tuple(
            None if dim < 0 else Shard(int(dim), int(split))
            for dim, split in saved[0][f"{name}.{number}.axes"]
        )
        layout = dtensor_layout([meta], {name: Sharding(sizes, axes)})
        check(layout)
        shards = {
            rank: {name: np.ascontiguousarray(arrays[f"{name}.{number}"]).ravel().view(np.uint32)}
            for rank, arrays in enumerate(saved)
        }
        for placement in layout.placements:
            assert placement.tensors[0].shape == saved[placement.rank][f"{name}.{number}"].shape
        ((_, found),) = gather(layout, shards)
        np.testing.assert_array_equal(found, bits)
        blank = {rank: {name: np.zeros_like(shard[name])} for rank, shard in shards.items()}
        scatter(layout, [(meta, bits)], blank)
        for rank, shard in shards.items():
            np.testing.assert_array_equal(blank[rank][name], shard[name])


def test_blocks_say_what_fsdp2_does(saved: list[dict[str, np.ndarray]]) -> None:
    meta = _meta("rows")
    layout = dtensor_layout([meta], {"rows": Sharding((WORLD,), (Shard(0),))})
    shapes = [placement.tensors[0].shape for placement in layout.placements]
    assert shapes == [(3, 6), (3, 6), (3, 6), (1, 6)] == [a["fsdp2"].shape for a in saved]
    shards = {rank: {"rows": a["fsdp2"].ravel().view(np.uint32)} for rank, a in enumerate(saved)}
    ((_, found),) = gather(layout, shards)
    np.testing.assert_array_equal(found, _values("rows").ravel().view(np.uint32))


def test_blocks_say_what_fsdp1_does(saved: list[dict[str, np.ndarray]]) -> None:
    shapes = {"a.weight": (3, 5), "a.bias": (3,), "b.weight": (7, 2), "b.bias": (7,)}
    metas = [TensorMeta(name, "I32", shape) for name, shape in shapes.items()]
    layout = flat_layout({"flat": metas}, WORLD)
    check(layout)
    shards = {rank: {"flat": a["fsdp1"].view(np.uint32)} for rank, a in enumerate(saved)}
    assert {shard["flat"].shape for shard in shards.values()} == {
        (10,)
    }  # 39 elements and one of padding
    for number, (meta, bits) in enumerate(gather(layout, shards)):
        np.testing.assert_array_equal(bits, np.arange(meta.count) + 100 * (number + 1))


def test_a_parameter_of_its_own_is_a_zero3_partition() -> None:
    metas = [_meta(name) for name in SHAPES]
    layout = flat_layout({meta.name: [meta] for meta in metas}, WORLD)
    check(layout)
    values = [(meta, _values(meta.name).ravel().view(np.uint32)) for meta in metas]
    shards = {
        placement.rank: {t.name: np.zeros(t.shape, np.uint32) for t in placement.tensors}
        for placement in layout.placements
    }
    scatter(layout, values, shards)
    for rank, shard in shards.items():
        for meta, bits in values:
            each = -(-bits.size // WORLD)
            part = bits[rank * each : (rank + 1) * each]
            np.testing.assert_array_equal(shard[meta.name], np.pad(part, (0, each - part.size)))
    assert plain(metas[0]) == layout.catalog["rows"]
