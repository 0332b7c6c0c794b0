"""Publisher and receiver together, in memory: what arrives is what was published."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from syncline import MemoryEngine, MemoryStore, Publisher, Receiver
from syncline.abc import WeightSource
from syncline.commit.recorded import Recorded
from syncline.errors import ConfigError, StoreError
from syncline.sync import detect
from syncline.sync.history import History
from syncline.types import Record, Step, TensorMeta

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


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_weights_that_change_while_they_are_published_make_a_whole_version(encoding: str) -> None:
    store, engine = MemoryStore(), MemoryEngine()
    weights = {"w": np.zeros(5000, np.float32)}
    publisher = Publisher(store, encoding=encoding)
    publisher.publish(weights)
    weights["w"][:] = np.random.default_rng(0).standard_normal(5000)

    def diff(*arguments: Any, **options: Any) -> Any:
        found = kernels_diff(*arguments, **options)
        weights["w"][::3] += 1  # another thread, right after the comparison
        return found

    kernels_diff = detect.kernels.diff
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(detect.kernels, "diff", diff)
        publisher.publish(weights)
    Receiver(store, engine, verify="full").sync()
    publisher.publish(weights)
    Receiver(store, engine, verify="full").sync()
    assert (engine.view("w").view(np.float32) == weights["w"]).all()


def test_chain_whose_far_end_was_removed_serves_engines_that_are_behind_it() -> None:
    store, behind = MemoryStore(), MemoryEngine()
    weights = {"w": np.arange(1000, dtype=np.float32)}
    publisher = Publisher(store, anchor_every=2)
    publisher.publish(weights)
    Receiver(store, behind).sync()
    for place in range(2):
        weights["w"][place] += 1
        publisher.publish(weights)
    assert publisher.version == 4  # a full version with the weights of version 3
    for version in (1, 2, 3):
        for info in store.list(f"weight_v{version:06d}/"):
            store.delete(info.key)
    meta = TensorMeta("w", "F32", (1000,))
    unknown = MemoryEngine({"w": (meta, np.zeros(1000, np.float32))})
    for engine in (behind, unknown, MemoryEngine()):
        assert Receiver(store, engine, verify="full").sync().version == 4
        assert (engine.view("w").view(np.float32) == weights["w"]).all()


def test_many_small_tensors_cost_time_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0
    nbytes = TensorMeta.nbytes.fget

    def counted(meta: TensorMeta) -> int:
        nonlocal asked
        asked += 1
        return nbytes(meta)

    weights = {f"w{i}": np.full(4, i, np.float32) for i in range(300)}
    publisher = Publisher(MemoryStore())
    publisher.publish(weights)
    monkeypatch.setattr(TensorMeta, "nbytes", property(counted))
    publisher.publish(weights)
    assert asked < 30 * len(weights)


def test_snapshot_dir_may_be_a_string(tmp_path: Path) -> None:
    publisher = Publisher(MemoryStore(), snapshot_dir=str(tmp_path / "snapshot"))
    assert publisher.publish({"w": np.zeros(10, np.float32)}).version == 1


def test_full_disk_under_the_snapshot_is_an_error_and_not_the_end_of_the_process(
    tmp_path: Path,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    store = MemoryStore()
    publisher = Publisher(store, snapshot_dir=tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(StoreError, match=r"cannot hold the 4000 bytes of tensor 'w'"):
            publisher.publish({"w": np.zeros(1000, np.float32)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert publisher.publish({"w": np.zeros(1000, np.float32)}).version == 1


def test_snapshot_has_its_room_on_the_disk_before_it_is_mapped(tmp_path: Path) -> None:
    asked: list[int] = []
    reserve = os.posix_fallocate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fallocate", lambda *a: (asked.append(a[2]), reserve(*a))[1])
        Publisher(MemoryStore(), snapshot_dir=tmp_path).publish({"w": np.zeros(1000, np.float32)})
    assert asked == [4000]


def test_full_temporary_directory_is_a_store_error_and_the_next_publish_works() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    store, engine = MemoryStore(), MemoryEngine()
    weights = {"w": np.random.default_rng(0).standard_normal(100_000).astype(np.float32)}
    publisher = Publisher(store, memory_bytes=10)
    publisher.publish(weights)
    weights["w"][::3] += 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(StoreError, match="temporary file cannot be written"):
            publisher.publish(weights)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert publisher.publish(weights).version == 2
    Receiver(store, engine, verify="full").sync()
    assert (engine.view("w").view(np.float32) == weights["w"]).all()


def test_interrupt_after_the_last_write_leaves_bits_and_version_of_one_kind() -> None:
    store, engine = MemoryStore(), MemoryEngine()
    weights = {"w": np.zeros(100, np.float32)}
    publisher = Publisher(store)
    publisher.publish(weights)
    Receiver(store, engine).sync()
    weights["w"][7] = 1
    publisher.publish(weights)

    class Interrupted(Recorded):
        def __exit__(self, *arguments: object) -> None:
            super().__exit__(*arguments)
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("syncline.commit.overwrite.Recorded", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine_apply_only(store, engine)
    held = engine.held()
    assert held is not None
    assert engine.view("w").view(np.float32)[7] == held.version - 1
    assert Receiver(store, engine, verify="full").sync().version == 2


def engine_apply_only(store: MemoryStore, engine: MemoryEngine) -> None:
    """Apply version 2 to an engine that holds version 1, without the receiver's own temporary files."""
    meta = engine.tensors()["w"]
    old, new = engine.view("w")[7:8].copy(), np.array([1], np.float32).view(np.uint32)
    record = Record(meta.name, 7, None, old, new)
    engine.apply([record], History.open(store).find(2))
