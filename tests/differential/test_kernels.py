"""Every instruction set equals the scalar kernels, and these equal plain numpy, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline import kernels
from syncline.errors import CodecError, ConfigError
from syncline.kernels import _native, native, reference, values_native, values_reference

ISAS = _native.available_isas()
SEEDS = kernels.seeds("model.layers.0.weight")
EDGES = [0, 1, 31, 63, 64, 65, 127, 128, 1023, 1024, 1025, 2048, 3000]


@pytest.fixture(params=ISAS, autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _native.selected_isa()
    assert native.choose_isa(request.param) == request.param
    yield request.param
    native.choose_isa(before)


def test_the_scalar_kernels_are_always_there() -> None:
    assert ISAS[0] == "scalar"


@st.composite
def pairs(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Old and new bits of one width, at any alignment, with any share of changes."""
    width = draw(st.sampled_from([1, 2, 4, 8]))
    count = draw(st.sampled_from(EDGES) | st.integers(0, 5000))
    share = draw(st.sampled_from([0.0, 0.001, 0.01, 0.05, 0.3, 0.9, 1.0]))
    shift = draw(st.integers(0, 7))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    raw = rng.integers(0, 256, (2, count * width + shift), np.uint8)
    old, new = (row[shift:].view(f"<u{width}") for row in raw)
    keep = rng.random(count) >= share
    new[keep] = old[keep]
    return old, new


@given(pair=pairs(), refresh=st.booleans())
def test_diff(pair: tuple[np.ndarray, np.ndarray], refresh: bool) -> None:
    old, new = pair
    mine, theirs = old.copy(), old.copy()
    found = native.diff(mine, new, refresh=refresh)
    wanted = reference.diff(theirs, new, refresh=refresh)
    for left, right in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(left, right, strict=True)
    np.testing.assert_array_equal(mine, theirs)
    if refresh:
        np.testing.assert_array_equal(mine, new)


def test_diff_of_more_changes_than_it_makes_room_for_at_first() -> None:
    rng = np.random.default_rng(0)
    old = rng.integers(0, 9, 1_000_003, np.uint16)
    new = rng.integers(0, 9, 1_000_003, np.uint16)
    for left, right in zip(
        native.diff(old, new, refresh=False),
        reference.diff(old, new, refresh=False),
        strict=True,
    ):
        np.testing.assert_array_equal(left, right, strict=True)


@given(pair=pairs())
def test_xor_and_plain_reads(pair: tuple[np.ndarray, np.ndarray]) -> None:
    old, new = pair
    np.testing.assert_array_equal(native.xor(old, new), reference.xor(old, new), strict=True)
    assert native.read_words(old, new) == reference.read_words(old, new)


@given(pair=pairs(), rotated=st.booleans(), shift=st.integers(0, 9))
def test_planes(pair: tuple[np.ndarray, np.ndarray], rotated: bool, shift: int) -> None:
    bits, _ = pair
    planes = native.split_planes(bits, rotated=rotated)
    np.testing.assert_array_equal(planes, reference.split_planes(bits, rotated=rotated))
    apart = [np.concatenate([np.zeros(shift, np.uint8), plane])[shift:] for plane in planes]
    np.testing.assert_array_equal(native.join_planes(apart, rotated=rotated), bits, strict=True)


@st.composite
def blocks(draw: st.DrawFn) -> tuple[list[tuple[int, int, int]], int, int]:
    """Axes whose strides fall, with or without holes, and where the block begins on both sides."""
    axes: list[tuple[int, int, int]] = []
    span = 1
    for _ in range(draw(st.integers(0, 4))):
        stride = span + draw(st.sampled_from([0, 0, 1, 5]))
        count = draw(st.integers(1, 6))
        axes.insert(0, (stride, count, draw(st.integers(0, 50))))
        span = max(stride, span + (count - 1) * stride)
    return axes, draw(st.integers(0, 200)), draw(st.integers(0, 2**40))


@given(
    block=blocks(),
    width=st.sampled_from([1, 2, 4, 8]),
    seed=st.integers(0, 2**32),
    rise=st.booleans(),
)
def test_positions_through_a_block(
    block: tuple[list[tuple[int, int, int]], int, int], width: int, seed: int, rise: bool
) -> None:
    axes, first, other = block
    rng = np.random.default_rng(seed)
    positions = rng.permutation(2500)[: rng.integers(0, 2500)].astype(np.int64)
    if rise:
        positions.sort()
    bits = rng.integers(0, 256, positions.size * width, np.uint8).view(f"<u{width}")
    held = {first: other}
    for stride, count, side in axes:
        held = {
            here + i * stride: there + i * side
            for here, there in held.items()
            for i in range(count)
        }
    wanted = [
        (held[p], b) for p, b in zip(positions.tolist(), bits.tolist(), strict=True) if p in held
    ]
    for mine in (native, reference):
        mapped, moved = mine.map_positions(positions, bits, axes, first, other)
        assert mapped.dtype == np.int64
        assert moved.dtype == bits.dtype
        assert list(zip(mapped.tolist(), moved.tolist(), strict=True)) == wanted


@given(positions=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=50), block=blocks())
def test_any_positions_are_mapped_or_left_out(
    positions: list[int], block: tuple[list[tuple[int, int, int]], int, int]
) -> None:
    places, bits = np.array(positions, np.int64), np.arange(len(positions), dtype=np.uint16)
    axes, first, other = block
    last = first + sum((count - 1) * stride for stride, count, _ in axes)
    mapped, moved = kernels.map_positions(places, bits, axes, first, other)
    assert mapped.size == moved.size
    assert all(first <= positions[index] <= last for index in moved.tolist())


@given(pair=pairs(), start=st.sampled_from([0, 1, 1000, 1023, 1024, 5555, 2**40 + 7]))
def test_fingerprint(pair: tuple[np.ndarray, np.ndarray], start: int) -> None:
    old, new = pair
    before = native.fingerprint(old, start, SEEDS)
    after = native.fingerprint(new, start, SEEDS)
    assert after == reference.fingerprint(new, start, SEEDS)
    changes = reference.diff(old.copy(), new, refresh=False)
    change = native.fingerprint_change(start, *changes, SEEDS)
    assert change == reference.fingerprint_change(start, *changes, SEEDS)
    assert before + change == after


@given(pair=pairs(), cut=st.integers(0, 5000))
def test_fingerprints_of_pieces_add_up(pair: tuple[np.ndarray, np.ndarray], cut: int) -> None:
    bits, _ = pair
    cut = min(cut, bits.size)
    whole = native.fingerprint(bits, 0, SEEDS)
    parts = native.fingerprint(bits[cut:], cut, SEEDS) + native.fingerprint(bits[:cut], 0, SEEDS)
    assert parts == whole


@given(pair=pairs(), data=st.data())
def test_fingerprint_notices_what_goes_wrong_in_practice(
    pair: tuple[np.ndarray, np.ndarray], data: st.DataObject
) -> None:
    bits, _ = pair
    if bits.size < 2:
        return
    good = native.fingerprint(bits, 0, SEEDS)
    i = data.draw(st.integers(0, bits.size - 1))
    stale = bits.copy()
    stale[i] ^= stale.dtype.type(1 << data.draw(st.integers(0, 8 * bits.itemsize - 1)))
    assert native.fingerprint(stale, 0, SEEDS) != good
    j = data.draw(st.integers(0, bits.size - 1))
    if bits[i] != bits[j]:
        swapped = bits.copy()
        swapped[[i, j]] = swapped[[j, i]]
        assert native.fingerprint(swapped, 0, SEEDS) != good
    shifted = np.roll(bits, 1)
    if (shifted != bits).any():
        assert native.fingerprint(shifted, 0, SEEDS) != good
    if bits.any():
        assert native.fingerprint(bits, 0, kernels.seeds("another name")) != good


@given(
    pair=pairs(), is_step=st.booleans(), reach=st.sampled_from([1, 2, 20, 2**62]), data=st.data()
)
def test_symbols(
    pair: tuple[np.ndarray, np.ndarray], is_step: bool, reach: int, data: st.DataObject
) -> None:
    old, told = pair
    values = told % min(reach, 256**old.itemsize - 1) + told.dtype.type(1)
    new = values_reference.unsteps(old, values) if is_step else reference.xor(old, values)
    mine = values_native.write_symbols(old, new, is_step=is_step)
    wanted = values_reference.write_symbols(old, new, is_step=is_step)
    assert mine[0] == wanted[0]
    for left, right in zip(mine[1:], wanted[1:], strict=True):
        np.testing.assert_array_equal(left, right, strict=True)
    bits, symbols, excess = mine
    np.testing.assert_array_equal(
        values_native.read_symbols(old, symbols, bits, excess, is_step=is_step), new, strict=True
    )
    if symbols.size:
        symbols[data.draw(st.integers(0, symbols.size - 1))] ^= data.draw(st.integers(1, 255))
    bits = data.draw(st.sampled_from([bits, 1, 2, 4, 8]))
    symbols = np.resize(symbols, -(-old.size * bits // 8))
    excess = np.resize(excess, data.draw(st.integers(0, excess.size + 1)))
    results = []
    for read in (values_native.read_symbols, values_reference.read_symbols):
        try:
            results.append(read(old, symbols, bits, excess, is_step=is_step).tolist())
        except CodecError as error:
            results.append(str(error))
    assert results[0] == results[1]


@given(pair=pairs())
def test_scatter_and_gather(pair: tuple[np.ndarray, np.ndarray]) -> None:
    old, new = pair
    offsets, old_bits, new_bits = reference.diff(old.copy(), new, refresh=False)
    np.testing.assert_array_equal(native.gather(old, offsets), old_bits, strict=True)
    target = old.copy()
    native.scatter(target, offsets, new_bits)
    np.testing.assert_array_equal(target, new)


@given(pair=pairs(), start=st.sampled_from([0, 1, 1023, 2**40 + 5]), refresh=st.booleans())
def test_diff_and_fingerprint_is_both_at_once(
    pair: tuple[np.ndarray, np.ndarray], start: int, refresh: bool
) -> None:
    old, new = pair
    mine, theirs = old.copy(), old.copy()
    found, rise = native.diff_and_fingerprint(mine, new, start, SEEDS, refresh=refresh)
    wanted, wanted_rise = reference.diff_and_fingerprint(theirs, new, start, SEEDS, refresh=refresh)
    for part, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(part, other, strict=True)
    assert rise == wanted_rise
    np.testing.assert_array_equal(mine, theirs)


@given(pair=pairs(), data=st.data())
def test_first_difference(pair: tuple[np.ndarray, np.ndarray], data: st.DataObject) -> None:
    old, _ = pair
    count = data.draw(st.integers(0, old.size))
    offsets = np.array(data.draw(st.permutations(range(old.size)))[:count], np.uint32)
    bits = old[offsets]
    assert native.first_difference(old, bits, offsets) is None
    if not count:
        return
    wrong = data.draw(st.integers(0, count - 1))
    bits[wrong] ^= 1
    bits[data.draw(st.integers(wrong, count - 1))] ^= 2
    assert native.first_difference(old, bits, offsets) == wrong
    assert reference.first_difference(old, bits, offsets) == wrong
    offsets[-1] = old.size
    for kernels_here in (native, reference):
        with pytest.raises(CodecError, match=f"offset {count - 1} of the changes is {old.size}"):
            kernels_here.first_difference(old, bits, offsets)


@given(
    offsets=st.lists(st.integers(0, 20), max_size=8), limit=st.integers(0, 22), rises=st.booleans()
)
def test_offsets_are_refused_in_the_same_words(offsets: list[int], limit: int, rises: bool) -> None:
    array = np.array(sorted(set(offsets)) if rises else offsets, np.uint32)
    said = []
    for check in (native.check_ascending, reference.check_ascending):
        try:
            said.append(check(array, limit))
        except CodecError as error:
            said.append(str(error))
    assert said[0] == said[1]


@given(pair=pairs(), low_bytes=st.sampled_from([0, 1, 2]), is_step=st.booleans(), data=st.data())
def test_changes_told_in_one_call(
    pair: tuple[np.ndarray, np.ndarray], low_bytes: int, is_step: bool, data: st.DataObject
) -> None:
    base, new = pair
    offsets, old_bits, new_bits = reference.diff(base.copy(), new, refresh=False)
    told = values_native.write_changes(offsets, low_bytes, old_bits, new_bits, is_step=is_step)
    wanted = values_reference.write_changes(offsets, low_bytes, old_bits, new_bits, is_step=is_step)
    assert told.symbol_bits == wanted.symbol_bits
    for name in ("low", "high", "symbols", "excess"):
        np.testing.assert_array_equal(getattr(told, name), getattr(wanted, name), strict=True)
    for read in (values_native.read_changes, values_reference.read_changes):
        found = read(told, offsets.size, base, is_step=is_step)
        for part, other in zip(found, (offsets, old_bits, new_bits), strict=True):
            np.testing.assert_array_equal(part, other, strict=True)
    if not offsets.size:
        return
    high, symbols = told.high.copy(), told.symbols.copy()
    data.draw(st.sampled_from([high, symbols])).data[0] ^= data.draw(st.integers(1, 255))
    broken = told._replace(high=high, symbols=symbols)
    said = []
    for read in (values_native.read_changes, values_reference.read_changes):
        try:
            found = read(broken, offsets.size, base, is_step=is_step)
            said.append([part.tolist() for part in found])
        except CodecError as error:
            said.append(str(error))
    assert said[0] == said[1]


@given(pair=pairs(), beyond=st.integers(0, 2**32 - 1))
def test_nothing_is_written_if_an_offset_is_out_of_range(
    pair: tuple[np.ndarray, np.ndarray], beyond: int
) -> None:
    old, _ = pair
    offsets = np.array([*range(min(3, old.size)), max(beyond, old.size)], np.uint32)
    if int(offsets[-1]) < old.size:
        return
    target = old.copy()
    with pytest.raises(CodecError, match="not below"):
        native.scatter(target, offsets, np.ones(offsets.size, old.dtype))
    np.testing.assert_array_equal(target, old)
    with pytest.raises(CodecError, match="not below"):
        native.gather(old, offsets)


@given(
    offsets=st.lists(st.integers(0, 2**20), unique=True, max_size=300).map(sorted),
    low_bytes=st.sampled_from([0, 1, 2]),
)
def test_gaps(offsets: list[int], low_bytes: int) -> None:
    array = np.array(offsets, np.uint32)
    low, high = values_native.encode_gaps(array, low_bytes)
    wanted_low, wanted_high = values_reference.encode_gaps(array, low_bytes)
    np.testing.assert_array_equal(low, wanted_low)
    np.testing.assert_array_equal(high, wanted_high)
    np.testing.assert_array_equal(
        values_native.decode_gaps(low, high, array.size, 2**20 + 1), array
    )


@given(
    high=st.binary(max_size=40),
    low=st.binary(max_size=80),
    count=st.integers(0, 40),
    low_bytes=st.sampled_from([0, 1, 2]),
    limit=st.integers(0, 2**32),
)
def test_any_gap_bytes_are_refused_or_give_legal_offsets(
    high: bytes, low: bytes, count: int, low_bytes: int, limit: int
) -> None:
    planes = np.resize(np.frombuffer(low or b"\0", np.uint8), (low_bytes, count))
    arguments = planes, np.frombuffer(high, np.uint8), count, limit
    try:
        offsets = kernels.decode_gaps(*arguments)
    except CodecError:
        if count <= limit and count <= len(high):
            with pytest.raises(CodecError):
                values_reference.decode_gaps(*arguments)
        return
    assert offsets.size == count
    kernels.check_ascending(offsets, limit)
    np.testing.assert_array_equal(offsets, values_reference.decode_gaps(*arguments))


@pytest.mark.parametrize("offsets", [[5, 5], [3, 2, 9], [1_000_000, 5], [0, 2**32 - 1, 7]])
@pytest.mark.parametrize("kernels_of", [values_native, values_reference])
def test_offsets_that_do_not_rise_have_no_gaps(kernels_of: ModuleType, offsets: list[int]) -> None:
    with pytest.raises(CodecError, match="must rise strictly"):
        kernels_of.encode_gaps(np.array(offsets, np.uint32), 0)


def test_offsets_may_lie_anywhere_in_memory() -> None:
    places = np.arange(0, 3000, 3, dtype=np.uint32)
    memory = np.empty(places.nbytes + 1, np.uint8)
    unaligned = memory[1:].view(np.uint32)
    unaligned[:] = places
    assert not unaligned.flags.aligned
    source = np.arange(3000, dtype=np.uint16)
    bits = native.gather(source, unaligned)
    np.testing.assert_array_equal(bits, places)
    target = np.zeros(3000, np.uint16)
    native.scatter(target, unaligned, bits)
    np.testing.assert_array_equal(target[places], places)
    zeros = np.zeros_like(bits)
    assert native.fingerprint_change(0, unaligned, zeros, bits, SEEDS) == native.fingerprint(
        target, 0, SEEDS
    )
    low, high = values_native.encode_gaps(unaligned, 1)
    np.testing.assert_array_equal(values_native.decode_gaps(low, high, places.size, 3000), places)


@pytest.mark.parametrize("name", ISAS)
def test_the_environment_forces_an_instruction_set(name: str) -> None:
    code = (
        "from syncline import kernels; import numpy as np; "
        "kernels.gather(np.zeros(1, np.uint8), np.zeros(1, np.uint32)); "
        "from syncline.kernels import _native; print(_native.selected_isa())"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "SYNCLINE_ISA": name},
    )
    assert out.stdout.strip() == name


def test_an_instruction_set_that_is_not_here_is_refused() -> None:
    missing = [name for name in ("avx2", "avx512", "neon") if name not in ISAS]
    with pytest.raises(ConfigError, match="is not available here; expected one of scalar"):
        native.choose_isa(missing[0])
