"""Into how many parts a delta goes, and where each ends."""

from __future__ import annotations

import pytest

from syncline.sync.delta import part_ends

MIB = 1 << 20


@pytest.mark.parametrize("is_wide", [False, True])
def test_a_small_model_is_one_part(is_wide: bool) -> None:
    assert part_ends(100 * MIB, 4 << 30, is_wide=is_wide) == [100 * MIB]
    assert len(part_ends(0, 4 << 30, is_wide=is_wide)) == 1


def test_parts_are_equal_where_puts_wait_for_each_other() -> None:
    assert part_ends(300, 100, is_wide=False) == [100, 200, 300]


def test_over_a_link_the_last_parts_are_ever_smaller() -> None:
    ends = part_ends(800 * MIB, 4 << 30, is_wide=True)
    sizes = [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    assert [size / MIB for size in sizes] == [*[100.0] * 7, 50.0, 25.0, 25.0]
    assert ends[-1] == 800 * MIB
