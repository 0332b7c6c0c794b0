"""What is pending between a copy and live weights that stayed behind, over several versions."""

from __future__ import annotations

import numpy as np
import pytest

import syncline
from syncline.sources import MemorySource
from syncline.types import WINDOW_UNITS, Record
from syncline.vllm.copy import HostCopy, composed, put
from vllm_fakes import as_bytes, changed, tensors


def record(name, start, offsets, old, new):
    where = None if offsets is None else np.array(offsets, np.uint32)
    return Record(name, start, where, np.array(old, np.uint32), np.array(new, np.uint32))


def plain(records):
    return [
        (r.name, r.start, r.offsets.tolist(), r.old_bits.tolist(), r.new_bits.tolist())
        for r in records
    ]


def test_a_place_that_changed_twice_keeps_its_first_old_and_its_last_new_bits():
    first = [record("w", 0, [1, 3], [10, 30], [11, 31])]
    second = [record("w", 2, [1, 5], [31, 70], [32, 71])]
    assert plain(composed(first, second)) == [("w", 0, [1, 3, 7], [10, 30, 70], [11, 32, 71])]


def test_what_ends_as_it_began_is_left_out():
    first = [record("w", 0, [1], [10], [11])]
    assert composed(first, [record("w", 0, [1], [11], [10])]) == []


def test_a_dense_record_and_windows_are_composed():
    first = [record("w", 2, None, [5, 6, 7], [5, 8, 9])]
    second = [record("w", WINDOW_UNITS, [4], [1], [2]), record("w", 0, [3], [8], [80])]
    assert plain(composed(first, second)) == [
        ("w", 0, [3, 4], [6, 7], [80, 9]),
        ("w", WINDOW_UNITS, [4], [1], [2]),
    ]


def test_other_tensors_are_passed_on():
    first, second = record("a", 0, [0], [1], [2]), record("b", 0, None, [1], [2])
    assert composed([first], [second]) == [first, second]


@pytest.mark.parametrize("encoding", ["tight", "overwrite", "full"])
def test_live_weights_follow_through_what_is_pending(tmp_path, encoding):
    weights = tensors(1)
    store = syncline.open_store(tmp_path / "run")
    publisher = syncline.Publisher(store, encoding=encoding)
    publisher.publish(weights)
    copy = HostCopy(MemorySource(weights))
    copy.follow(store, 1)
    live = {name: array.reshape(-1).view(np.uint32).copy() for name, array in weights.items()}
    assert not copy.pending
    for seed in range(2, 5):
        weights = changed(weights, seed)
        publisher.publish(weights)
        copy.follow(store, None)
    before = {name: copy.before(name).tobytes() for name in live}
    assert before == as_bytes(live)
    for entry in copy.pending:
        window = live[entry.name][entry.start :]
        where = slice(None, entry.old_bits.size) if entry.offsets is None else entry.offsets
        assert window[where].tolist() == entry.old_bits.tolist()
        put(live[entry.name], entry, entry.new_bits)
    assert as_bytes(live) == as_bytes(weights)
    copy.settle()
    assert not copy.pending
