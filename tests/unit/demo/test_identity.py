from __future__ import annotations

import hashlib

import pytest

from syncline.demo.identity import differences, live_tensors, sha256_by_name

torch = pytest.importorskip("torch")


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(4, 3, dtype=torch.bfloat16)
        self.head = torch.nn.Linear(3, 4, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight
        self.register_buffer("kept", torch.tensor([-0.0], dtype=torch.bfloat16))
        self.register_buffer("rotary", torch.ones(2), persistent=False)


def test_tied_parameters_are_listed_once_and_only_persistent_buffers_are() -> None:
    model = Tied()
    live = live_tensors(model)
    assert list(live) == ["embed.weight", "kept"]
    assert live["embed.weight"].data_ptr() == model.head.weight.data_ptr()


def test_the_digest_is_of_the_bytes_in_element_order() -> None:
    tensor = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int16)
    found = sha256_by_name([("a", tensor), ("b", tensor.T), ("scalar", torch.tensor(7.0))])
    assert found["a"] == hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
    assert found["b"] == hashlib.sha256(tensor.T.contiguous().numpy().tobytes()).hexdigest()
    assert found["scalar"] == hashlib.sha256(torch.tensor([7.0]).numpy().tobytes()).hexdigest()


def test_one_flipped_bit_is_found_also_the_sign_of_zero() -> None:
    weights = {"w": torch.zeros(100, dtype=torch.bfloat16), "v": torch.ones(3)}
    before = sha256_by_name(weights.items())
    weights["w"][57] = -0.0
    found = differences(before, sha256_by_name(weights.items()))
    assert list(found) == ["w"]
    assert before["w"] in found["w"]


def test_missing_and_foreign_tensors_are_differences() -> None:
    assert differences({"a": "0"}, {}) == {"a": "missing in the engine"}
    assert differences({}, {"a": "0"}) == {"a": "not known to the trainer"}
    assert differences({"a": "0"}, {"a": "0"}) == {}
