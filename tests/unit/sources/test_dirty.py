"""What is kept of dirty units: the first old bits, in order, in bounded memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.sources.dirty import DirtyWindow
from syncline.types import unsigned

UNITS = 300


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@given(data=st.data())
def test_the_oldest_bits_of_every_unit_are_kept(width: int, data: st.DataObject) -> None:
    window, expected = DirtyWindow(UNITS, width), {}
    for number in range(data.draw(st.integers(0, 6))):
        places = sorted(data.draw(st.sets(st.integers(0, UNITS - 1))))
        bits = np.full(len(places), number, unsigned(width))
        window.add(np.array(places, np.uint32), bits)
        expected = dict.fromkeys(places, number) | expected
        if data.draw(st.booleans()):
            window.merged()
    offsets, old_bits = window.merged()
    assert (offsets.dtype, old_bits.dtype) == (np.uint32, unsigned(width))
    assert dict(zip(offsets.tolist(), old_bits.tolist(), strict=True)) == expected
    assert offsets.tolist() == sorted(expected)


@pytest.mark.parametrize("share", [0.001, 0.01, 0.1, 0.9])
def test_places_cost_at_most_a_bit_a_unit_beside_lists_that_stay_short(share: float) -> None:
    rng, units = np.random.default_rng(1), 1 << 20
    window = DirtyWindow(units, 2)
    largest_bytes = 0
    for _ in range(30):
        places = np.flatnonzero(rng.random(units) < share / 30).astype(np.uint32)
        window.add(places, np.zeros(places.size, np.uint16))
        largest_bytes = max(largest_bytes, 6 * places.size)
        settled_bytes = units // 8 + 2 * window.merged()[0].size
        lists_bytes = max(units * 2 // 4, settled_bytes) + largest_bytes
        assert window.memory_bytes <= settled_bytes + lists_bytes


def test_many_dirty_units_are_kept_as_bits_and_old_bits() -> None:
    units = 1 << 20
    window = DirtyWindow(units, 2)
    places = np.arange(0, units, 2, dtype=np.uint32)
    for number in range(5):
        window.add(places, np.full(places.size, number, np.uint16))
    window.add(places[:1] + 1, np.full(1, 9, np.uint16))
    assert window.memory_bytes == units // 8 + 2 * places.size + 6
    offsets, old_bits = window.merged()
    np.testing.assert_array_equal(offsets, np.sort(np.append(places, np.uint32(1))))
    assert np.flatnonzero(old_bits).tolist() == [1]
