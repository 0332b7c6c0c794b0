"""A run over Ceph's RADOS gateway, where Debian's packages of it are installed."""

from __future__ import annotations

import numpy as np
import pytest

from ceph_gateway import CephGateway
from s3_server import s3_service
from syncline import MemoryEngine, Publisher, Receiver
from syncline.errors import ObjectExistsError, VersionConflictError
from syncline.stores import ObjectStore

pytestmark = pytest.mark.slow


def test_a_run_over_the_rados_gateway(ceph_gateway: CephGateway, s3_prefix: str) -> None:
    store = ObjectStore(s3_service(ceph_gateway.url, s3_prefix), one_request_bytes=1 << 20)
    assert not store.has_conditions  # of 16.2; the lease stands in
    weights = {"a": np.random.default_rng(1).standard_normal(2 << 20).astype(np.float32)}
    publisher, engine = Publisher(store), MemoryEngine()
    publisher.publish(weights)
    Receiver(store, engine).sync()
    weights["a"][::100] += 1
    publisher.publish(weights)
    assert Receiver(store, engine).sync().version == 2
    assert np.array_equal(engine.view("a").view(np.float32), weights["a"])
    with pytest.raises(ObjectExistsError):
        store.put("HEAD.json", [b"x"])
    newer = Publisher(ObjectStore(s3_service(ceph_gateway.url, s3_prefix)))
    with pytest.raises(VersionConflictError, match="another publisher"):
        publisher.publish(weights)
    assert newer.publish(weights).version == 3
