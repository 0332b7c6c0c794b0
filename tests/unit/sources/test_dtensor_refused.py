"""A plain publisher that is handed a shard says who takes shards."""

from __future__ import annotations

import pytest

import syncline
from syncline.errors import LayoutError

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed.tensor")


def test_a_dtensor_names_the_publisher_that_takes_it() -> None:
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        shard = dist.tensor.distribute_tensor(torch.zeros(4), mesh, [dist.tensor.Shard(0)])
        with pytest.raises(LayoutError, match=r"'w' is a DTensor.*ShardedPublisher on every rank"):
            syncline.Publisher(syncline.MemoryStore()).publish({"w": shard})
    finally:
        dist.destroy_process_group()
