"""The numpy reference against plain integers, and the laws that the others build on."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline import kernels
from syncline.kernels import reference
from syncline.types import ZERO, Fingerprint

MASK = (1 << 64) - 1
WIDTHS = st.sampled_from([1, 2, 4, 8])


def splitmix(x: int) -> int:
    z = (x + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def plain_fingerprint(units: list[int], width: int, start: int, name: str) -> Fingerprint:
    """Section 5 of docs/reference/format.md, one digit after the other."""
    digest = hashlib.sha256(name.encode()).digest()
    a = b = 0
    seed_a, seed_b = (int.from_bytes(digest[i : i + 8], "little") for i in (0, 8))
    digits = [d for u in units for d in ((u & 0xFFFFFFFF, u >> 32) if width == 8 else (u,))]
    for j, digit in enumerate(digits, start * (2 if width == 8 else 1)):
        column, stride = splitmix(j & 1023), (j >> 10) * 0xD1342543DE82EF95
        row_a = splitmix((seed_a + stride) & MASK) | 1
        row_b = splitmix((seed_b + stride) & MASK) | 1
        a += row_a * ((column & 0xFFFFFFFF) | 1) * digit * digit
        b += row_b * ((column >> 32) | 1) * digit * digit
    return Fingerprint(a & MASK, b & MASK)


@st.composite
def arrays(draw: st.DrawFn, max_size: int = 60) -> np.ndarray:
    width = draw(WIDTHS)
    units = draw(st.lists(st.integers(0, (1 << 8 * width) - 1), max_size=max_size))
    return np.array(units, f"<u{width}")


@given(bits=arrays(), start=st.sampled_from([0, 3, 500, 1000, 1023, 2**40 - 20, 2**62 - 1]))
def test_fingerprint_is_what_the_format_page_says(bits: np.ndarray, start: int) -> None:
    wanted = plain_fingerprint(bits.tolist(), bits.itemsize, start, "näme")
    assert reference.fingerprint(bits, start, kernels.seeds("näme")) == wanted


def test_fingerprint_of_nothing_is_zero() -> None:
    for width in (1, 2, 4, 8):
        assert kernels.fingerprint(np.empty(0, f"<u{width}"), 5, kernels.seeds("t")) == ZERO


def test_fingerprint_notices_a_transposed_matrix_and_a_wrong_base() -> None:
    keys = kernels.seeds("t")
    matrix = np.random.default_rng(0).integers(0, 1 << 16, (48, 64), np.uint16)
    good = kernels.fingerprint(matrix.reshape(-1), 0, keys)
    turned = np.ascontiguousarray(matrix.T).reshape(-1)
    assert kernels.fingerprint(turned, 0, keys) != good
    # The engine's element is off by 3; a step of +1 leaves it off by 3, and must not look right.
    offsets, ones = np.array([7], np.uint32), np.array([1], np.uint16)
    right, wrong = np.array([100], np.uint16), np.array([103], np.uint16)
    change = kernels.fingerprint_change(0, offsets, right, right + ones, keys)
    assert kernels.fingerprint_change(0, offsets, wrong, wrong + ones, keys) != change


@given(old=arrays(), seed=st.integers(0, 2**32 - 1))
def test_steps_come_back(old: np.ndarray, seed: int) -> None:
    rng = np.random.default_rng(seed)
    new = rng.integers(0, 256, old.nbytes, np.uint8).view(old.dtype)
    zigzag = kernels.steps(old, new)
    assert zigzag.dtype == old.dtype
    np.testing.assert_array_equal(kernels.unsteps(old, zigzag), new, strict=True)


def test_every_step_of_a_byte() -> None:
    old, new = (a.astype(np.uint8).reshape(-1) for a in np.mgrid[0:256, 0:256])
    signed = (new.astype(int) - old + 128) % 256 - 128
    wanted = np.where(signed >= 0, 2 * signed, -2 * signed - 1)
    np.testing.assert_array_equal(kernels.steps(old, new), wanted)
    np.testing.assert_array_equal(kernels.unsteps(old, kernels.steps(old, new)), new)


@given(bits=arrays(), rotated=st.booleans())
def test_planes_come_back(bits: np.ndarray, rotated: bool) -> None:
    planes = reference.split_planes(bits, rotated=rotated)
    assert planes.shape == (bits.itemsize, bits.size)
    last = bits.dtype.type(8 * bits.itemsize - 1)
    units = bits << bits.dtype.type(1) | bits >> last if rotated else bits
    for place, plane in enumerate(planes):
        np.testing.assert_array_equal(plane, units >> bits.dtype.type(8 * place) & 0xFF)
    back = reference.join_planes(planes, rotated=rotated)
    np.testing.assert_array_equal(back, bits, strict=True)


@pytest.mark.parametrize(
    ("offsets", "low_bytes", "low", "high"),
    [
        ([], 0, [], []),
        ([0], 0, [], [0]),
        ([254, 510, 766], 0, [], [254, 255, 0, 255, 0]),
        ([0x12345], 1, [[0x45]], [255, 0x123 - 255]),
        ([0x12345, 0x12346], 2, [[0x45, 0], [0x23, 0]], [1, 0]),
    ],
)
def test_gaps_as_the_format_page_writes_them(
    offsets: list[int], low_bytes: int, low: list[list[int]], high: list[int]
) -> None:
    found_low, found_high = kernels.encode_gaps(np.array(offsets, np.uint32), low_bytes)
    assert found_low.shape == (low_bytes, len(offsets))
    assert found_low.tolist() == low
    assert found_high.tolist() == high
