"""Publisher and receiver together, in memory: what arrives is what was published."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from syncline import MemoryEngine, MemoryStore, Publisher, Receiver
from syncline.abc import WeightSource
from syncline.errors import ConfigError
from syncline.sync.history import History
from syncline.types import Step, TensorMeta

ENCODINGS = ["auto", "full", "planes", "overwrite", "xor", "packed", "tight"]


class BitsSource(WeightSource):
    """Publishes bits of any dtype, as they are."""

    def __init__(self, tensors: dict[str, tuple[TensorMeta, np.ndarray]]) -> None:
        self._tensors = tensors

    def tensors(self):  # type: ignore[no-untyped-def]
        yield from self._tensors.values()


def assert_same(engine: MemoryEngine, tensors: dict[str, tuple[TensorMeta, np.ndarray]]) -> None:
    assert engine.tensors() == {name: meta for name, (meta, _) in tensors.items()}
    for name, (_, bits) in tensors.items():
        np.testing.assert_array_equal(engine.view(name), bits, strict=True)


@pytest.mark.parametrize("full_encoding", ["full", "planes"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_dtype_arrives_bit_for_bit(
    encoding: str,
    full_encoding: str,
    every_dtype: dict[str, tuple[TensorMeta, np.ndarray]],
    rng: np.random.Generator,
) -> None:
    store, engine = MemoryStore(), MemoryEngine()
    publisher = Publisher(store, encoding=encoding, full_encoding=full_encoding)
    receiver = Receiver(store, engine, verify="full")
    tensors = every_dtype
    for share in (0.0, 0.1, 1.0, 0.0):
        for _, bits in tensors.values():
            flat = bits.view(np.uint8)
            flat[rng.random(flat.size) < share] ^= rng.integers(1, 256, dtype=np.uint8)
        report = publisher.publish(BitsSource(tensors))
        applied = receiver.sync()
        assert applied.version == report.version
        assert_same(engine, tensors)


def test_base_is_version_1_and_files_come_with_it(tmp_path: Path) -> None:
    save_file({"w": np.zeros(10, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    store = MemoryStore()
    publisher = Publisher(store, base=tmp_path)
    assert publisher.version == 1
    report = publisher.publish({"w": np.ones(10, np.float32)})
    assert (report.version, report.kind, report.changed) == (2, "delta", 10)
    first = History.open(store).find(1)
    assert [entry.path for entry in first.manifest.files] == ["config.json"]


def test_engine_that_already_has_the_base_fetches_nothing_of_it(tmp_path: Path) -> None:
    base = {"w": np.arange(1000, dtype=np.float32)}
    save_file(base, tmp_path / "model.safetensors")
    store = MemoryStore()
    publisher = Publisher(store, base=tmp_path)
    engine = MemoryEngine(
        {"w": (TensorMeta("w", "F32", (1000,)), base["w"].view(np.uint32).copy())}
    )
    new = base["w"].copy()
    new[5] = -1
    report = publisher.publish({"w": new})
    applied = Receiver(store, engine).sync()
    assert applied.applied == (2,)
    assert applied.payload_bytes == report.payload_bytes
    assert engine.view("w").tobytes() == new.tobytes()


def test_anchor_costs_a_follower_nothing_and_starts_a_late_joiner() -> None:
    rng = np.random.default_rng(1)
    store, follower = MemoryStore(), MemoryEngine()
    publisher = Publisher(store, anchor_every=2)
    w = {"w": rng.standard_normal(5000, np.float32)}
    anchors = []
    for _ in range(6):
        w["w"][rng.integers(0, 5000, 50)] += 1
        report = publisher.publish(w)
        anchors.append(report.anchor)
        applied = Receiver(store, follower).sync()
        assert applied.version == publisher.version
        assert applied.payload_bytes == report.payload_bytes
    assert anchors == [None, None, 4, None, 7, None]
    late = MemoryEngine()
    assert Receiver(store, late).sync().applied == (7, 8)
    assert late.view("w").tobytes() == w["w"].tobytes()


def test_sync_to_an_older_version_goes_through_a_full_one() -> None:
    store, engine = MemoryStore(), MemoryEngine()
    publisher = Publisher(store)
    for value in range(4):
        publisher.publish({"w": np.full(8, value, np.int64)})
    receiver = Receiver(store, engine)
    receiver.sync()
    assert receiver.sync(2).applied == (1, 2)
    assert engine.view("w").tolist() == [1] * 8


def test_restarted_publisher_carries_on_from_the_store() -> None:
    store, engine = MemoryStore(), MemoryEngine()
    w = {"w": np.zeros(100, np.float64)}
    Publisher(store).publish(w)
    w["w"][3] = -0.0
    report = Publisher(store).publish(w)
    assert (report.kind, report.changed) == ("delta", 1)
    Receiver(store, engine).sync()
    assert np.signbit(engine.view("w").view(np.float64)[3])


def test_snapshot_on_disk_is_the_same_and_leaves_no_file(tmp_path: Path) -> None:
    store, engine = MemoryStore(), MemoryEngine()
    publisher = Publisher(store, snapshot_dir=tmp_path)
    for value in range(3):
        publisher.publish({"w": np.full(1000, value, np.float16), "e": np.empty(0, np.int32)})
        Receiver(store, engine, verify="full").sync()
        assert set(engine.view("w").view(np.float16).tolist()) == {float(value)}
    assert list(tmp_path.iterdir()) == []


def test_dense_change_falls_back_to_a_code_that_needs_no_base(rng: np.random.Generator) -> None:
    store, engine = MemoryStore(), MemoryEngine()
    publisher = Publisher(store)
    publisher.publish({"w": np.zeros(100_000, np.float16), "v": np.zeros(100_000, np.float16)})
    new = {
        "w": (rng.standard_normal(100_000) * 0.02).astype(np.float16),
        "v": np.zeros(100_000, np.float16),
    }
    new["v"][7] = 1
    publisher.publish(new)
    used = {e.meta.name: e.encoding for e in History.open(store).current.manifest.tensors}  # type: ignore[union-attr]
    assert used["v"] == "tight"
    Receiver(store, engine, verify="full").sync()
    for name, array in new.items():
        assert engine.view(name).tobytes() == array.tobytes()


def test_many_parts_and_a_table_beside_the_manifest(rng: np.random.Generator) -> None:
    store, engine = MemoryStore(), MemoryEngine()
    publisher = Publisher(store, part_bytes=1000, memory_bytes=256)
    w = {f"layer.{i}": rng.standard_normal(64, np.float32) for i in range(80)}
    publisher.publish(w)
    for array in w.values():
        array[3] += 1
    report = publisher.publish(w)
    manifest = History.open(store).current.manifest  # type: ignore[union-attr]
    assert len(manifest.parts) == 21
    assert report.changed == 80
    Receiver(store, engine, verify="full").sync()
    for name, array in w.items():
        assert engine.view(name).tobytes() == array.tobytes()


def test_steps_are_told_with_bytes() -> None:
    seen: list[Step] = []
    store, engine = MemoryStore(), MemoryEngine()
    Publisher(store, observe=seen.append).publish({"w": np.zeros(10)})
    Receiver(store, engine, observe=seen.append).sync()
    names = [step.name for step in seen]
    assert names.index("publish.part_written") < names.index("publish.manifest_written")
    assert names.index("publish.manifest_written") < names.index("publish.head_swapped")
    assert names[-1] == "pull.version_applied"
    assert seen[-1].done_bytes == seen[-1].total_bytes > 0


@pytest.mark.parametrize(
    "options",
    [
        {"encoding": "gzip"},
        {"full_encoding": "xor"},
        {"anchor_every": 0},
        {"part_bytes": 0},
        {"memory_bytes": -1},
    ],
)
def test_options_are_checked_before_the_store_is_touched(options: dict[str, object]) -> None:
    store = MemoryStore()
    with pytest.raises(ConfigError, match=next(iter(options))):
        Publisher(store, **options)
    assert store.list() == []
