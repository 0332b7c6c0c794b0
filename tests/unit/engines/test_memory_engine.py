"""What `MemoryEngine` adds to the contract: weights given at the start, arrays made by the caller."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine_cases import FILES, as_bytes, change, draw, held_bits, records, spans, version_of
from syncline.engines import MemoryEngine
from syncline.engines import memory as module
from syncline.errors import LayoutError, TornUpdateError
from syncline.types import Bits, Record, TensorMeta, unsigned

OLD = draw(1)
NEW = change(OLD, 2)


def test_given_tensors_are_copied_bit_for_bit() -> None:
    meta = TensorMeta("w", "F32", (2, 3))
    array = np.array([[0.0, -0.0, np.nan], [1, 2, 3]], np.float32)
    engine = MemoryEngine({"w": (meta, array.T.copy().T)})
    assert engine.view("w").tobytes() == array.tobytes()
    array[0, 0] = 5
    assert engine.view("w")[0] == 0
    assert engine.held() is None


@pytest.mark.parametrize(
    ("name", "array"), [("w", np.zeros(5, np.uint8)), ("v", np.zeros(6, np.uint8))]
)
def test_given_tensors_must_fit(name: str, array: np.ndarray) -> None:
    with pytest.raises(LayoutError, match="expected 6 bytes"):
        MemoryEngine({name: (TensorMeta("w", "U8", (6,)), array)})


def test_arrays_may_come_from_elsewhere(tmp_path: Path) -> None:
    made = []

    def allocate(meta: TensorMeta) -> Bits:
        made.append(meta.name)
        if meta.unit_count == 0:
            return np.empty(0, unsigned(meta.unit_bytes))
        path = tmp_path / f"{len(made)}"
        return np.memmap(path, unsigned(meta.unit_bytes), "w+", shape=(meta.unit_count,))

    engine = MemoryEngine(allocate=allocate)
    engine.create(version_of(1, OLD), spans(OLD), FILES)
    engine.apply(records(OLD, NEW), version_of(2, NEW))
    assert sorted(made) == sorted(OLD)
    assert held_bits(engine) == as_bytes(NEW)
    assert dict(engine.files) == FILES


def test_tensors_may_be_added_and_filled_by_hand() -> None:
    engine = MemoryEngine()
    engine.add(TensorMeta("w", "I16", (3,)))[:] = [1, 2, 3]
    assert engine.view("w").tolist() == [1, 2, 3]
    engine.bits("w")[0] = 7
    assert engine.view("w").tolist() == [7, 2, 3]
    with pytest.raises(LayoutError, match="came twice"):
        engine.add(TensorMeta("w", "I16", (3,)))


def test_a_torn_engine_does_not_say_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = MemoryEngine()
    engine.create(version_of(1, OLD), spans(OLD), FILES)

    class Broken(module.ArrayTarget):
        def write(self, record: Record, bits: Bits) -> None:
            raise ValueError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(module, "ArrayTarget", Broken)
        with pytest.raises(TornUpdateError):
            engine.apply(records(OLD, NEW), version_of(2, NEW))
    assert engine.held() is None
    engine.apply(records(OLD, NEW), version_of(2, NEW))
    assert engine.held() == version_of(2, NEW)
    assert held_bits(engine) == as_bytes(NEW)
