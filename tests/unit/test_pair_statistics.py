"""The benchmarks' counts, against counts that are as plain as can be."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import rival_layouts
from hypothesis import given
from hypothesis import strategies as st
from pair_statistics import GAP_LIMITS, kind_of, statistics, step_class

from contracts.codecs import encode
from real_pairs import LATER, pair
from syncline import codecs
from syncline.types import WINDOW_UNITS

BITS = st.sampled_from([0x0000, 0x8000, 0x3F80, 0x3F81, 0xBF80, 0x7F80, 0x7FC0, 0x0001, 0x4080])


def plain_step(old: int, new: int) -> str:
    if old >> 15 != new >> 15:
        return "flip"
    ulps = abs((old & 0x7FFF) - (new & 0x7FFF))
    classes = {"1": 1, "2": 2, "3-4": 4, "5-8": 8, "9-16": 16, "17-127": 127}
    return next((name for name, most in classes.items() if ulps <= most), "above 127")


def check(tensors: list[tuple[str, np.ndarray, np.ndarray]]) -> None:
    """Compare with a count one element at a time."""
    found = statistics(tensors)
    steps: Counter[str] = Counter()
    exponents: dict[int, list[int]] = {}
    kinds: dict[str, list[int]] = {}
    gaps, elements, low, high = [], 0, 0, 0
    for name, old, new in tensors:
        last = -1
        for place, (a, b) in enumerate(zip(old.tolist(), new.tolist(), strict=True)):
            elements += 1
            exponent = exponents.setdefault((a >> 7 & 0xFF) - 127, [0, 0])
            kind = kinds.setdefault(kind_of(name), [0, 0])
            exponent[0] += 1
            kind[0] += 1
            if a != b:
                exponent[1] += 1
                kind[1] += 1
                steps[plain_step(a, b)] += 1
                low += a >> 8 == b >> 8
                high += a & 0xFF == b & 0xFF
                gaps.append(place - last)
                last = place
    assert (found.elements, found.changed) == (elements, len(gaps))
    assert found.sign_flips == steps.pop("flip", 0)
    assert found.steps == steps
    assert (found.low_byte_only, found.high_byte_only) == (low, high)
    assert found.by_exponent == exponents
    assert found.by_kind == kinds
    assert found.largest_gap == max(gaps, default=0)
    assert found.gaps_above == {limit: sum(gap > limit for gap in gaps) for limit in GAP_LIMITS}
    assert sum(found.as_json()["steps"].values()) + found.sign_flips == found.changed


@pytest.mark.parametrize("later", LATER)
def test_trained_weights_are_counted_right(later: str) -> None:
    check([(meta.name, old, new) for meta, old, new in pair(later)])


@given(st.lists(st.tuples(BITS, BITS), min_size=1, max_size=60))
def test_any_bits_are_counted_right(elements: list[tuple[int, int]]) -> None:
    old, new = (np.array(side, np.uint16) for side in zip(*elements, strict=True))
    check([("model.norm.weight", old, new), ("lm_head.weight", new, old)])


def test_a_gap_beyond_16_bits_is_counted() -> None:
    old = np.zeros(200_000, np.uint16)
    new = old.copy()
    new[[70_000, 70_001, 140_000]] = 1
    found = statistics([("w", old, new)])
    assert (found.largest_gap, found.gaps_above) == (70_001, {255: 2, 65_535: 2})


def test_every_class_of_steps_has_a_name_of_its_own() -> None:
    assert [step_class(index) for index in range(7)] == [
        "1", "2", "3-4", "5-8", "9-16", "17-127", "above 127",
    ]  # fmt: skip


def test_kinds_follow_the_names_of_dense_and_moe_models() -> None:
    assert kind_of("model.layers.3.mlp.experts.gate_up_proj") == "expert"
    assert kind_of("model.layers.3.mlp.gate.weight") == "router"
    assert kind_of("model.layers.3.mlp.gate_proj.weight") == "mlp gate"
    assert kind_of("model.layers.3.self_attn.q_norm.weight") == "norm"
    assert kind_of("something.else") == "other"


@pytest.mark.parametrize("later", LATER)
def test_layouts_of_others_are_counted_as_our_own_writers_of_them_count(later: str) -> None:
    tensors = [(meta, old, new) for meta, old, new in pair(later) if (old != new).any()]
    pairs = [(old, new) for _, old, new in tensors]
    for name, layout in (
        ("xor", rival_layouts.slime_xor),
        ("overwrite", rival_layouts.slime_overwrite),
    ):
        codec = codecs.get(name)
        ours = sum(len(encode(codec, meta, old, new, WINDOW_UNITS)) for meta, old, new in tensors)
        # A frame from a stream of known size may state it in another width.
        assert abs(layout(pairs) - ours) <= 16 * len(pairs)
    assert rival_layouts.trl(pairs) == 6 * sum(np.count_nonzero(old != new) for old, new in pairs)


def test_bounds_of_a_tensor_that_can_be_reckoned_by_hand() -> None:
    old = np.full(1024, 0x3F80, np.uint16)
    new = old.copy()
    new[::4] += 1
    new[2::8] -= 1
    # 384 of 1024 change: 1024 x H(3/8) bits; two steps up for each down: 384 x H(1/3) bits.
    expected = 1024 * 0.954434 + 384 * 0.918296
    assert rival_layouts.uniform_bound_bytes([(old, new)]) * 8 == pytest.approx(expected, rel=1e-5)
    assert rival_layouts.exponent_bound_bytes([(old, new)]) == pytest.approx(expected / 8, rel=1e-5)
    mixed_old, mixed_new = np.tile(old, 2), np.concatenate([new, old])
    mixed_old[1024:] = mixed_new[1024:] = 0x4080
    uniform = rival_layouts.uniform_bound_bytes([(mixed_old, mixed_new)])
    given_exponent = rival_layouts.exponent_bound_bytes([(mixed_old, mixed_new)])
    assert given_exponent == pytest.approx(expected / 8, rel=1e-5)
    assert uniform > 1.1 * given_exponent
