"""What lies in the memory of a KV cache when another version comes, and who clears it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import syncline
from syncline.vllm.commit import CommitOptions, bring
from syncline.vllm.kv import KvMemory
from vllm_fakes import FakeVllm, changed, tensors

OPTIONS = CommitOptions(stage_timeout_s=10, drain_timeout_s=10, step_timeout_s=10, poll_s=0.001)


def memory(*caches):
    layers = {f"layer{at}": SimpleNamespace(kv_cache=cache) for at, cache in enumerate(caches)}
    return KvMemory({**layers, "other": SimpleNamespace(), "empty": SimpleNamespace(kv_cache=[])})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_value_that_is_no_number_is_found(dtype, value):
    full = torch.full((4, 2, 8), torch.finfo(dtype).max, dtype=dtype)
    kv = memory(torch.zeros(0, dtype=dtype), full)
    assert kv.is_finite()
    full[3, 1, 5] = value
    assert not kv.is_finite()
    kv.clear()
    assert kv.is_finite()
    assert not full.any()


def test_a_cache_that_nobody_can_tell_of_is_not_said_to_be_finite():
    assert not memory(torch.zeros(4, dtype=torch.uint8)).is_finite()
    assert not memory(torch.zeros(4, dtype=torch.float8_e4m3fn)).is_finite()
    assert memory().is_finite()


@pytest.mark.parametrize(
    ("value", "repair", "is_cleared"),
    [(1.0, False, False), (1.0, True, True), (float("nan"), False, True)],
)
def test_a_commit_clears_what_is_no_number_and_leaves_the_rest(tmp_path, value, repair, is_cleared):
    base, url = tensors(1), str(tmp_path / "run")
    publisher = syncline.Publisher(syncline.open_store(url))
    publisher.publish(base)
    publisher.publish(changed(base, 2))
    vllm = FakeVllm(base)
    bring(vllm, url, 1, OPTIONS)
    caches = [torch.ones(8), torch.ones(8)]
    caches[1][5] = value
    for session, cache in zip(vllm.sessions, caches, strict=True):
        session._kv = memory(cache)
    bring(vllm, url, 2, OPTIONS, repair=repair)
    assert caches[1].any().item() != is_cleared
    assert caches[0].any().item() != repair
