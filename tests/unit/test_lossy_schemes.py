"""What the schemes of `benchmarks/lossy_schemes.py` do is what their names say."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from lossy_schemes import KEPT_SHARE, SCHEMES, Step, bits_of, ulps  # noqa: E402

from real_pairs import checkpoint  # noqa: E402


def flat(name: str) -> torch.Tensor:
    bits = np.concatenate([bits for _, bits in checkpoint(name).tensors()])
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


@pytest.fixture
def steps() -> list[tuple[torch.Tensor, torch.Tensor]]:
    names = ["old", "one_step_later", "eight_steps_later"]
    weights = [flat(name) for name in names]
    return list(pairwise(weights))


def follow(name: str, steps: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """Return what the receiver holds after each step; masters are the weights themselves."""
    held, out = steps[0][0], []
    for before, after in steps:
        held, size_bytes = SCHEMES[name](Step(held, before, after, before.float(), after.float()))
        assert size_bytes > 0
        out.append(held)
    return out


def test_exact_is_exact(steps: list) -> None:
    for held, (_, after) in zip(follow("exact (tight)", steps), steps, strict=True):
        assert (bits_of(held) == bits_of(after)).all()


def test_what_is_deferred_never_falls_behind_by_more_than_one_ulp(steps: list) -> None:
    for held, (_, after) in zip(follow("one-ulp changes deferred", steps), steps, strict=True):
        distances = ulps(held, after)
        assert distances.max() == 1
        assert distances.count_nonzero() > 0


def test_what_is_dropped_stays_dropped(steps: list) -> None:
    held = follow("one-ulp changes dropped", steps)
    (old, one), (_, eight) = steps
    kept = ulps(old, one) <= 1
    assert (bits_of(held[0])[kept.numpy()] == bits_of(old)[kept.numpy()]).all()
    assert (bits_of(held[0])[~kept.numpy()] == bits_of(one)[~kept.numpy()]).all()
    assert ulps(held[1], eight).max() > 1


@pytest.mark.parametrize("name", ["largest tenth, rest dropped", "largest tenth, rest deferred"])
def test_a_tenth_of_the_changes_is_sent(name: str, steps: list) -> None:
    held = follow(name, steps)[0]
    (old, one) = steps[0]
    changed = int((bits_of(old) != bits_of(one)).sum())
    sent = bits_of(held) != bits_of(old)
    assert sent.sum() == round(KEPT_SHARE * changed)
    moved = (one.float() - old.float()).abs().numpy()
    assert moved[sent].min() >= moved[~sent & (bits_of(old) != bits_of(one))].max()


def test_added_differences_of_one_step_are_nearly_right(steps: list) -> None:
    held = follow("BF16 difference, added", steps)[0]
    wrong = bits_of(held) != bits_of(steps[0][1])
    assert wrong.mean() < 1e-3


def test_increments_below_half_an_ulp_are_lost() -> None:
    old = torch.full((64,), 1.0, dtype=torch.bfloat16)
    small = torch.full((64,), 1e-3)
    step = Step(old, old, old, old.float(), old.float() + small)
    held, _ = SCHEMES["FP32 increments, added and rounded"](step)
    assert torch.equal(held, old)


def test_ulps_count_representable_values_across_zero() -> None:
    bits = torch.tensor([1, -32767, 0, -32768], dtype=torch.int16).view(torch.bfloat16)
    assert ulps(bits[:1], bits[1:2]).item() == 2
    assert ulps(bits[2:3], bits[3:]).item() == 0
