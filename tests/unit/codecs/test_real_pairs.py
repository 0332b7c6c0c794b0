"""Every codec on weights that training changed, not arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
from pair_statistics import statistics
from rival_layouts import exponent_bound_bytes, uniform_bound_bytes

import syncline
from contracts.codecs import apply, encode
from real_pairs import LATER, checkpoint, pair
from syncline import codecs
from syncline.types import WINDOW_UNITS


@pytest.mark.parametrize("later", LATER)
@pytest.mark.parametrize("window_units", [1000, WINDOW_UNITS])
@pytest.mark.parametrize("name", codecs.NAMES)
def test_what_training_changed_comes_back_bit_for_bit(
    name: str, window_units: int, later: str
) -> None:
    codec = codecs.get(name)
    for meta, old, new in pair(later):
        payload = encode(codec, meta, old, new, window_units)
        assert (apply(old, codec.decode(meta, payload, old)) == new).all()


@pytest.mark.parametrize("later", LATER)
@pytest.mark.parametrize("name", codecs.NAMES)
def test_an_engine_ends_with_the_trained_bits(name: str, later: str) -> None:
    store, engine = syncline.MemoryStore(), syncline.MemoryEngine()
    publisher = syncline.Publisher(store, encoding=name)
    receiver = syncline.Receiver(store, engine, verify="full")
    for step in ("old", later):
        publisher.publish(checkpoint(step))
        receiver.sync()
    for meta, bits in checkpoint(later).tensors():
        assert (engine.view(meta.name) == bits).all()


@pytest.mark.parametrize("later", LATER)
def test_the_exponent_makes_tight_smaller_than_uniform_places_allow(later: str) -> None:
    # One tensor of all: tables of classes for each small matrix would drown what is measured.
    matrices = [(old, new) for _, old, new in pair(later) if old.size > 1000]
    old, new = (np.concatenate(side) for side in zip(*matrices, strict=True))
    meta = syncline.TensorMeta("all", "BF16", old.shape)
    sizes = {
        name: len(encode(codecs.get(name), meta, old, new, WINDOW_UNITS))
        for name in ("tight", "packed", "xor")
    }
    uniform, given_exponent = uniform_bound_bytes([(old, new)]), exponent_bound_bytes([(old, new)])
    assert given_exponent < sizes["tight"] < 0.9 * uniform
    assert sizes["tight"] < 1.15 * given_exponent
    assert uniform < sizes["packed"] < 1.15 * uniform
    assert sizes["xor"] > 2 * sizes["tight"]


def test_the_asset_is_what_it_says() -> None:
    densities = []
    for later in LATER:
        found = statistics((meta.name, old, new) for meta, old, new in pair(later))
        densities.append(found.density)
        # Each octave below is more likely to change: that is what `tight` lives on.
        likely = [
            moved / count
            for _, (count, moved) in sorted(found.by_exponent.items())
            if count > 10_000
        ]
        assert likely == sorted(likely, reverse=True)
        assert len(likely) >= 4
    assert 0.004 < densities[0] < 0.012
    assert 0.02 < densities[1] < 0.06
