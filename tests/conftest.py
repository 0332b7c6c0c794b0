"""Shared by every test: Hypothesis profiles and weights of every dtype."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

import leftovers
from ceph_gateway import CephGateway, is_installed
from faulty_proxy import FaultyProxy
from s3_server import S3Server
from syncline import arrays
from syncline.types import DTYPE_BITS, TensorMeta, unsigned


def pytest_configure(config: pytest.Config) -> None:
    """Let Triton interpret the GPU kernels on the host, unless the tests that need a GPU are asked for."""
    if config.option.markexpr != "gpu":
        os.environ["TRITON_INTERPRET"] = "1"


settings.register_profile(
    "ci",
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.register_profile("long", parent=settings.get_profile("ci"), max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(autouse=True, scope="module")
def nothing_left() -> Iterator[None]:
    """Fail a test file that leaves a thread, port, shared memory or temporary file of ours behind."""
    with leftovers.none():
        yield


@pytest.fixture
def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every torch tensor for one on a GPU; Triton's interpreter, which runs it, knows one thread."""
    if sys.platform != "linux":
        pytest.skip("Triton is made for Linux alone")
    monkeypatch.setattr(arrays, "is_on_gpu", arrays.is_torch_tensor)
    monkeypatch.setenv("SYNCLINE_THREADS", "1")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20260701)


@pytest.fixture
def every_dtype(rng: np.random.Generator) -> dict[str, tuple[TensorMeta, np.ndarray]]:
    """One tensor of each dtype with random bits (NaN payloads and -0.0 among them), 0-d and empty."""
    out = {}
    for number, dtype in enumerate(sorted(DTYPE_BITS)):
        for shape in ((6, 8), (0, 4)):
            meta = TensorMeta(f"layer.{number}.{dtype}.{len(shape)}.{shape[0]}", dtype, shape)
            out[meta.name] = (meta, random_bits(meta, rng))
        if DTYPE_BITS[dtype] >= 8:
            meta = TensorMeta(f"scalar.{dtype}", dtype, ())
            out[meta.name] = (meta, random_bits(meta, rng))
    return out


def random_bits(meta: TensorMeta, rng: np.random.Generator) -> np.ndarray:
    raw = rng.integers(0, 256, meta.nbytes, np.uint8)
    return raw.view(unsigned(meta.unit_bytes)).copy()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """A server of S3 in a process of its own, with a bucket called `bucket`."""
    with S3Server() as server:
        server.make_bucket("bucket")
        yield server


@pytest.fixture(scope="session")
def ceph_gateway() -> Iterator[CephGateway]:
    """Ceph's RADOS gateway, where it is installed, with a bucket called `bucket`."""
    if not is_installed():
        pytest.skip("apt-get install radosgw ceph-mon ceph-osd ceph-common")
    with CephGateway() as gateway:
        gateway.make_bucket("bucket")
        yield gateway


@pytest.fixture
def s3_prefix() -> str:
    """A part of the bucket that no other test uses."""
    return f"run-{secrets.token_hex(6)}"


@pytest.fixture
def faulty_proxy(s3_server: S3Server) -> Iterator[FaultyProxy]:
    """A proxy before that server which breaks what it is told to."""
    with FaultyProxy(s3_server.url) as proxy:
        yield proxy
