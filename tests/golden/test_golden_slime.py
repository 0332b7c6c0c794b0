"""Golden directories in the slime layout are followed, by Syncline and by a reader of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

import slime_oracle as oracle
from syncline import CheckpointSource, MemoryEngine, Receiver
from syncline.stores import MemoryStore

GOLDEN = Path(__file__).parent / "slime"
RUNS = [f"{encoding}-{checksum}" for encoding, checksum in oracle.COMBINATIONS]


def expected(number: int) -> dict[str, bytes]:
    source = CheckpointSource(GOLDEN / f"expected-{number:06d}.safetensors")
    return {meta.name: bits.tobytes() for meta, bits in source.tensors()}


@pytest.mark.parametrize("name", RUNS)
def test_the_receiver_follows_them(name: str) -> None:
    store = MemoryStore()
    for path in (GOLDEN / name).rglob("*.*"):
        store.put(path.relative_to(GOLDEN / name).as_posix(), [path.read_bytes()])
    engine = MemoryEngine()
    receiver = Receiver(store, engine, layout="slime", verify="full")
    for number in (1, 2):
        assert receiver.sync(number).identity == f"{number:06d}"
        assert {tensor: engine.view(tensor).tobytes() for tensor in engine.tensors()} == expected(
            number
        )


@pytest.mark.parametrize("name", RUNS)
def test_a_reader_of_its_own_takes_them(name: str) -> None:
    source = CheckpointSource(GOLDEN / name / "weight_v000001")
    weights = {meta.name: bits.copy() for meta, bits in source.tensors()}
    assert {tensor: array.tobytes() for tensor, array in weights.items()} == expected(1)
    after = oracle.apply_delta(GOLDEN / name / "weight_v000002", weights)
    assert {tensor: array.tobytes() for tensor, array in after.items()} == expected(2)


def test_every_encoding_and_checksum_is_there() -> None:
    assert sorted(path.name for path in GOLDEN.iterdir() if path.is_dir()) == sorted(RUNS)
