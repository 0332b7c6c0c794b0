"""A run over Ceph's RADOS gateway, where Debian's packages of it are installed."""

from __future__ import annotations

import boto3
import numpy as np
import pytest

from ceph_gateway import CephGateway, is_installed
from s3_server import KEYS, s3_service
from syncline import MemoryEngine, Publisher, Receiver
from syncline.errors import ObjectExistsError, VersionConflictError
from syncline.stores import ObjectStore

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not is_installed(), reason="apt-get install radosgw ceph-mon ceph-osd ceph-common"
    ),
]


def test_a_run_over_the_rados_gateway() -> None:
    with CephGateway() as gateway:
        client = boto3.client(
            "s3",
            endpoint_url=gateway.url,
            region_name="us-east-1",
            aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
        )
        client.create_bucket(Bucket="bucket")
        client.close()
        store = ObjectStore(s3_service(gateway.url, "run"), one_request_bytes=1 << 20)
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
        newer = Publisher(ObjectStore(s3_service(gateway.url, "run")))
        with pytest.raises(VersionConflictError, match="another publisher"):
            publisher.publish(weights)
        assert newer.publish(weights).version == 3
