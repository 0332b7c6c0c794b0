from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import syncline
from syncline.abc import WeightSource
from syncline.codecs import NAMES
from syncline.sync.slices import BATCH_BYTES
from syncline.types import WINDOW_UNITS, Bits, TensorMeta

SHAPES = {
    "embed": (3, WINDOW_UNITS),
    "tail": (WINDOW_UNITS + 5,),
    "empty": (0, 4),
    **{f"small.{index}": (64, 33) for index in range(30)},
}


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}


def step(arrays: dict[str, np.ndarray], seed: int) -> None:
    rng = np.random.default_rng(seed)
    for array in arrays.values():
        flat = array.reshape(-1).view(np.uint32)
        if flat.size:
            flat[rng.integers(0, flat.size, 1 + flat.size // 200)] += 1


def published(monkeypatch: pytest.MonkeyPatch, threads: int, **options: object) -> dict[str, bytes]:
    monkeypatch.setenv("SYNCLINE_THREADS", str(threads))
    store = syncline.MemoryStore()
    publisher = syncline.Publisher(store, part_bytes=20 << 20, **options)
    arrays = weights()
    publisher.publish(arrays)
    step(arrays, 1)
    publisher.publish(arrays)
    engine = syncline.MemoryEngine()
    receiver = syncline.Receiver(store, engine)
    receiver.sync(1)
    receiver.sync()
    for name, array in arrays.items():
        assert np.array_equal(engine.view(name), array.reshape(-1).view(np.uint32))
    return {
        info.key: store.get(info.key) for info in store.list() if info.key.endswith(".safetensors")
    }


@pytest.mark.parametrize("encoding", ["auto", *NAMES])
def test_parts_do_not_depend_on_the_number_of_threads(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_encoding = "planes" if encoding == "packed" else "full"
    one = published(monkeypatch, 1, encoding=encoding, full_encoding=full_encoding)
    three = published(monkeypatch, 3, encoding=encoding, full_encoding=full_encoding)
    assert len(one) > 4
    assert one == three


class OneBuffer(WeightSource):
    """Yields every tensor in the same memory, which it overwrites for the next one."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self._arrays = arrays

    def tensors(self) -> Iterator[tuple[TensorMeta, Bits]]:
        buffer = np.empty(max(array.size for array in self._arrays.values()), np.uint32)
        for name, array in self._arrays.items():
            bits = buffer[: array.size]
            bits[:] = array.reshape(-1).view(np.uint32)
            yield TensorMeta(name, "F32", array.shape), bits
            buffer[:] = 0xDEADBEEF


@pytest.mark.parametrize("wrap", [OneBuffer, lambda arrays: iter(reused(arrays))])
def test_a_source_may_reuse_its_buffer(wrap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCLINE_THREADS", "4")
    store, engine = syncline.MemoryStore(), syncline.MemoryEngine()
    publisher = syncline.Publisher(store)
    arrays = weights()
    publisher.publish(wrap(arrays))
    step(arrays, 1)
    publisher.publish(wrap(arrays))
    step(arrays, 2)
    publisher.publish(wrap(arrays), full=True)
    syncline.Receiver(store, engine, verify="full").sync()
    for name, array in arrays.items():
        assert np.array_equal(engine.view(name), array.reshape(-1).view(np.uint32))


def reused(arrays: dict[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    buffer = np.empty(max(array.size for array in arrays.values()), np.float32)
    for name, array in arrays.items():
        flat = buffer[: array.size]
        flat[:] = array.reshape(-1)
        yield name, flat.reshape(array.shape)
        buffer[:] = np.nan


def test_the_trace_shows_work_on_several_threads_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SYNCLINE_THREADS", "2")
    trace = syncline.Trace()
    store = syncline.MemoryStore()
    publisher = syncline.Publisher(store, part_bytes=BATCH_BYTES, trace=trace)
    arrays = weights()
    publisher.publish(arrays)
    step(arrays, 1)
    publisher.publish(arrays)
    engine = syncline.MemoryEngine()
    syncline.Receiver(store, engine, trace=trace).sync(1)
    syncline.Receiver(store, engine, trace=trace).sync(2)
    trace.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert len(names) >= 3
    assert {"diff", "encode", "put", "fetch", "decode", "apply"} <= {span["name"] for span in spans}
    encoding = {span["tid"] for span in spans if span["name"] == "encode"}
    putting = {span["tid"] for span in spans if span["name"] == "put"}
    assert putting - encoding
    assert all(span["dur"] >= 0 and span["ts"] >= 0 for span in spans)
