"""Orders of packed experts, and what is refused, without a vLLM."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from syncline.errors import LayoutError
from syncline.vllm.packed import ExpertOrder
from syncline.vllm.placement import learn_worker


def blocked(stack: torch.Tensor) -> torch.Tensor:
    """Rows in blocks of 4, columns of a block together."""
    experts, rows, columns = stack.shape
    return stack.view(experts, rows // 4, 4, columns).transpose(2, 3).contiguous()


def padded(stack: torch.Tensor) -> torch.Tensor:
    wide = torch.zeros(stack.shape[0], stack.shape[1] + 4, stack.shape[2], dtype=stack.dtype)
    wide[:, : stack.shape[1]] = stack
    return blocked(wide)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("pack", [blocked, padded])
@pytest.mark.parametrize("shape", [(3, 8, 6), (2, 256, 160)])
def test_an_order_is_learned(
    dtype: torch.dtype, pack: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...]
) -> None:
    order = ExpertOrder(pack, torch.empty(shape, dtype=dtype, device="meta"))
    stack = torch.randn(shape).to(dtype)
    packed = pack(stack).reshape(-1)
    assert packed.numel() == order.packed_count
    places = order[np.arange(stack.numel())]
    assert torch.equal(packed[torch.from_numpy(places)], stack.reshape(-1))


@pytest.mark.parametrize(
    "pack",
    [
        pytest.param(lambda s: (s.float() * 2).to(s.dtype), id="scaled"),
        pytest.param(lambda s: s[:, :4], id="cut"),
        pytest.param(lambda s: s.flip(0) if len(s) > 1 else s, id="experts reversed"),
        pytest.param(lambda s: torch.cat([s, s], 1), id="twice"),
    ],
)
def test_what_is_no_order_within_each_expert_is_refused(
    pack: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    with pytest.raises(LayoutError, match="packed experts"):
        ExpertOrder(pack, torch.empty(3, 8, 6, device="meta"))


class Fp8LinearMethod:
    """Has the name of vLLM's."""


class CompressedTensorsLinearMethod:
    """Has the name of vLLM's."""


@pytest.mark.parametrize("method", [Fp8LinearMethod, CompressedTensorsLinearMethod])
def test_quantised_layers_are_refused(method: type) -> None:
    """FP8 and INT8: vLLM's own reload of the latter corrupts in silence, so nothing may rely on it."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model[0].quant_method = method()
    with pytest.raises(LayoutError, match=method.__name__):
        learn_worker(model, [])
