"""The kernels of `tight` on every instruction set equal plain numpy, bit for bit, errors included."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import CodecError
from syncline.kernels import (
    _native,
    native,
    reference,
    tight_native,
    tight_reference,
    values_reference,
)
from syncline.kernels.tight import ClassEntry, Classes
from syncline.types import Bits

FIELDS = [(2, 7, 0xFF), (2, 10, 0x1F), (4, 23, 0xFF), (8, 52, 0x7FF), (1, 3, 0xF), (1, 2, 0x1F)]


@pytest.fixture(params=_native.available_isas(), autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _native.selected_isa()
    assert native.choose_isa(request.param) == request.param
    yield request.param
    native.choose_isa(before)


@st.composite
def windows(draw: st.DrawFn) -> tuple[Bits, Bits, Classes]:
    """Base and new bits at any alignment, with classes that may or may not fit to them."""
    width, shift, mask = draw(st.sampled_from([*FIELDS, (4, 0, 0)]))
    count = draw(st.sampled_from([0, 1, 63, 64, 65, 127, 128]) | st.integers(0, 3000))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    classes = Classes(shift, mask, draw(st.integers(0, mask)), draw(st.integers(1, 16)))
    raw = np.frombuffer(rng.bytes(count * width + 7), np.uint8)
    start = draw(st.integers(0, 7))
    base = raw[start : start + count * width].view(f"<u{width}")
    if draw(st.booleans()):
        near = (classes.lowest + rng.integers(0, 4, count)) & mask
        field = base.dtype.type(mask) << base.dtype.type(shift)
        base = base & ~field | near.astype(base.dtype) << base.dtype.type(shift)
    steps = rng.choice([1, -1, 2, 9, -300], count, p=[0.4, 0.4, 0.1, 0.06, 0.04])
    is_changed = rng.random(count) < draw(st.sampled_from([0.0, 0.01, 0.2, 0.7, 1.0]))
    return base, np.where(is_changed, base + steps.astype(base.dtype), base), classes


def outcome(call: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a kernel returns or, as text, refuses."""
    try:
        return [part.tolist() for part in call(*arguments)]
    except CodecError as error:
        return str(error)


def entries_of(
    data: st.DataObject, ranked: Any, zigzag: Bits
) -> tuple[list[ClassEntry], np.ndarray]:
    """Draw how the lists of each class are told; return it with the marks."""
    entries, marks = [], [np.empty(0, np.uint32)]
    members, changes, ranks, _ = ranked
    start = 0
    for size, count in zip(members.tolist(), changes.tolist(), strict=True):
        stop = start + count
        large = int(np.count_nonzero(zigzag[start:stop] > 2))
        others, small = data.draw(st.booleans()), data.draw(st.booleans())
        if not count:
            entries.append(ClassEntry())
            continue
        changed = np.isin(np.arange(size), ranks[start:stop])
        marks.append(np.flatnonzero(changed != others).astype(np.uint32))
        bits = data.draw(st.tuples(st.integers(0, 24), st.integers(0, 24), st.integers(0, 6)))
        large_marks = (count - large if small else large) if large else 0
        entry = ClassEntry(count, marks[-1].size, bits[0], others, large)
        told = {"large_marks": large_marks, "run_bits": bits[1], "small_marked": small}
        entries.append(entry._replace(**told, excess_bits=bits[2]) if large else entry)
        start = stop
    return entries, np.concatenate(marks)


@given(window=windows(), data=st.data())
def test_every_kernel(window: tuple[Bits, Bits, Classes], data: st.DataObject) -> None:
    base, new, classes = window
    offsets, old_bits, new_bits = reference.diff(base.copy(), new, refresh=False)
    ranked = tight_reference.rank_changes(new, offsets, old_bits, classes)
    arguments = new, offsets, old_bits, classes
    assert outcome(tight_native.rank_changes, *arguments) == [part.tolist() for part in ranked]
    zigzag = values_reference.steps(old_bits, new_bits)[ranked[3]]
    entries, marks = entries_of(data, ranked, zigzag)
    unary, fields = tight_reference.write_lists(entries, marks, zigzag)
    found = outcome(tight_native.write_lists, entries, marks, zigzag)
    assert found == [unary.tolist(), fields.tolist()]
    read = outcome(tight_native.read_lists, entries, unary, fields, base.size, base.itemsize)
    assert read == [marks.tolist(), zigzag.tolist()]
    places = outcome(tight_native.find_changes, base, classes, entries, marks)
    assert places == outcome(tight_reference.find_changes, base, classes, entries, marks)
    assert places[0] == offsets.tolist()


@given(window=windows(), data=st.data())
def test_damaged_bits(window: tuple[Bits, Bits, Classes], data: st.DataObject) -> None:
    base, new, classes = window
    offsets, old_bits, new_bits = reference.diff(base.copy(), new, refresh=False)
    ranked = tight_reference.rank_changes(new, offsets, old_bits, classes)
    zigzag = values_reference.steps(old_bits, new_bits)[ranked[3]]
    entries, marks = entries_of(data, ranked, zigzag)
    rows = []
    for row in tight_reference.write_lists(entries, marks, zigzag):
        damaged = bytearray(row.tobytes())
        for _ in range(data.draw(st.integers(0, 2))):
            place = data.draw(st.integers(0, len(damaged)))
            damaged[place : place + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
        rows.append(np.frombuffer(bytes(damaged), np.uint8))
    arguments = entries, *rows, base.size, base.itemsize
    read, wanted = (
        outcome(kernels.read_lists, *arguments) for kernels in (tight_native, tight_reference)
    )
    # Where several things are wrong, which of them is said may differ.
    assert isinstance(read, str) == isinstance(wanted, str)
    if isinstance(read, str):
        return
    assert read == wanted
    arguments = base, classes, entries, np.array(read[0], np.uint32)
    places, wanted = (
        outcome(kernels.find_changes, *arguments) for kernels in (tight_native, tight_reference)
    )
    assert isinstance(places, str) == isinstance(wanted, str)
    assert isinstance(places, str) or places == wanted


@pytest.mark.parametrize("offsets", [[5, 5, 6], [5, 4, 6], [70, 5, 80], [1, 2, 200], [1, 199, 198]])
def test_offsets_that_do_not_rise(offsets: list[int]) -> None:
    units, old_bits = np.zeros(200, np.uint16), np.zeros(3, np.uint16)
    arguments = units, np.array(offsets, np.uint32), old_bits, Classes(7, 255, 0, 16)
    refused = outcome(tight_native.rank_changes, *arguments)
    assert isinstance(refused, str)
    assert refused == outcome(tight_reference.rank_changes, *arguments)
