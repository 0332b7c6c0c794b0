"""A worker that follows versions through a learned placement: what only it can get wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch

from syncline import MemoryStore, Publisher, Receiver, kernels
from syncline.engines.learned import LearnedEngine, learn, together
from syncline.errors import CommitError, LayoutError, VerifyError
from syncline.layouts import once
from syncline.types import ZERO, TensorMeta

Weights = Iterable[tuple[str, torch.Tensor]]
SHAPES = {"q": (8, 6), "k": (2, 6), "down": (6, 8), "norm": (6,), "scale": (4,)}


def draw(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def changed(weights: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(seed)
    later = {name: tensor.clone() for name, tensor in weights.items()}
    for tensor in later.values():
        flat = tensor.view(-1)
        flat[torch.from_numpy(rng.integers(0, flat.numel(), 3))] += 1
    return later


class Worker:
    """One of `ways` workers: q, k fused and cut (k replicated), down cut by columns, scale transformed."""

    def __init__(self, weights: dict[str, torch.Tensor], rank: int, ways: int) -> None:
        self.rank, self.ways = rank, ways
        self.live = {
            "qk": torch.zeros(8 // ways + 2, 6),
            "down": torch.zeros(6, 8 // ways),
            "norm": torch.zeros(6),
            "scale": torch.zeros(4),
        }
        self.reloads: list[list[str]] = []
        self.load(weights.items())
        metas = [TensorMeta(name, "F32", shape) for name, shape in SHAPES.items()]
        self.learned = learn(self.load, metas, self.live, rank=rank)

    def load(self, weights: Weights) -> None:
        for name, tensor in weights:
            if name == "q":
                self.live["qk"][:-2].copy_(tensor.chunk(self.ways)[self.rank])
            elif name == "k":
                self.live["qk"][-2:].copy_(tensor)
            elif name == "down":
                self.live["down"].copy_(tensor.chunk(self.ways, 1)[self.rank])
            elif name == "scale":
                self.live["scale"].copy_(-torch.exp(tensor))
            else:
                self.live[name].copy_(tensor)

    def reload(self, names: Iterable[str], view: Callable[[str], Any]) -> None:
        self.reloads.append(list(names))
        self.load(
            (n, torch.from_numpy(view(n).view("<f4").reshape(SHAPES[n]).copy())) for n in names
        )

    def engine(self, weights: dict[str, torch.Tensor], **options: Any) -> LearnedEngine:
        def base(name: str) -> Any:
            meta = TensorMeta(name, "F32", SHAPES[name])
            return meta, weights[name].numpy().reshape(-1).view("<u4")

        return LearnedEngine(self.learned, self.live, base, reload=self.reload, **options)


@pytest.mark.parametrize("ways", [1, 2])
def test_workers_follow_a_store(ways: int) -> None:
    weights = draw(1)
    store = MemoryStore()
    publisher = Publisher(store)
    publisher.publish({name: tensor.clone() for name, tensor in weights.items()})
    workers = [Worker(weights, rank, ways) for rank in range(ways)]
    engines = [worker.engine(weights) for worker in workers]
    assert all(set(engine.dense) == {"scale"} for engine in engines)
    for seed in range(5):
        weights = changed(weights, seed)
        publisher.publish({name: tensor.clone() for name, tensor in weights.items()})
        for rank, (worker, engine) in enumerate(zip(workers, engines, strict=True)):
            applied = Receiver(store, engine, verify="full").sync()
            assert applied.version == seed + 2
            fresh = Worker(weights, rank, ways)
            for name, tensor in worker.live.items():
                assert torch.equal(tensor, fresh.live[name])
            assert worker.reloads.pop() == ["scale"]
    check_shares(workers, engines, weights)


def check_shares(
    workers: list[Worker], engines: list[LearnedEngine], weights: dict[str, torch.Tensor]
) -> None:
    """What the workers hold adds up to the trainer's fingerprints, but for what is not mapped."""
    layout = once(together([worker.learned for worker in workers]))
    for name in ("q", "k", "down", "norm"):
        bits = weights[name].numpy().reshape(-1).view("<u4")
        found = ZERO
        for engine, placement in zip(engines, layout.placements, strict=True):
            blocks = [b for b in placement.blocks if b.name == name]
            found += sum(engine.live.shares(blocks).values(), ZERO)
        assert found == kernels.fingerprint(bits, 0, kernels.seeds(name))


def test_what_is_copied_is_only_what_cannot_be_viewed() -> None:
    weights = draw(1)
    assert Worker(weights, 0, 1).engine(weights).copied_bytes == 4 * 4
    half = Worker(weights, 0, 2).engine(weights).copied_bytes
    assert half == 4 * (8 * 6 + 6 * 8 + 4)


def test_a_tensor_that_is_not_mapped_is_refused_without_a_reload() -> None:
    weights = draw(1)
    worker = Worker(weights, 0, 1)
    with pytest.raises(LayoutError, match="scale"):
        LearnedEngine(
            worker.learned,
            worker.live,
            lambda n: (TensorMeta(n, "F32", SHAPES[n]), weights[n].numpy().reshape(-1).view("<u4")),
        )


def test_values_that_moved_after_loading_are_found() -> None:
    """vLLM issue 42821: the loader still takes plain copies, the kernel wants another layout."""
    weights = draw(1)
    worker = Worker(weights, 0, 1)
    worker.live["down"].copy_(worker.live["down"].t().contiguous().view(6, 8))
    engine = worker.engine(weights)
    assert "values that were looked at differ" in engine.dense["down"]


def test_a_permuted_memory_is_written_through_its_permutation() -> None:
    weights = draw(1)
    worker = Worker(weights, 0, 1)
    order = np.random.default_rng(0).permutation(48).astype(np.int64)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed = torch.empty(48)
        packed[torch.from_numpy(order)] = tensor.reshape(-1)
        return packed.view(6, 8)

    worker.live["down"].copy_(pack(worker.live["down"].clone()))
    engine = worker.engine(weights, permutations={"down": order})
    assert set(engine.dense) == {"scale"}
    store = MemoryStore()
    publisher = Publisher(store)
    publisher.publish({name: tensor.clone() for name, tensor in weights.items()})
    later = changed(weights, 3)
    publisher.publish(later)
    Receiver(store, engine, verify="full").sync()
    assert torch.equal(worker.live["down"], pack(later["down"]))


def test_a_reload_that_fails_takes_everything_back() -> None:
    weights = draw(1)
    worker = Worker(weights, 0, 1)
    engine = worker.engine(weights)
    store = MemoryStore()
    publisher = Publisher(store)
    publisher.publish({name: tensor.clone() for name, tensor in weights.items()})
    Receiver(store, engine).sync()
    held = engine.held()
    before = {name: tensor.clone() for name, tensor in worker.live.items()}
    publisher.publish(changed(weights, 3))
    load, fails = worker.load, [True]

    def failing(tensors: Weights) -> None:
        load(tensors)
        if fails.pop():
            raise RuntimeError("out of memory")

    fails.insert(0, False)
    worker.load = failing  # type: ignore[method-assign]
    with pytest.raises(CommitError, match="out of memory"):
        Receiver(store, engine).sync()
    worker.load = load  # type: ignore[method-assign]
    assert engine.held() == held
    for name, tensor in worker.live.items():
        assert torch.equal(tensor, before[name])
    Receiver(store, engine, verify="full").sync()


def test_live_tensors_that_someone_else_wrote_are_found() -> None:
    weights = draw(1)
    worker = Worker(weights, 0, 2)
    engine = worker.engine(weights)
    store = MemoryStore()
    publisher = Publisher(store)
    publisher.publish({name: tensor.clone() for name, tensor in weights.items()})
    Receiver(store, engine).sync()
    worker.live["qk"][:-2] += 1
    later = {name: tensor + 1 for name, tensor in weights.items()}
    publisher.publish(later)
    with pytest.raises(VerifyError, match="before the update"):
        Receiver(store, engine).sync()


def test_tied_names_must_agree() -> None:
    table = torch.randn(4, 3)
    live = {"embed": torch.nn.Parameter(table.clone(), requires_grad=False)}
    live["head"] = live["embed"]

    def load(weights: Weights) -> None:
        for name, tensor in weights:
            live[name].data.copy_(tensor)

    metas = {n: TensorMeta(n, "F32", (4, 3)) for n in live}
    bits = table.numpy().reshape(-1).view("<u4")
    engine = LearnedEngine(learn(load, metas.values(), live), live, lambda n: (metas[n], bits))
    assert list(engine.tensors()) == ["embed"]
    store = MemoryStore()
    publisher = Publisher(store)
    publisher.publish({"embed": table.clone(), "head": table.clone()})
    Receiver(store, engine).sync()
    both = table.clone()
    both[0, 0] += 1
    publisher.publish({"embed": both, "head": both.clone()})
    Receiver(store, engine, verify="full").sync()
    assert torch.equal(live["embed"], both)
    publisher.publish({"embed": both + 1, "head": both.clone()})
    with pytest.raises(LayoutError, match="tied"):
        Receiver(store, engine).sync()
    assert torch.equal(live["embed"], both)


def test_replaced_tensors_are_found() -> None:
    weights = draw(1)
    worker = Worker(weights, 0, 1)
    engine = worker.engine(weights)
    store = MemoryStore()
    publisher = Publisher(store)
    publisher.publish({name: tensor.clone() for name, tensor in weights.items()})
    Receiver(store, engine).sync()
    worker.live["norm"].data = torch.zeros(6)
    assert engine.held() is None
