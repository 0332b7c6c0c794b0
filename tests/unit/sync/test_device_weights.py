"""Weights on a device, published and applied: the same bits and the same payload as from the host.

Torch tensors in host memory are taken for tensors on a GPU, and Triton interprets the kernels; with
`-m gpu` they are on one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from syncline import MemoryEngine, MemoryStore, Publisher, Receiver, arrays, kernels
from syncline.abc import WeightSource
from syncline.device import Arrival, SideStream
from syncline.engines import TorchModule
from syncline.errors import StoreError, VerifyError
from syncline.types import Bits, DeviceBits, TensorMeta

torch = pytest.importorskip("torch")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu":
        request.getfixturevalue("pretend_gpu")
    return request.param


def weights(place: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    made = {
        "embed": torch.randn(70, 60, generator=generator).bfloat16(),
        "turned": torch.randn(30, 50, generator=generator).half().T,
        "norm": torch.randn(61, generator=generator),
        "wide": torch.randn(5, 5, generator=generator, dtype=torch.float64),
        "scale": torch.tensor(1.5),
        "empty": torch.empty(0, 4),
        "mask": torch.tensor([True, False, True]),
        "fp8": torch.arange(200, dtype=torch.uint8).view(torch.float8_e4m3fn),
    }
    return {name: tensor.to(place) for name, tensor in made.items()}


def step(tensors: dict[str, Any], number: int) -> None:
    """Change some bits of most tensors, as an optimizer does, in place."""
    for name in ("embed", "norm"):
        tensors[name].view(-1)[number::37] += 1
    tensors["turned"][number, ::7] *= -1
    tensors["wide"][0, number] = float("nan")
    tensors["mask"][number % 3] ^= True


def host(tensors: dict[str, Any]) -> dict[str, bytes]:
    return {name: arrays.as_bits(name, tensor)[1].tobytes() for name, tensor in tensors.items()}


def held(engine: MemoryEngine) -> dict[str, bytes]:
    return {name: engine.view(name).tobytes() for name in engine.tensors()}


class OnHost(WeightSource):
    """The same weights, copied to the host."""

    is_stable = True

    def __init__(self, tensors: dict[str, Any]) -> None:
        self._tensors = tensors

    def tensors(self) -> Iterator[tuple[TensorMeta, Bits]]:
        for name, tensor in self._tensors.items():
            yield arrays.as_bits(name, tensor)


@pytest.mark.parametrize("device_copy", [True, False])
@pytest.mark.parametrize("encoding", ["auto", "xor", "packed"])
def test_versions_are_those_that_the_host_makes(
    place: str, device_copy: bool, encoding: str
) -> None:
    tensors = weights(place)
    store = MemoryStore()
    publisher = Publisher(store, encoding=encoding, device_copy=device_copy)
    of_host = Publisher(MemoryStore(), encoding=encoding)
    engine = MemoryEngine()
    receiver = Receiver(store, engine, verify="full")
    for number in range(5):
        if number:
            step(tensors, number)
        report = publisher.publish(tensors, full=number == 3)
        expected = of_host.publish(OnHost(tensors), full=number == 3)
        assert (report.kind, report.changed) == (expected.kind, expected.changed)
        assert report.payload_bytes == expected.payload_bytes
        receiver.sync()
        assert held(engine) == host(tensors)


def test_with_a_copy_there_only_changes_come_to_the_host(place: str, monkeypatch) -> None:
    tensors = weights(place)
    publisher = Publisher(MemoryStore(), device_copy=True)
    publisher.publish(tensors)
    brought: list[int] = []
    bring = SideStream.bring

    def counted(side: SideStream, *some: DeviceBits) -> Arrival:
        brought.append(sum(bits.nbytes for bits in some))
        return bring(side, *some)

    monkeypatch.setattr(SideStream, "bring", counted)
    step(tensors, 1)
    before = host(tensors)
    report = publisher.publish(tensors)
    assert report.changed > 0
    changed = {"embed": 2, "turned": 2, "norm": 4, "wide": 8, "mask": 1}
    snapshot = publisher._snapshot
    counts = {
        entry.meta.name: entry.changed
        for entry in snapshot.held().manifest.tensors
        if entry.changed is not None
    }
    assert counts.keys() == changed.keys()
    assert sum(brought) == sum(counts[name] * (4 + 2 * width) for name, width in changed.items())
    assert before == held(snapshot)


def test_a_publish_that_failed_is_made_again_from_the_store(place: str, monkeypatch) -> None:
    tensors = weights(place)
    store, engine = MemoryStore(), MemoryEngine()
    publisher = Publisher(store, device_copy=True)
    publisher.publish(tensors)
    step(tensors, 1)
    with monkeypatch.context() as patch:
        patch.setattr(store, "put", lambda *_: (_ for _ in ()).throw(StoreError("full")))
        with pytest.raises(StoreError, match="full"):
            publisher.publish(tensors)
    assert publisher.publish(tensors).version == 2
    Receiver(store, engine, verify="full").sync()
    assert held(engine) == host(tensors)


def test_a_copy_that_came_apart_from_the_snapshot_is_an_error_and_then_rebuilt(place: str) -> None:
    tensors = weights(place)
    store, engine = MemoryStore(), MemoryEngine()
    publisher = Publisher(store, device_copy=True)
    publisher.publish(tensors)
    step(tensors, 1)
    publisher.publish(tensors)
    publisher._snapshot.bits("norm")[5] ^= 1
    tensors["norm"][5] += 1
    with pytest.raises(VerifyError, match="tensor 'norm': the copy on the GPU and the snapshot"):
        publisher.publish(tensors)
    assert publisher.version == 2
    publisher.publish(tensors)
    Receiver(store, engine, verify="full").sync()
    assert held(engine) == host(tensors)


def test_a_generator_that_fills_one_tensor_again_and_again(place: str) -> None:
    store, engine = MemoryStore(), MemoryEngine()
    publisher = Publisher(store, device_copy=True)
    buffer = torch.zeros(100, dtype=torch.bfloat16, device=place)

    def generated(value: float) -> Iterator[tuple[str, Any]]:
        for number in range(3):
            buffer[:] = value + number
            yield f"w{number}", buffer

    for value in (1.0, 2.0, 4.0):
        publisher.publish(generated(value))
        Receiver(store, engine, verify="full").sync()
        for number in range(3):
            expected = torch.full((100,), value + number, dtype=torch.bfloat16)
            assert engine.view(f"w{number}").tobytes() == arrays.as_bits("w", expected)[1].tobytes()


def test_a_module_follows_on_the_device_and_is_verified_there(place: str, monkeypatch) -> None:
    tensors, store = weights(place), MemoryStore()
    publisher = Publisher(store, device_copy=True)
    module = torch.nn.Module()
    for name in tensors:
        module.register_buffer(name, torch.zeros_like(tensors[name].clone()))
    engine = TorchModule(module)
    pointers = {name: tensor.data_ptr() for name, tensor in module.named_buffers()}
    for number in range(3):
        step(tensors, number)
        publisher.publish(tensors)
        Receiver(store, engine, verify="full").sync()
        assert host(dict(module.named_buffers())) == host(tensors)
    assert pointers == {name: tensor.data_ptr() for name, tensor in module.named_buffers()}
    monkeypatch.setattr(engine, "view", lambda name: pytest.fail(f"{name} came to the host"))
    for name in tensors:
        if not module.get_buffer(name).is_contiguous():
            continue
        found = kernels.fingerprint(engine.resident(name), 0, kernels.seeds(name))
        meta, bits = arrays.as_bits(name, tensors[name])
        assert found == kernels.fingerprint(bits, 0, kernels.seeds(meta.name))


def test_a_module_whose_bits_were_damaged_on_the_device_is_found(place: str) -> None:
    tensors, store = weights(place), MemoryStore()
    Publisher(store, device_copy=True).publish(tensors)
    module = torch.nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor.clone())
    engine = TorchModule(module)
    receiver = Receiver(store, engine, verify="full")
    receiver.sync()
    module.norm[3] += 1
    with pytest.raises(VerifyError, match="norm"):
        receiver.sync()
