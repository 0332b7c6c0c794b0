from __future__ import annotations

import numpy as np
import pytest

from syncline.commit.journal import Journal
from syncline.commit.recorded import Recorded
from syncline.types import Record


def record(start: int, count: int) -> Record:
    old = np.zeros(count, np.uint16)
    return Record("w", start, np.arange(count, dtype=np.uint32), old, old + 1)


@pytest.mark.parametrize("memory_bytes", [0, 90, 1 << 20])
def test_records_come_back_again_and_again_from_memory_or_file(memory_bytes: int) -> None:
    given = [record(100 * index, 1 + index) for index in range(8)]
    with Recorded(memory_bytes) as recorded:
        for one in given:
            recorded.add(one)
        journal = recorded.journal()
        assert isinstance(journal, Journal) == (memory_bytes < 1 << 20)
        for _ in range(2):
            found = list(journal)
            assert [one.start for one in found] == [one.start for one in given]
            for one, other in zip(found, given, strict=True):
                assert one.offsets is not None
                assert other.offsets is not None
                assert one.offsets.tolist() == other.offsets.tolist()
                assert one.old_bits.tolist() == other.old_bits.tolist()
                assert one.new_bits.tolist() == other.new_bits.tolist()


def test_nothing_recorded_is_an_empty_journal() -> None:
    with Recorded(0) as recorded:
        assert list(recorded.journal()) == []
