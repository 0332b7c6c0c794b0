"""Whatever stops a publish or a sync, nothing of it runs on once the error is out."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterable

import numpy as np
import pytest

import syncline
from syncline import threads
from syncline.abc import Buffer
from syncline.errors import StoreError
from syncline.sync.slices import BATCH_BYTES
from syncline.types import Record, Step
from syncline.version import HeldVersion

TENSORS = 24


@pytest.fixture(autouse=True)
def three_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCLINE_THREADS", "3")


class SlowStore(syncline.MemoryStore):
    """Takes its time with parts, and fails to put one when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.delay_s = 0.0
        self.running = 0
        self.fails = False

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        self.running += 1
        try:
            if key.endswith(".safetensors"):
                time.sleep(self.delay_s)
            return super().get(key, start, stop)
        finally:
            self.running -= 1

    def put(self, key: str, chunks: Iterable[Buffer]) -> None:
        if self.fails and key.endswith(".safetensors"):
            raise StoreError("the disk is full")
        super().put(key, chunks)


class StoppingEngine(syncline.MemoryEngine):
    """Takes one record and raises, when it is told to."""

    stops = False

    def apply(self, records: Iterable[Record], held: HeldVersion) -> None:
        if self.stops:
            next(iter(records))
            raise RuntimeError("the engine")
        super().apply(records, held)


def weights() -> dict[str, np.ndarray]:
    return {f"t{i:02}": np.zeros(BATCH_BYTES // 8, np.float32) for i in range(TENSORS)}


def left_running(store: SlowStore) -> list[str]:
    """Return what runs on, while the error's traceback still holds what it works for."""
    found = [
        one.name for one in threading.enumerate() if "ahead" in one.name or "ground" in one.name
    ]
    return found + ["store"] * store.running


def test_an_engine_that_raises_leaves_no_fetch_running() -> None:
    store, engine = SlowStore(), StoppingEngine()
    publisher = syncline.Publisher(store, part_bytes=BATCH_BYTES)
    arrays = weights()
    publisher.publish(arrays)
    syncline.Receiver(store, engine).sync()
    for array in arrays.values():
        array[::100] += 1
    publisher.publish(arrays)
    store.delay_s, engine.stops = 0.02, True
    with pytest.raises(RuntimeError, match="the engine") as kept:
        syncline.Receiver(store, engine).sync()
    assert left_running(store) == []
    assert kept.tb is not None
    assert engine.held().version == 1


@pytest.mark.parametrize(
    ("at", "is_first"),
    [("pull.part_fetched", True), ("pull.part_fetched", False), ("pull.tensor_decoded", False)],
)
def test_an_observer_that_raises_leaves_no_fetch_running(at: str, is_first: bool) -> None:
    store, engine = SlowStore(), syncline.MemoryEngine()
    publisher = syncline.Publisher(store, part_bytes=BATCH_BYTES)
    arrays = weights()
    publisher.publish(arrays)
    if not is_first:
        syncline.Receiver(store, engine).sync()
        for array in arrays.values():
            array[::100] += 1
        publisher.publish(arrays)

    def observe(step: Step) -> None:
        if step.name == at:
            raise RuntimeError("the observer")

    store.delay_s = 0.02
    with pytest.raises(RuntimeError, match="the observer") as kept:
        syncline.Receiver(store, engine, observe=observe).sync()
    assert left_running(store) == []
    assert kept.tb is not None
    assert (engine.held() is None) is is_first


def test_an_observer_that_raises_leaves_no_comparison_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running = 0
    submitted = threads.in_order

    def counted(jobs: Iterable[threads.Job[object]]) -> object:
        def job(inner: threads.Job[object]) -> object:
            nonlocal running
            running += 1
            try:
                time.sleep(0.02)
                return inner()
            finally:
                running -= 1

        return submitted((lambda inner=inner: job(inner)) for inner in jobs)

    def observe(step: Step) -> None:
        if step.name == "publish.tensor":
            raise RuntimeError("the observer")

    publisher = syncline.Publisher(syncline.MemoryStore(), observe=observe)
    arrays = weights()
    publisher.publish(arrays)
    monkeypatch.setattr(threads, "in_order", counted)
    with pytest.raises(RuntimeError, match="the observer") as kept:
        publisher.publish(arrays)
    assert running == 0
    assert kept.tb is not None
    assert publisher.version == 1


@pytest.mark.parametrize("full", [False, True])
def test_a_put_that_fails_behind_commits_nothing_and_leaves_no_file(full: bool) -> None:
    store = SlowStore()
    publisher = syncline.Publisher(
        store, part_bytes=BATCH_BYTES, memory_bytes=1 << 10, full_encoding="planes"
    )
    arrays = weights()
    publisher.publish(arrays)
    for array in arrays.values():
        array[::100] += 1
    store.fails = True
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(StoreError, match="the disk is full"):
            publisher.publish(arrays, full=full)
        gc.collect()
    assert [one.message for one in caught if one.category is ResourceWarning] == []
    assert publisher.version == 1
    store.fails = False
    assert publisher.publish(arrays).version == 2


LATE = """
import threading, time
import numpy as np, syncline

def publish():
    threading.main_thread().join()
    time.sleep(0.3)
    store, engine, arrays = syncline.MemoryStore(), syncline.MemoryEngine(), {"w": np.zeros(1 << 22)}
    publisher = syncline.Publisher(store, full_encoding="planes")
    publisher.publish(arrays)
    syncline.Receiver(store, engine).sync()
    arrays["w"][5] = 1
    publisher.publish(arrays)
    print(syncline.Receiver(store, engine, verify="full").sync().version)

threading.Thread(target=publish).start()
"""


def test_a_thread_that_outlives_the_main_one_publishes_and_syncs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LATE], check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("2\n", "")
