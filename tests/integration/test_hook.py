"""Real training loops, hundreds of steps: the hook against a snapshot, and the engine against the trainer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import syncline
from syncline import MemoryStore, Publisher, Receiver, TorchModule, watch
from syncline.errors import BaseVersionError, StoreError

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")
BF16 = torch.bfloat16
Make = Callable[[Any], Any]


AT_LENGTH = ("sgd momentum", "adamw foreach", "adafactor")


class Model(torch.nn.Module):  # type: ignore[misc]
    """Embedding tied to the head, a frozen layer, a norm, a matrix, and a buffer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(50, 32)
        self.frozen = torch.nn.Linear(32, 32).requires_grad_(False)
        self.norm = torch.nn.LayerNorm(32)
        self.up = torch.nn.Linear(32, 96)
        self.down = torch.nn.Linear(96, 32)
        self.head = torch.nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, ids: Any) -> Any:
        x = self.embed(ids) * self.scale
        x = x + self.down(self.up(self.norm(self.frozen(x))).relu())
        return self.head(x)


# Fused SGD is tested on FP32: torch 2.13 on a CPU leaves BF16 weights longer than a vector as they are.
OPTIMIZERS: dict[str, Make] = {
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, foreach=False),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-5, weight_decay=0.1, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=1e-5, weight_decay=0.1, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-5, weight_decay=0.1, fused=True),
    "adam amsgrad": lambda p: torch.optim.Adam(p, lr=1e-5, amsgrad=True, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-3),
    "adafactor foreach": lambda p: torch.optim.Adafactor(p, lr=1e-3, foreach=True),
    "rmsprop foreach": lambda p: torch.optim.RMSprop(p, lr=1e-5, foreach=True),
    "adagrad fused": lambda p: torch.optim.Adagrad(p, lr=1e-4, fused=True),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-5), foreach=False),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Keep torch's threads from spinning beside each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def train(model: Any, optimizer: Any, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 50, (4, 9), generator=generator)
    optimizer.zero_grad()
    logits = model(ids).float().flatten(0, 1)
    torch.nn.functional.cross_entropy(logits, (ids + 1).flatten() % 50).backward()
    optimizer.step()


def trainable(model: Any) -> list[Any]:
    return [p for p in model.parameters() if p.requires_grad]


def assert_same_bits(one: Any, other: Any) -> None:
    theirs = other.state_dict()
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor.view(torch.int16), theirs[name].view(torch.int16)), name


@pytest.mark.parametrize(
    "name, compare", [*((name, "operations") for name in OPTIMIZERS), ("adamw fused", "step")]
)
def test_training_in_bf16(name: str, compare: str) -> None:
    model, alone, engine = Model().to(BF16), Model().to(BF16), Model(1).to(BF16)
    optimizer, other = (OPTIMIZERS[name](trainable(m)) for m in (model, alone))
    weights = watch(optimizer, model, compare=compare, bucket_bytes=4000)
    store = MemoryStore()
    hook, snapshot = Publisher(store, anchor_every=7), Publisher(MemoryStore(), anchor_every=7)
    receiver = Receiver(store, TorchModule(engine), verify="full")
    densities = set()
    for step in range(300 if name in AT_LENGTH else 60):
        train(model, optimizer, step)
        train(alone, other, step)
        if step % 5 in (1, 2):
            continue
        report, expected = hook.publish(weights), snapshot.publish(model.state_dict())
        assert (report.changed, report.payload_bytes) == (expected.changed, expected.payload_bytes)
        densities.add(report.density)
        if step % 3 == 0:
            receiver.sync()
            assert_same_bits(engine, model)
    receiver.sync()
    assert_same_bits(engine, model)
    # Watching changes nothing in how the model trains, lists taken apart included.
    assert_same_bits(alone, model)
    assert len(densities) > 20


NEEDS_MORE = {"LBFGS", "SparseAdam"}
EVERY = sorted(
    name
    for name, value in vars(torch.optim).items()
    if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
)


@pytest.mark.parametrize("name", sorted({*EVERY} - {"Optimizer"} - NEEDS_MORE))
@pytest.mark.parametrize("kind", ["", "foreach", "fused"])
def test_every_optimizer_that_torch_has(name: str, kind: str) -> None:
    make = getattr(torch.optim, name)
    if kind and kind not in inspect.signature(make).parameters:
        pytest.skip(f"{name} has no {kind} kernels")
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 30, bias=False), torch.nn.Linear(30, 16, bias=False)
    )
    optimizer = make(model.parameters(), lr=1e-2, **({kind: True} if kind else {}))
    weights = watch(optimizer, model, bucket_bytes=1000)
    hook, snapshot = Publisher(MemoryStore()), Publisher(MemoryStore())
    changed = 0
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.randn(5, 16)).square().mean().backward()
        optimizer.step()
        report, expected = hook.publish(weights), snapshot.publish(model.state_dict())
        assert (report.changed, report.payload_bytes) == (expected.changed, expected.payload_bytes)
        changed += report.changed
    assert changed > 960


def test_sparse_gradients() -> None:
    model = torch.nn.Embedding(40, 8, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=1e-2)
    weights = watch(optimizer, model)
    publisher = Publisher(MemoryStore())
    publisher.publish(weights)
    model(torch.tensor([3, 9])).sum().backward()
    optimizer.step()
    assert publisher.publish(weights).changed == 16


@pytest.mark.parametrize("fused", [True, False])
def test_a_gradient_scaler_may_skip_steps(fused: bool) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(trainable(model), lr=1e-3, fused=fused)
    weights, scaler = watch(optimizer, model), torch.amp.GradScaler("cpu", init_scale=2.0**126)
    hook, snapshot = Publisher(MemoryStore()), Publisher(MemoryStore())
    changed = []
    for _ in range(12):
        optimizer.zero_grad()
        scaler.scale(model(torch.arange(9)[None]).logsumexp(-1).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        report, expected = hook.publish(weights), snapshot.publish(model.state_dict())
        assert (report.changed, report.payload_bytes) == (expected.changed, expected.payload_bytes)
        changed.append(report.changed)
    assert 0 in changed
    assert changed[-1] > 0


@pytest.mark.parametrize("name", ["sgd fused", "adamw fused", "adamw foreach"])
def test_training_in_fp32_published_in_bf16(name: str) -> None:
    fused_sgd = lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, fused=True)  # noqa: E731
    model, engine = Model(), Model(1).to(BF16)
    optimizer = OPTIMIZERS.get(name, fused_sgd)(trainable(model))
    weights = watch(optimizer, model, dtype=BF16, bucket_bytes=4000)
    store = MemoryStore()
    hook, snapshot = Publisher(store), Publisher(MemoryStore())
    receiver = Receiver(store, TorchModule(engine))
    for step in range(100):
        train(model, optimizer, step)
        rounded = {name: tensor.to(BF16) for name, tensor in model.state_dict().items()}
        report, expected = hook.publish(weights), snapshot.publish(rounded)
        assert (report.changed, report.payload_bytes) == (expected.changed, expected.payload_bytes)
    receiver.sync()
    for entry, held in engine.state_dict().items():
        assert torch.equal(held.view(torch.int16), rounded[entry].view(torch.int16)), entry
    assert 0 < report.density < 0.5


@pytest.mark.parametrize("in_step", [True, False])
def test_masters_in_fp32_copied_into_bf16(in_step: bool) -> None:
    class WithMasters(torch.optim.AdamW):  # type: ignore[misc]
        """Steps the masters and rounds them into the working weights, as mixed-precision trainers do."""

        def __init__(self, working: list[Any]) -> None:
            self.working = working
            self.masters = [weight.detach().float().clone() for weight in working]
            super().__init__(self.masters, lr=3e-6, fused=True)

        def copy_back(self) -> None:
            with torch.no_grad():
                torch._foreach_copy_(self.working, self.masters)

        def step(self, closure: Any = None) -> None:
            for weight, master in zip(self.working, self.masters, strict=True):
                master.grad = weight.grad.float()
            super().step()
            if in_step:
                self.copy_back()

        def zero_grad(self, set_to_none: bool = True) -> None:
            for weight in self.working:
                weight.grad = None

    model, engine = Model().to(BF16), Model(1).to(BF16)
    optimizer = WithMasters(trainable(model))
    weights = watch(optimizer, model, bucket_bytes=4000)
    store = MemoryStore()
    hook, snapshot = Publisher(store), Publisher(MemoryStore())
    receiver = Receiver(store, TorchModule(engine))
    for step in range(200):
        train(model, optimizer, step)
        if not in_step:
            with weights.writing():
                optimizer.copy_back()
        report, expected = hook.publish(weights), snapshot.publish(model.state_dict())
        assert (report.changed, report.payload_bytes) == (expected.changed, expected.payload_bytes)
        receiver.sync()
        assert_same_bits(engine, model)
    assert 0 < report.density < 0.2


def test_groups_are_added_and_layers_thawed_midway() -> None:
    model = Model().to(BF16)
    optimizer = torch.optim.AdamW(
        [
            {"params": [model.embed.weight], "lr": 1e-4},
            {"params": [model.up.weight, model.up.bias], "weight_decay": 0.5},
        ],
        lr=1e-5,
    )
    weights = watch(optimizer, model)
    hook, snapshot = Publisher(MemoryStore()), Publisher(MemoryStore())
    for step in range(60):
        if step == 20:
            optimizer.add_param_group({"params": [model.down.weight], "lr": 1e-3})
        if step == 40:
            model.frozen.requires_grad_(True)
            optimizer.add_param_group({"params": list(model.frozen.parameters())})
        train(model, optimizer, step)
        report, expected = hook.publish(weights), snapshot.publish(model.state_dict())
        assert (report.changed, report.payload_bytes) == (expected.changed, expected.payload_bytes)


def test_several_optimizers_and_one_a_parameter_in_the_backward_pass() -> None:
    model = Model().to(BF16)
    optimizers = {p: torch.optim.SGD([p], lr=1e-2) for p in trainable(model)}
    weights = watch(optimizers.values(), model)
    for parameter, optimizer in optimizers.items():

        def update(_: Any, optimizer: Any = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(update)
    hook, snapshot = Publisher(MemoryStore()), Publisher(MemoryStore())
    for step in range(30):
        ids = torch.arange(step, step + 9)[None] % 50
        model(ids).float().logsumexp(-1).sum().backward()
        report, expected = hook.publish(weights), snapshot.publish(model.state_dict())
        assert (report.changed, report.payload_bytes) == (expected.changed, expected.payload_bytes)


def test_a_closure_that_steps_often() -> None:
    model = Model().to(BF16)
    optimizer = torch.optim.LBFGS(trainable(model), lr=1e-2, max_iter=4)
    weights = watch(optimizer, model)
    hook, snapshot = Publisher(MemoryStore()), Publisher(MemoryStore())
    hook.publish(weights)
    snapshot.publish(model.state_dict())

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(torch.arange(9)[None]).float().logsumexp(-1).mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
        report, expected = hook.publish(weights), snapshot.publish(model.state_dict())
        assert (report.changed, report.payload_bytes) == (expected.changed, expected.payload_bytes)
    assert report.changed


def save(model: Any, optimizer: Any, path: Path) -> None:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


def resumed(path: Path) -> tuple[Any, Any]:
    saved = torch.load(path)
    model = Model(7).to(BF16)
    model.load_state_dict(saved["model"])
    optimizer = OPTIMIZERS["adamw"](trainable(model))
    optimizer.load_state_dict(saved["optimizer"])
    return model, optimizer


def test_training_resumed_from_what_was_published_goes_on_with_deltas(tmp_path: Path) -> None:
    store = syncline.open_store(tmp_path / "run")
    model = Model().to(BF16)
    optimizer = OPTIMIZERS["adamw"](trainable(model))
    weights, publisher = watch(optimizer, model), Publisher(store)
    for step in range(10):
        train(model, optimizer, step)
        publisher.publish(weights)
    save(model, optimizer, tmp_path / "checkpoint.pt")

    model, optimizer = resumed(tmp_path / "checkpoint.pt")
    weights, publisher = watch(optimizer, model), Publisher(store)
    train(model, optimizer, 10)  # a step before the first publish is no harm
    report = publisher.publish(weights)
    assert (report.version, report.kind) == (11, "delta")
    engine = Model(1).to(BF16)
    Receiver(store, TorchModule(engine), verify="full").sync()
    assert_same_bits(engine, model)


def test_the_base_that_the_engines_loaded_is_version_1(tmp_path: Path) -> None:
    model = Model().to(BF16)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    optimizer = OPTIMIZERS["adamw"](trainable(model))
    weights, store = watch(optimizer, model), MemoryStore()
    publisher = Publisher(store, base=tmp_path)
    train(model, optimizer, 0)
    report = publisher.publish(weights)
    assert (report.version, report.kind) == (2, "delta")
    engine = Model().to(BF16)
    Receiver(store, TorchModule(engine), verify="full").sync()
    assert_same_bits(engine, model)


def test_training_resumed_from_other_weights_is_told_to_start_from_a_full_version(
    tmp_path: Path,
) -> None:
    store = syncline.open_store(tmp_path / "run")
    model = Model().to(BF16)
    optimizer = OPTIMIZERS["adamw"](trainable(model))
    weights, publisher = watch(optimizer, model), Publisher(store)
    publisher.publish(weights)
    save(model, optimizer, tmp_path / "checkpoint.pt")
    train(model, optimizer, 0)
    publisher.publish(weights)

    model, optimizer = resumed(tmp_path / "checkpoint.pt")
    weights, publisher = watch(optimizer, model, check="sampled"), Publisher(store)
    train(model, optimizer, 1)
    with pytest.raises(BaseVersionError, match=r"version 2.*resumed.*full=True"):
        publisher.publish(weights)
    assert publisher.publish(weights, full=True).version == 3
    train(model, optimizer, 2)
    assert publisher.publish(weights).kind == "delta"
    engine = Model(1).to(BF16)
    Receiver(store, TorchModule(engine), verify="full").sync()
    assert_same_bits(engine, model)


def test_a_commit_whose_answer_got_lost_is_not_built_upon() -> None:
    class LosingStore(MemoryStore):
        loses = False

        def compare_and_swap(self, key: str, expected: bytes | None, new: bytes) -> None:
            super().compare_and_swap(key, expected, new)
            if self.loses:
                raise StoreError("the line went dead")

    store = LosingStore()
    model = Model().to(BF16)
    optimizer = OPTIMIZERS["adamw"](trainable(model))
    weights, publisher = watch(optimizer, model), Publisher(store)
    publisher.publish(weights)
    train(model, optimizer, 0)
    store.loses = True
    with pytest.raises(StoreError, match="dead"):
        publisher.publish(weights)
    store.loses = False
    train(model, optimizer, 1)
    with pytest.raises(BaseVersionError, match="answer got lost"):
        publisher.publish(weights)
    publisher.publish(weights, full=True)
    engine = Model(1).to(BF16)
    Receiver(store, TorchModule(engine), verify="full").sync()
    assert_same_bits(engine, model)


@pytest.mark.parametrize("check", ["full", "sampled"])
def test_a_publisher_changes_between_watched_and_plain_weights(check: str) -> None:
    model = Model().to(BF16)
    optimizer = OPTIMIZERS["adamw foreach"](trainable(model))
    weights, store = watch(optimizer, model, check=check), MemoryStore()
    publisher = Publisher(store)
    for step in range(12):
        train(model, optimizer, step)
        if step % 4 == 3:
            # What was dirty is counted from an older version, and this is found out.
            publisher.publish(model.state_dict())
            with pytest.raises(BaseVersionError, match="full=True"):
                publisher.publish(weights)
            publisher.publish(weights, full=True)
        else:
            publisher.publish(weights)
    engine = Model(1).to(BF16)
    Receiver(store, TorchModule(engine), verify="full").sync()
    assert_same_bits(engine, model)
