"""Whatever writes weights, whenever they are published: the hook finds what a snapshot finds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline import MemoryEngine, MemoryStore, Publisher, Receiver, watch
from syncline.abc import Buffer
from syncline.errors import StoreError

torch = pytest.importorskip("torch")

DTYPES = ["bfloat16", "float32", "bool", "float8_e4m3fn"]
SHAPES = [(), (0, 3), (33, 5)]


class FailingStore(MemoryStore):
    """Refuses puts while `is_down`."""

    is_down = False

    def put(self, key: str, chunks: Any) -> None:
        if self.is_down:
            raise StoreError("the disk is full")
        super().put(key, chunks)


def integers(tensor: Any) -> Any:
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.view(width)


def flip(tensor: Any, rng: np.random.Generator, share: float) -> None:
    """Change the bits of about this share of the elements, NaN and -0.0 included."""
    bits = integers(tensor)
    mask = torch.from_numpy(np.array(rng.random(tuple(tensor.shape)) < share))
    change = torch.from_numpy(np.array(rng.integers(0, 256, tuple(tensor.shape)))).to(bits.dtype)
    bits.copy_(torch.where(mask, bits ^ change, bits))


def swap_back(tensor: Any, kept: Any) -> None:
    integers(tensor).copy_(integers(kept))


@pytest.mark.parametrize("compare", ["operations", "step"])
@pytest.mark.parametrize("encoding", ["auto", "overwrite"])
@given(
    program=st.lists(
        st.sampled_from(["write", "write", "back", "publish", "fail", "full"]), max_size=12
    ),
    bucket_bytes=st.sampled_from([1, 100, 1 << 20]),
    check=st.sampled_from(["full", "sampled"]),
    seed=st.integers(0, 1000),
)
def test_the_same_bytes_as_a_snapshot(
    compare: str, encoding: str, program: list[str], bucket_bytes: int, check: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    tensors = {
        f"{dtype}.{i}": torch.zeros(shape, dtype=getattr(torch, dtype))
        for dtype in DTYPES
        for i, shape in enumerate(SHAPES)
    }
    tensors["strided"] = torch.zeros(8, 6, dtype=torch.bfloat16).T
    tensors["tied"] = tensors["bfloat16.2"]
    weights = watch([], tensors, compare=compare, bucket_bytes=bucket_bytes, check=check)
    ours, theirs = FailingStore(), MemoryStore()
    hook = Publisher(ours, encoding=encoding, anchor_every=3)
    snapshot = Publisher(theirs, encoding=encoding, anchor_every=3)
    base = {name: tensor.clone() for name, tensor in tensors.items()}
    for act in ["publish", *program, "publish"]:
        if act in ("write", "back"):
            with weights.writing():
                for name, tensor in tensors.items():
                    if act == "back":
                        swap_back(tensor, base[name])
                    elif rng.random() < 0.7:
                        flip(tensor, rng, rng.choice([0.02, 0.9]))
        elif act == "fail":
            ours.is_down = True
            with pytest.raises(StoreError):
                hook.publish(weights, full=bool(rng.random() < 0.2))
            ours.is_down = False
        else:
            report = hook.publish(weights, full=act == "full")
            other = snapshot.publish(tensors, full=act == "full")
            assert report.changed == other.changed
            assert payloads(ours, report.version) == payloads(theirs, other.version)
            base = {name: tensor.clone() for name, tensor in tensors.items()}
    engine = MemoryEngine()
    Receiver(ours, engine, verify="full").sync()
    for name, tensor in tensors.items():
        expected = integers(tensor).flatten().numpy().view(engine.view(name).dtype)
        np.testing.assert_array_equal(engine.view(name), expected)


def payloads(store: MemoryStore, version: int) -> dict[str, Buffer]:
    prefix = f"weight_v{version:06d}/"
    return {
        info.key: store.get(info.key)
        for info in store.list(prefix)
        if info.key.endswith(".safetensors")
    }
