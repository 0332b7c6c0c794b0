"""What an engine asks of several trainer ranks, and when: nobody waits for what another one sends."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import pytest

from syncline.channels import MemoryInlet, MemoryOutlet
from syncline.sync.live.lanes import Lanes
from syncline.types import Bits


class Noting(MemoryInlet):
    """An inlet whose buckets are made here; notes what is asked of it."""

    def __init__(self, name: str, notes: list[str], lane: Noting | None = None) -> None:
        super().__init__(MemoryOutlet(), name=name)
        self._notes, self._next, self._told = notes, lane, name

    def channel(self) -> Any:
        return None

    def lane(self, address: str) -> Any:
        return self._next

    def buckets(self, sizes: Sequence[int]) -> Generator[Bits, None, None]:
        for number, nbytes in enumerate(sizes):
            self._notes.append(f"{self._told}{number}")
            yield np.zeros(nbytes, np.uint8)
        self._notes.append(f"{self._told} ends")


@pytest.mark.parametrize(
    ("sources", "asked"),
    [
        ([0, 1, 1, 1], ["a0", "a ends", "b0", "b1", "b2", "b ends"]),
        ([1, 0, 1, 0], ["b0", "a0", "b1", "b ends", "a1", "a ends"]),
        ([0, 0], ["a0", "a1", "a ends"]),
    ],
)
def test_a_lane_is_ended_before_the_next_bucket_of_another_is_asked_for(sources, asked):
    notes: list[str] = []
    lanes = Lanes(Noting("a", notes, Noting("b", notes)), ["there"], sources, 1.0)
    for number, _ in enumerate(lanes.buckets([8] * len(sources)), 1):
        assert len([note for note in notes if "ends" not in note]) == number
    assert notes == asked
