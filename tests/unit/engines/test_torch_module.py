"""Live modules: tied weights, memory that is not in order, parameters that were replaced."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from syncline import MemoryStore, Publisher, Receiver
from syncline.engines import TorchModule, torch_memory
from syncline.errors import ConfigError, LayoutError, TornUpdateError
from syncline.types import Bits, Fingerprint, Record, TensorMeta
from syncline.version import HeldVersion, Manifest

torch = pytest.importorskip("torch")

MANIFEST = Manifest("0" * 32, 1, 1, "full", None, None, "auto", (), (), (), None, Fingerprint(0, 0))
V1, V2 = HeldVersion(MANIFEST, "1" * 64), HeldVersion(MANIFEST, "2" * 64)


class Tied(torch.nn.Module):
    """A language model's two ends: one matrix under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4, dtype=torch.bfloat16)
        self.norm = torch.nn.LayerNorm(4, dtype=torch.bfloat16)
        self.lm_head = torch.nn.Linear(4, 6, bias=False, dtype=torch.bfloat16)
        self.lm_head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


def flip(engine: TorchModule, name: str, *places: int) -> Record:
    offsets = np.array(places, np.uint32)
    old = engine.view(name)[offsets]
    return Record(name, 0, offsets, old, old ^ old.dtype.type(1))


def test_parameters_and_persistent_buffers_under_state_dict_names() -> None:
    module = Tied()
    engine = TorchModule(module)
    assert dict(engine.tensors()) == {
        "embed.weight": TensorMeta("embed.weight", "BF16", (6, 4)),
        "norm.weight": TensorMeta("norm.weight", "BF16", (4,)),
        "norm.bias": TensorMeta("norm.bias", "BF16", (4,)),
        "scale": TensorMeta("scale", "F32", ()),
    }
    for name, tensor in module.state_dict().items():
        expected = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert engine.view(name).tobytes() == expected
        assert np.shares_memory(engine.view(name), tensor.reshape(-1).view(torch.uint8).numpy())


def test_tied_names_are_found_but_listed_once() -> None:
    tensors = TorchModule(Tied()).tensors()
    assert dict(tensors.aliases) == {"lm_head.weight": "embed.weight"}
    assert "lm_head.weight" in tensors
    assert tensors["lm_head.weight"] == TensorMeta("lm_head.weight", "BF16", (6, 4))
    assert sorted(tensors) == ["embed.weight", "norm.bias", "norm.weight", "scale"]
    assert len(tensors) == 4
    assert "scratch" not in tensors


@pytest.mark.parametrize(
    "names", [["embed.weight"], ["lm_head.weight"], ["embed.weight", "lm_head.weight"]]
)
def test_a_version_may_name_either_or_both(names: list[str]) -> None:
    module = Tied()
    pointer = module.embed.weight.data_ptr()
    engine = TorchModule(module)
    before = module.embed.weight.detach().view(torch.int16).clone()
    engine.apply([flip(engine, name, 3, 17) for name in names], V1)
    changed = (module.lm_head.weight.view(torch.int16) != before).flatten().nonzero().flatten()
    assert changed.tolist() == [3, 17]
    assert module.embed.weight.data_ptr() == module.lm_head.weight.data_ptr() == pointer
    assert engine.held() == V1


def test_tied_names_that_disagree_are_undone() -> None:
    module = Tied()
    engine = TorchModule(module)
    before = engine.view("embed.weight").copy()
    one, other = flip(engine, "embed.weight", 3), flip(engine, "lm_head.weight", 3)
    other = Record(other.name, 0, other.offsets, other.old_bits, other.new_bits ^ np.uint16(4))
    with pytest.raises(Exception, match=r"embed\.weight.*after writing"):
        engine.apply([one, other], V1)
    assert np.array_equal(engine.view("embed.weight"), before)


def test_names_choose_and_rename() -> None:
    engine = TorchModule(Tied(), {"lm_head.weight": "head", "norm.bias": "b"})
    assert list(engine.tensors()) == ["head", "b"]
    assert engine.tensors()["head"].shape == (6, 4)
    with pytest.raises(ConfigError, match="same canonical name"):
        TorchModule(Tied(), {"norm.weight": "n", "norm.bias": "n"})
    with pytest.raises(ConfigError, match="'missing'"):
        TorchModule(Tied(), {"missing": "m"})


def test_empty_tensors_are_not_tied() -> None:
    module = torch.nn.Module()
    module.a = torch.nn.Parameter(torch.empty(0, 3))
    module.b = torch.nn.Parameter(torch.empty(0, 3))
    assert list(TorchModule(module).tensors()) == ["a", "b"]


def test_a_view_of_other_shape_is_not_tied() -> None:
    module = torch.nn.Module()
    module.a = torch.nn.Parameter(torch.zeros(2, 3))
    module.register_buffer("b", module.a.detach().view(3, 2))
    assert list(TorchModule(module).tensors()) == ["a", "b"]


@pytest.mark.parametrize("is_inference", [False, True])
@pytest.mark.parametrize("is_strided", [False, True])
def test_tensors_of_every_mode_are_written(is_inference: bool, is_strided: bool) -> None:
    module = torch.nn.Module()
    with torch.inference_mode(is_inference):
        weight = torch.arange(12.0).reshape(3, 4)
        module.register_buffer("w", weight.T if is_strided else weight)
    engine = TorchModule(module)
    expected = module.w.contiguous().numpy().copy()
    engine.apply([flip(engine, "w", 2, 7)], V1)
    expected.reshape(-1).view(np.uint32)[[2, 7]] ^= 1
    assert np.array_equal(module.w.numpy(), expected)


REFUSED: dict[str, tuple[Any, str]] = {
    "expanded": (torch.zeros(1, 3).expand(4, 3), "expanded"),
    "meta": (torch.zeros(2, device="meta"), "meta device"),
    "conjugate": (torch.zeros(2, dtype=torch.complex64).conj(), "lazy conjugate"),
    "negative": (torch.zeros(2, dtype=torch.complex64).conj().imag, "lazy conjugate or negative"),
    "complex128": (torch.zeros(2, dtype=torch.complex128), "complex128"),
    "sparse": (torch.zeros(2, 2).to_sparse(), "layout"),
}


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_tensors_without_a_place_for_every_element_are_refused(kind: str) -> None:
    tensor, message = REFUSED[kind]
    module = torch.nn.Module()
    module.register_buffer("layer_w", tensor)
    with pytest.raises(LayoutError, match=f"layer_w.*{message}"):
        TorchModule(module)


def test_a_state_dict_in_place_of_its_module_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected a torch.nn.Module, found OrderedDict"):
        TorchModule(torch.nn.Linear(2, 2).state_dict())


def test_a_state_dict_with_more_than_tensors_is_refused() -> None:
    class Extra(torch.nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"a": 1}

        def set_extra_state(self, state: object) -> None:
            pass

    with pytest.raises(ConfigError, match="'_extra_state'; pass `names`"):
        TorchModule(Extra(2, 2))
    names = {"weight": "weight", "bias": "bias"}
    assert list(TorchModule(Extra(2, 2), names).tensors()) == ["weight", "bias"]


def test_replaced_parameters_are_noticed() -> None:
    module = Tied()
    engine = TorchModule(module)
    assert engine.held() is None
    engine.apply((), V1)
    assert engine.held() == V1
    module.norm.weight = torch.nn.Parameter(module.norm.weight.detach().clone())
    assert engine.held() is None
    assert np.shares_memory(
        engine.view("norm.weight"), module.norm.weight.detach().view(torch.int16).numpy()
    )
    engine.apply([flip(engine, "norm.weight", 1)], V2)
    assert engine.held() == V2
    module.to(torch.float32)
    assert engine.held() is None
    assert engine.tensors()["norm.weight"].dtype == "F32"


def test_removed_parameters_are_noticed() -> None:
    module = Tied()
    engine = TorchModule(module)
    del module.norm
    with pytest.raises(ConfigError, match=r"norm\.weight"):
        engine.tensors()


def test_an_update_with_gradients_and_an_optimizer_around() -> None:
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(torch.ones(1, 3)).sum().backward()
    engine = TorchModule(module)
    engine.apply([flip(engine, "weight", 0, 5), flip(engine, "bias", 1)], V1)
    assert module.weight.requires_grad
    assert module.weight.grad is not None
    optimizer.step()


def test_a_torn_module_does_not_say_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TorchModule(torch.nn.Linear(3, 2))
    engine.apply((), V1)

    def broken(self: object, record: Record, bits: Bits) -> None:
        raise ValueError("broken")

    record = flip(engine, "bias", 1)
    with monkeypatch.context() as patch:
        patch.setattr(torch_memory.TorchTarget, "write", broken)
        with pytest.raises(TornUpdateError):
            engine.apply([record], V2)
    assert engine.held() is None


@pytest.mark.parametrize("is_publishing_both", [False, True])
def test_a_tied_model_follows_a_run(is_publishing_both: bool) -> None:
    from syncline import MemoryStore, Publisher, Receiver

    trainer, served, store = Tied(), Tied(), MemoryStore()
    weights = dict(trainer.state_dict())
    if not is_publishing_both:
        del weights["lm_head.weight"]
    publisher = Publisher(store)
    receiver = Receiver(store, TorchModule(served), verify="full")
    for place in range(3):
        with torch.no_grad():
            trainer.embed.weight[place] += 1
        publisher.publish(weights)
        receiver.sync()
        for name, tensor in trainer.state_dict().items():
            assert torch.equal(served.state_dict()[name], tensor)


@pytest.mark.gpu
@pytest.mark.parametrize("is_strided", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn", "bool", "int64"])
def test_tensors_on_a_gpu(dtype: str, is_strided: bool) -> None:
    raw = torch.arange(256, dtype=torch.uint8)
    weight = raw.view(getattr(torch, dtype)).reshape(4, -1).cuda()
    module = torch.nn.Module()
    module.register_buffer("w", weight.T if is_strided else weight)
    pointer = module.w.data_ptr()
    engine = TorchModule(module)
    expected = engine.view("w").copy()
    last = expected.size - 1
    engine.apply([flip(engine, "w", 0, 5, last)], V1)
    expected[[0, 5, last]] ^= 1
    assert np.array_equal(engine.view("w"), expected)
    dense = Record("w", 2, None, expected[2:9].copy(), expected[2:9] ^ expected.dtype.type(3))
    engine.apply([dense], V2)
    expected[2:9] ^= expected.dtype.type(3)
    assert np.array_equal(engine.view("w"), expected)
    assert module.w.data_ptr() == pointer


@pytest.mark.parametrize("full", [False, True])
def test_tied_module_refuses_a_version_whose_ends_have_come_apart(full: bool) -> None:
    weights = {name: value.clone() for name, value in Tied().state_dict().items()}
    store, module = MemoryStore(), Tied()
    engine = TorchModule(module)
    publisher = Publisher(store)
    publisher.publish(weights)
    Receiver(store, engine).sync()
    before = module.embed.weight.detach().clone()
    weights["lm_head.weight"][2] += 1
    publisher.publish(weights, full=full)
    with pytest.raises(LayoutError, match="tied in the module, but version 2"):
        Receiver(store, engine).sync()
    assert engine.held().version == 1
    assert torch.equal(module.embed.weight, before)
    weights["embed.weight"][2] += 1
    publisher.publish(weights)
    with pytest.raises(
        LayoutError, match="tied"
    ):  # from version 1 on the way leads through version 2
        Receiver(store, engine).sync(2)


def test_tied_module_follows_a_version_that_lists_both_names_alike() -> None:
    trainer, module, store = Tied(), Tied(), MemoryStore()
    publisher, engine = Publisher(store), TorchModule(module)
    for step in range(3):
        with torch.no_grad():
            trainer.embed.weight[step] += 1
        publisher.publish(trainer.state_dict())
        Receiver(store, engine, verify="full").sync()
        assert torch.equal(module.lm_head.weight, trainer.embed.weight)
