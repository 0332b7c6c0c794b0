"""Weights whose writes are seen: which writes are, which are refused, and what is kept."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from syncline import MemoryEngine, MemoryStore, Publisher, Receiver, watch
from syncline.errors import BaseVersionError, ConfigError, LayoutError
from syncline.sources import WatchedWeights
from syncline.sources.operations import Bucket
from syncline.sources.watched_tensor import WatchedTensor
from syncline.types import WINDOW_UNITS

torch = pytest.importorskip("torch")
BF16 = torch.bfloat16


def small_model() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(24, 40), torch.nn.Tanh(), torch.nn.Linear(40, 24)
    ).to(BF16)


class Run:
    """A model, its optimizer, its watched weights, and a publisher that has published once."""

    def __init__(self, **options: Any) -> None:
        self.model = small_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2, momentum=0.9)
        self.weights = watch(self.optimizer, self.model, **options)
        self.store = MemoryStore()
        self.publisher = Publisher(self.store)
        self.publisher.publish(self.weights)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(3, 24, dtype=BF16)).square().mean().backward()
        self.optimizer.step()

    def assert_engine_is_the_same(self) -> None:
        engine = MemoryEngine()
        Receiver(self.store, engine, verify="full").sync()
        for name, tensor in self.model.state_dict().items():
            expected = tensor.view(torch.int16).flatten().numpy().view(np.uint16)
            np.testing.assert_array_equal(engine.view(name), expected, strict=True)


def unseen_writes() -> dict[str, Callable[[Run], object]]:
    def in_place(run: Run) -> None:
        with torch.no_grad():
            run.model[0].weight[3, 4] = 5.0

    def load(run: Run) -> None:
        run.model.load_state_dict({k: v + 1 for k, v in run.model.state_dict().items()})

    def data(run: Run) -> None:
        run.model[0].weight.data[3, 4] = 5.0

    def data_swapped(run: Run) -> None:
        run.model[0].weight.data = run.model[0].weight.data + 1

    def parameter_replaced(run: Run) -> None:
        run.model[0].weight = torch.nn.Parameter(run.model[0].weight.detach() + 1)

    def averaged(run: Run) -> None:
        average = copy.deepcopy(run.model)
        run.step()
        with torch.no_grad():
            for one, other in zip(run.model.parameters(), average.parameters(), strict=True):
                one.copy_(other)

    def foreach(run: Run) -> None:
        with torch.no_grad():
            torch._foreach_mul_(list(run.model.parameters()), 2.0)

    def through_numpy(run: Run) -> None:
        run.model[0].weight.detach().view(torch.int16).numpy()[3, 4] ^= 1

    def converted(run: Run) -> None:
        run.model.to(torch.float32).to(BF16)

    return {
        function.__name__: function
        for function in (
            in_place,
            load,
            data,
            data_swapped,
            parameter_replaced,
            averaged,
            foreach,
            through_numpy,
            converted,
        )
    }


@pytest.mark.parametrize("steps_after", [0, 1])
@pytest.mark.parametrize("name", unseen_writes())
def test_a_write_that_is_not_seen_is_refused_until_a_full_version(
    name: str, steps_after: int
) -> None:
    run = Run()
    unseen_writes()[name](run)
    for _ in range(steps_after):
        run.step()
    for _ in range(2):
        with pytest.raises(BaseVersionError, match="full=True") as caught:
            run.publisher.publish(run.weights)
        assert "tensor '" in str(caught.value)
        assert run.publisher.version == 1
    assert run.publisher.publish(run.weights, full=True).kind == "full"
    run.assert_engine_is_the_same()
    if name != "parameter_replaced":  # the optimizer does not hold the new one
        run.step()
    assert run.publisher.publish(run.weights).kind == "delta"
    run.assert_engine_is_the_same()


@pytest.mark.parametrize("name", ["in_place", "load", "averaged", "foreach", "data"])
def test_the_same_write_inside_writing_is_seen(name: str) -> None:
    run = Run()
    with run.weights.writing():
        unseen_writes()[name](run)
    report = run.publisher.publish(run.weights)
    assert report.kind == "delta"
    assert (report.changed > 0) == (name != "averaged")
    run.assert_engine_is_the_same()


def test_sampled_check_finds_a_hidden_write_within_eight_publishes() -> None:
    run = Run(check="sampled")
    run.model[0].weight.data[3, 4] = 5.0

    def publish_often() -> None:
        for _ in range(8):
            run.publisher.publish(run.weights)

    with pytest.raises(BaseVersionError, match="something wrote it"):
        publish_often()


def test_sampled_check_still_refuses_what_torch_counts_at_once() -> None:
    run = Run(check="sampled")
    for _ in range(20):
        run.step()
        run.publisher.publish(run.weights)
    run.assert_engine_is_the_same()
    with torch.no_grad():
        run.model[2].bias.add_(1)
    with pytest.raises(BaseVersionError, match="'2.bias': 1 in-place"):
        run.publisher.publish(run.weights)


def test_a_step_that_raises_midway_is_seen_as_far_as_it_came() -> None:
    class Breaking(torch.optim.SGD):  # type: ignore[misc]
        def step(self, closure: Any = None) -> None:
            super().step()
            raise RuntimeError("out of memory")

    model = small_model()
    optimizer = Breaking(model.parameters(), lr=0.1)
    weights, publisher = watch(optimizer, model), Publisher(MemoryStore())
    publisher.publish(weights)
    model(torch.ones(3, 24, dtype=BF16)).sum().backward()
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert publisher.publish(weights).changed > 100


def test_a_comparison_that_fails_makes_deltas_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "flush", lambda self: exec("raise MemoryError('full')"))
        with pytest.raises(MemoryError):
            run.step()
    run.step()
    with pytest.raises(BaseVersionError, match="comparing"):
        run.publisher.publish(run.weights)
    run.publisher.publish(run.weights, full=True)
    run.step()
    assert run.publisher.publish(run.weights).kind == "delta"
    run.assert_engine_is_the_same()


@pytest.mark.parametrize("compare", ["operations", "step"])
def test_what_was_held_when_a_comparison_failed_is_no_base_after_a_full_version(
    compare: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(compare=compare)
    run.step()
    run.publisher.publish(run.weights)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(WatchedTensor, "compare", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.step()
    run.publisher.publish(run.weights, full=True)
    run.step()
    assert run.publisher.publish(run.weights).kind == "delta"
    run.assert_engine_is_the_same()


def test_a_model_made_in_inference_mode_is_refused() -> None:
    with torch.inference_mode():
        model = small_model()
    optimizer = torch.optim.SGD(small_model().parameters(), lr=1e-2)
    with pytest.raises(LayoutError, match="torch does not count the writes"):
        watch(optimizer, model)


def test_units_that_come_back_are_no_changes() -> None:
    run = Run()
    weight = run.model[0].weight
    with run.weights.writing(), torch.no_grad():
        weight[0, :5] *= 2
    with run.weights.writing(), torch.no_grad():
        weight[0, 1:5] /= 2
    assert 0 < run.weights.memory_bytes <= 9 * (4 + 2)
    report = run.publisher.publish(run.weights)
    assert (report.changed, report.tensors) == (1, 1)
    assert run.weights.memory_bytes == 0
    run.assert_engine_is_the_same()


def test_bits_are_compared_as_integers() -> None:
    values = torch.tensor([0.0, float("nan"), 1.0], dtype=BF16)
    weights = watch(torch.optim.SGD([values], lr=1.0), {"w": values})
    publisher = Publisher(MemoryStore())
    publisher.publish(weights)
    with weights.writing():
        values.copy_(torch.tensor([-0.0, float("nan"), 1.0], dtype=BF16))
    assert publisher.publish(weights).changed == 1
    with weights.writing():
        values.view(torch.int16)[1] ^= 1
    assert values.isnan().tolist() == [False, True, False]
    assert publisher.publish(weights).changed == 1


def test_tied_names_and_views_share_what_was_seen() -> None:
    flat = torch.zeros(64, dtype=BF16)
    tensors = {"a": flat[:32].view(4, 8), "b": flat[16:48], "tied": flat[:32].view(4, 8)}
    weights = watch(torch.optim.SGD([flat], lr=1.0), tensors)
    publisher = Publisher(MemoryStore())
    publisher.publish(weights)
    with weights.writing():
        flat[20:22] = 1.0
        flat[60] = 1.0
    report = publisher.publish(weights)
    assert (report.changed, report.tensors) == (6, 3)


def test_weights_that_do_not_lie_in_order_are_compared_in_order() -> None:
    matrix = torch.zeros(6, 4, dtype=BF16).T
    weights = watch(torch.optim.SGD([matrix], lr=1.0), {"w": matrix})
    with weights.writing():
        matrix[1, 2] = 3.0
    offsets, old_bits = weights.changes("w", 0)
    assert (offsets.tolist(), old_bits.tolist()) == ([8], [0])


@pytest.mark.parametrize("threads", ["1", "3"])
def test_tensors_of_several_windows(threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCLINE_THREADS", threads)
    tensor = torch.zeros(2 * WINDOW_UNITS + 5, dtype=torch.int8)
    weights = watch([], {"w": tensor})
    engine, store = MemoryEngine(), MemoryStore()
    publisher = Publisher(store)
    publisher.publish(weights)
    places = [0, WINDOW_UNITS - 1, WINDOW_UNITS, 2 * WINDOW_UNITS, 2 * WINDOW_UNITS + 4]
    with weights.writing():
        tensor[places] = 7
    assert publisher.publish(weights).changed == len(places)
    Receiver(store, engine, verify="full").sync()
    assert np.flatnonzero(engine.view("w")).tolist() == places


def test_the_bucket_bounds_what_is_copied_and_lists_are_taken_apart() -> None:
    for kind in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        tensors = {f"w{i}": torch.ones(100, dtype=BF16, requires_grad=True) for i in range(20)}
        optimizer = torch.optim.AdamW(tensors.values(), lr=1e-2, **kind)
        weights = watch(optimizer, tensors, bucket_bytes=500)
        for tensor in tensors.values():
            tensor.grad = torch.ones_like(tensor)
        optimizer.step()
        assert 200 <= weights.peak_copy_bytes <= 500
        for name in tensors:
            assert weights.changes(name, 0)[0].size == 100


def test_an_operation_larger_than_the_bucket_keeps_what_it_is_about_to_write() -> None:
    flat = torch.zeros(64, dtype=BF16)
    weights = watch([], {"a": flat[:32], "b": flat[32:]}, bucket_bytes=64)
    publisher = Publisher(MemoryStore())
    publisher.publish(weights)
    with weights.writing():
        flat[:2] += 1
        flat += 1
    assert weights.peak_copy_bytes == 128
    assert publisher.publish(weights).changed == 64


def test_foreach_with_one_scalar_a_tensor_is_taken_apart_rightly() -> None:
    for scalars in ([2.0, 3.0, 4.0], torch.tensor([2.0, 3.0, 4.0])):
        tensors = {f"w{i}": torch.ones(10) for i in range(3)}
        weights = watch(torch.optim.SGD(tensors.values(), lr=1.0), tensors, bucket_bytes=1)
        ones = [torch.ones(10) for _ in range(3)]
        with weights.writing():
            torch._foreach_addcdiv_(list(tensors.values()), ones, ones, scalars)
            torch._foreach_add_(list(tensors.values()), torch.tensor(1.0))
        assert [tensor[0].item() for tensor in tensors.values()] == [4.0, 5.0, 6.0]
        assert weights.peak_copy_bytes == 40


def test_published_in_another_dtype() -> None:
    model = small_model().float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    weights = watch(optimizer, model, dtype=BF16)
    store = MemoryStore()
    publisher, rival = Publisher(store), Publisher(MemoryStore())

    def rounded() -> dict[str, Any]:
        return {name: tensor.to(BF16) for name, tensor in model.state_dict().items()}

    publisher.publish(weights)
    rival.publish(rounded())
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(3, 24)).square().mean().backward()
        optimizer.step()
        report = publisher.publish(weights)
        assert report.changed == rival.publish(rounded()).changed
    assert 0 < report.density < 0.2


def test_learning_rate_schedulers_may_come_before_or_after() -> None:
    for is_first in (True, False):
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if is_first:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        weights = watch(optimizer, model)
        if not is_first:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        model(torch.ones(3, 24, dtype=BF16)).sum().backward()
        optimizer.step()
        scheduler.step()
        assert weights.changes("0.weight", 0)[0].size > 100


def test_close_gives_the_step_back() -> None:
    run = Run()
    assert "step" in vars(run.optimizer)
    run.weights.close()
    assert "step" not in vars(run.optimizer)
    run.step()
    with pytest.raises(BaseVersionError, match="in-place"):
        run.publisher.publish(run.weights)


def test_close_leaves_what_was_wrapped_around_it() -> None:
    run = Run()
    inner = run.optimizer.step

    def wrapped() -> None:
        inner()

    run.optimizer.step = wrapped
    run.weights.close()
    assert run.optimizer.step is wrapped
    run.step()


def test_a_publish_inside_a_step_is_refused() -> None:
    run = Run()
    with (
        run.weights.writing(),
        pytest.raises(BaseVersionError, match="were written while they were published"),
    ):
        run.publisher.publish(run.weights)


@pytest.mark.parametrize("is_swap", [False, True])
def test_a_write_during_a_publish_is_refused(is_swap: bool) -> None:
    run = Run()
    run.step()

    def interfere(step: Any) -> None:
        if step.name == "publish.part_written":
            if is_swap:
                run.model[0].bias.data = run.model[0].bias.data + 1
            else:
                run.step()

    publisher = Publisher(MemoryStore(), observe=interfere)
    with pytest.raises(BaseVersionError, match="between two steps"):
        publisher.publish(run.weights)
    assert publisher.version is None


def test_a_step_while_the_version_is_made_current_is_not_lost() -> None:
    class SteppingStore(MemoryStore):
        run: Run | None = None

        def compare_and_swap(self, key: str, expected: bytes | None, new: bytes) -> None:
            super().compare_and_swap(key, expected, new)
            if self.run is not None:
                self.run.step()

    run, store = Run(check="sampled"), SteppingStore()
    publisher = Publisher(store)
    publisher.publish(run.weights)
    run.step()
    store.run = run
    publisher.publish(run.weights)
    store.run = None
    with pytest.raises(BaseVersionError, match="full=True"):
        publisher.publish(run.weights)


def test_what_cannot_be_watched_is_refused() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(ConfigError, match=r"torch\.optim\.Optimizer, found Linear"):
        watch([model[0]], model)
    with pytest.raises(ConfigError, match="torch module or torch tensors"):
        watch(optimizer, 3)
    with pytest.raises(LayoutError, match="expected a torch tensor"):
        watch(optimizer, {"w": np.zeros(3)})
    with pytest.raises(LayoutError, match="meta device"):
        watch(optimizer, {"w": torch.empty(3, device="meta")})
    for option in ({"check": "none"}, {"compare": "bucket"}, {"bucket_bytes": 0}):
        with pytest.raises(ConfigError, match=next(iter(option))):
            watch(optimizer, model, **option)
    assert "step" not in vars(optimizer)


def test_every_tensor_is_in_the_source_once_with_its_files() -> None:
    model = small_model()
    model[2].weight = torch.nn.Parameter(model[0].weight.detach().T.contiguous())
    model.register_buffer("count", torch.tensor(3))
    weights = watch(
        torch.optim.SGD(model.parameters(), lr=1.0), model, files={"config.json": b"{}"}
    )
    assert isinstance(weights, WatchedWeights)
    assert [meta.name for meta, _ in weights.tensors()] == list(model.state_dict())
    assert weights.files() == {"config.json": b"{}"}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["foreach", "fused"])
@pytest.mark.parametrize("compare", ["operations", "step"])
def test_on_a_gpu_the_same_changes_are_seen(kind: str, compare: str) -> None:
    model = small_model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **{kind: True})
    weights = watch(optimizer, model, compare=compare, bucket_bytes=1000)
    publisher, rival = Publisher(MemoryStore()), Publisher(MemoryStore())
    publisher.publish(weights)
    rival.publish(model.state_dict())
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.ones(3, 24, dtype=BF16, device="cuda")).square().mean().backward()
        optimizer.step()
        report, other = publisher.publish(weights), rival.publish(model.state_dict())
        assert (report.changed, report.payload_bytes) == (other.changed, other.payload_bytes)
