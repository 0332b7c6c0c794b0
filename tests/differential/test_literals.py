"""The native writer of literals makes the same frames as the plain one, and zstd reads them."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import LayoutError
from syncline.format import zstd
from syncline.kernels import literals, literals_native, literals_reference
from syncline.kernels.literals_reference import code_lengths

BLOCK = 1 << 17
SIZES = [0, 1, 255, 256, 257, 1000, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 300]


def check(data: np.ndarray) -> bytes:
    frame = literals_native.compress(data)
    assert frame is not None
    assert frame == literals_reference.compress(data)
    assert zstd.decompress_exactly(frame, "frame", data.size) == data.tobytes()
    return frame


@given(
    size=st.sampled_from(SIZES) | st.integers(0, 5000),
    share=st.sampled_from([0.001, 0.05, 0.2, 0.4, 0.7, 0.99]),
    highest=st.integers(0, 128),
    seed=st.integers(0, 2**32),
)
def test_symbols(size: int, share: float, highest: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    symbols = np.minimum(rng.geometric(share, size) - 1, highest).astype(np.uint8)
    check(rng.permutation(129).astype(np.uint8)[symbols] if seed % 2 else symbols)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("symbol", [0, 77, 128])
def test_one_symbol(size: int, symbol: int) -> None:
    frame = check(np.full(size, symbol, np.uint8))
    assert len(frame) <= 10 + 4 * (size // BLOCK + 1) + 255


def test_codes_that_would_be_longer_than_eleven_bits() -> None:
    # Counts like Fibonacci's make the longest codes that there are.
    counts = [1, 1]
    while sum(counts) < BLOCK // 2:
        counts.append(counts[-1] + counts[-2])
    symbols = np.repeat(np.arange(len(counts), dtype=np.uint8), counts)
    lengths = code_lengths(counts)
    assert max(lengths) == 11
    assert sum(2.0**-length for length in lengths) == 1
    check(np.random.default_rng(0).permutation(symbols))


@given(st.lists(st.integers(0, 10_000), min_size=2, max_size=129))
def test_codes_are_whole_and_near_the_entropy(counts: list[int]) -> None:
    used = [count for count in counts if count]
    if len(used) < 2:
        return
    lengths = code_lengths(counts)
    assert all((length > 0) == (count > 0) for length, count in zip(lengths, counts, strict=True))
    assert sum(2.0**-length for length in lengths if length) == 1
    shares = np.array(used) / sum(used)
    entropy = float(-(shares * np.log2(shares)).sum())
    mean = sum(length * count for length, count in zip(lengths, counts, strict=True)) / sum(used)
    assert entropy - 1e-9 <= mean <= entropy + 1


@given(symbol=st.integers(129, 255), place=st.integers(0, BLOCK + 999))
def test_a_byte_above_128_has_no_short_description(symbol: int, place: int) -> None:
    data = np.zeros(BLOCK + 1000, np.uint8)
    data[place] = symbol
    assert literals_native.compress(data) is None
    assert literals_reference.compress(data) is None


def test_noise_is_stored_as_it_is() -> None:
    data = np.random.default_rng(0).integers(0, 129, 3 * BLOCK, np.uint8)
    frame = check(data)
    assert len(frame) < data.size
    flat = np.random.default_rng(0).integers(0, 128, 300, np.uint8)
    assert len(check(flat)) == 10 + 3 + flat.size


def test_the_door_takes_bytes_only() -> None:
    with pytest.raises(LayoutError, match="uint8, not 3 of uint16"):
        literals.compress(np.zeros(3, np.uint16))
    assert literals.compress(np.zeros(3, np.uint8)) is not None


def test_frames_do_not_depend_on_where_the_bytes_lie() -> None:
    symbols = np.random.default_rng(0).geometric(0.3, 3001).astype(np.uint8)
    assert len({literals.compress(symbols[shift : shift + 2990]) for shift in (0, 0)}) == 1
    moved = np.concatenate([np.zeros(3, np.uint8), symbols])[3:]
    assert literals.compress(moved) == literals.compress(symbols)
    frame = literals.compress(symbols)
    assert frame is not None
    assert zstandard.get_frame_parameters(frame).window_size == BLOCK
