"""Adapters merged: names of the base model, sums rounded once, and refusals. PEFT is the oracle elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from syncline import MemoryEngine, MemoryStore, Publisher, Receiver
from syncline.errors import ConfigError, LayoutError
from syncline.sources import merged_lora

torch = pytest.importorskip("torch", reason="adapters are torch modules")


class Adapted(torch.nn.Module):  # type: ignore[misc, name-defined]
    """What PEFT puts in the place of a linear layer, as far as it is looked at."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base_layer = base
        rows, columns = base.weight.shape
        self.lora_A = torch.nn.ModuleDict({"a": torch.nn.Linear(columns, 2, bias=False)})
        self.lora_B = torch.nn.ModuleDict({"a": torch.nn.Linear(2, rows, bias=False)})
        self.scaling = {"a": 0.5}
        self.active_adapters = ["a"]
        self.merged_adapters: list[str] = []
        self.lora_variant: dict[str, Any] = {}
        self.lora_bias = {"a": False}

    def get_delta_weight(self, adapter: str) -> Any:
        product = self.lora_B[adapter].weight @ self.lora_A[adapter].weight
        return product * self.scaling[adapter]


class Wrapped(torch.nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        inner = torch.nn.Module()
        inner.q_proj = Adapted(torch.nn.Linear(4, 6, dtype=torch.bfloat16))
        inner.norm = torch.nn.LayerNorm(4, dtype=torch.bfloat16)
        self.base_model = torch.nn.Module()
        self.base_model.model = inner


def test_an_adapter_is_added_and_the_model_left_alone() -> None:
    model = Wrapped()
    layer = model.base_model.model.q_proj
    before = layer.base_layer.weight.detach().clone()
    found = dict(merged_lora(model))
    assert list(found) == ["q_proj.weight", "q_proj.bias", "norm.weight", "norm.bias"]
    wanted = (before.float() + layer.get_delta_weight("a")).to(torch.bfloat16)
    assert torch.equal(found["q_proj.weight"], wanted)
    assert found["q_proj.bias"] is layer.base_layer.bias
    assert torch.equal(layer.base_layer.weight, before)
    store, engine = MemoryStore(), MemoryEngine()
    Publisher(store).publish(merged_lora(model))
    assert Receiver(store, engine, verify="full").sync().version == 1
    layer.active_adapters = []
    assert torch.equal(dict(merged_lora(model))["q_proj.weight"], before)


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("merged_adapters", ["a"], "merged \\['a'\\] already"),
        ("lora_variant", {"a": object()}, "variant of LoRA, object"),
        ("lora_bias", {"a": True}, "bias in its adapter"),
        ("parameter_name", "weight", "bare parameter"),
        ("disable_adapters", True, "disabled"),
    ],
)
def test_what_is_not_plain_is_refused(attribute: str, value: object, message: str) -> None:
    model = Wrapped()
    setattr(model.base_model.model.q_proj, attribute, value)
    with pytest.raises(LayoutError, match=message):
        next(merged_lora(model))


def test_a_module_trained_beside_the_adapters_is_refused() -> None:
    model = Wrapped()
    model.base_model.model.modules_to_save = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2)})
    with pytest.raises(LayoutError, match="beside the adapters"):
        list(merged_lora(model))
    with pytest.raises(ConfigError, match="found Linear"):
        next(merged_lora(torch.nn.Linear(2, 2)))
