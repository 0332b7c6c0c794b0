"""Sizes of buckets, and the three faults of checkpoint-engine's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import ConfigError
from syncline.hosts.sizing import ALIGN_BYTES, Buckets, size_buckets

GIB = 1 << 30


def test_never_larger_than_the_checkpoint():
    """checkpoint-engine: a 4 MiB checkpoint with 100 GiB free gets buckets of 8 GiB."""
    assert size_buckets([100 * GIB], 4 << 20) == Buckets(4 << 20, 2)
    assert size_buckets([100 * GIB], 1) == Buckets(ALIGN_BYTES, 2)


def test_a_limit_that_is_no_round_number_is_aligned():
    """checkpoint-engine: 0.3 GiB makes every bf16 update fail."""
    found = size_buckets([100 * GIB], 10 * GIB, limit_bytes=322122547)
    assert found.nbytes % ALIGN_BYTES == 0 and found.nbytes <= 322122547


def test_one_bucket_when_memory_is_short_and_an_error_when_there_is_none():
    assert size_buckets([5 << 20, 3 << 20], GIB, least_bytes=1 << 20) == Buckets(3 << 19, 1)
    assert size_buckets([4 << 20], GIB, least_bytes=1 << 20) == Buckets(1 << 20, 2)
    assert size_buckets([1024], GIB) == Buckets(512, 1)
    with pytest.raises(ConfigError, match="no bucket fits"):
        size_buckets([100], GIB)
    for wrong in ({"share": 0.0}, {"share": 1.5}, {"limit_bytes": 3}):
        with pytest.raises(ConfigError):
            size_buckets([GIB], GIB, **wrong)
    with pytest.raises(ConfigError):
        size_buckets([], GIB)


@given(
    st.lists(st.integers(0, 1 << 40), min_size=1, max_size=5),
    st.integers(0, 1 << 42),
    st.floats(0.01, 1.0),
    st.integers(ALIGN_BYTES, 1 << 34),
)
def test_what_holds_of_any_bucket(free, checkpoint, share, limit):
    try:
        found = size_buckets(free, checkpoint, share=share, limit_bytes=limit)
    except ConfigError:
        assert int(min(free) * share) < ALIGN_BYTES
        return
    assert found.count in (1, 2) and found.nbytes % ALIGN_BYTES == 0 < found.nbytes
    assert found.count * found.nbytes <= min(free) * share
    assert (
        found.nbytes <= max(limit, ALIGN_BYTES) and found.nbytes < max(1, checkpoint) + ALIGN_BYTES
    )
