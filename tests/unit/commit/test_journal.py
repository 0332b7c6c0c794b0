"""The journal: what goes in comes out, as often as one likes, and no damaged byte gets through."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterable
from typing import IO

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.commit import journal as module
from syncline.commit.journal import MAX_UNITS, Journal, JournalWriter
from syncline.errors import CommitError, FormatError
from syncline.types import Record, unsigned
from syncline.version import PartEntry


def write(records: Iterable[Record], file: IO[bytes]) -> PartEntry:
    writer = JournalWriter(file)
    for record in records:
        writer.add(record)
    return writer.finish()


def same(a: Record, b: Record) -> bool:
    offsets = (a.offsets is None) == (b.offsets is None) and (
        a.offsets is None or b.offsets is None or np.array_equal(a.offsets, b.offsets)
    )
    return (
        offsets
        and (a.name, a.start, a.new_bits.dtype) == (b.name, b.start, b.new_bits.dtype)
        and np.array_equal(a.old_bits, b.old_bits)
        and np.array_equal(a.new_bits, b.new_bits)
    )


@st.composite
def records(draw: st.DrawFn) -> Record:
    unit_bytes = draw(st.sampled_from([1, 2, 4, 8]))
    count = draw(st.integers(1, 8))
    units = st.lists(st.integers(0, 256**unit_bytes - 1), min_size=count, max_size=count)
    offsets = draw(st.none() | st.sets(st.integers(0, 2**32 - 1), min_size=count, max_size=count))
    return Record(
        draw(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=9)),
        draw(st.integers(0, 2**40)),
        None if offsets is None else np.array(sorted(offsets), np.uint32),
        np.array(draw(units), unsigned(unit_bytes)),
        np.array(draw(units), unsigned(unit_bytes)),
    )


@given(st.lists(records(), max_size=6), st.sampled_from([0, 10_000]))
def test_there_and_back(given_records: list[Record], memory_bytes: int) -> None:
    with tempfile.SpooledTemporaryFile(memory_bytes) as file:
        seal = write(given_records, file)
        for expected_seal in (None, seal):
            journal = Journal(file, "j", expected_seal)
            for _ in range(2):
                found = list(journal)
                assert len(found) == len(given_records)
                assert all(same(a, b) for a, b in zip(found, given_records, strict=True))


def sample() -> list[Record]:
    return [
        Record(
            "layer.weight",
            3,
            np.array([0, 5], np.uint32),
            np.array([1, 2], np.uint16),
            np.array([3, 4], np.uint16),
        ),
        Record("layer.bias", 0, None, np.array([9], np.uint32), np.array([8], np.uint32)),
    ]


def sample_bytes() -> bytes:
    file = io.BytesIO()
    write(sample(), file)
    return file.getvalue()


def test_the_first_bytes_are_as_documented() -> None:
    """Magic, then tag, unit bytes, name length, count, start, name, offsets, old bits, new bits."""
    expected = (
        b"SYNCJRN1"
        + bytes([1, 2])
        + (12).to_bytes(2, "little")
        + (2).to_bytes(4, "little")
        + (3).to_bytes(8, "little")
        + b"layer.weight"
        + np.array([0, 5], "<u4").tobytes()
        + np.array([1, 2, 3, 4], "<u2").tobytes()
    )
    assert sample_bytes().startswith(expected)


def test_an_empty_journal_is_legal_and_empty_records_leave_no_trace() -> None:
    file = io.BytesIO()
    none = np.empty(0, np.uint8)
    writer = JournalWriter(file)
    writer.add(Record("a", 0, None, none, none))
    assert writer.names == set()
    seal = writer.finish()
    assert list(Journal(file, "j", seal)) == []


def test_names_of_changed_tensors_are_kept() -> None:
    writer = JournalWriter(io.BytesIO())
    for record in sample():
        writer.add(record)
    assert writer.names == {"layer.weight", "layer.bias"}


@pytest.mark.parametrize("seal", [False, True])
def test_every_cut_is_refused(seal: bool) -> None:
    whole = sample_bytes()
    entry = write(sample(), io.BytesIO()) if seal else None
    for length in range(len(whole)):
        with pytest.raises(FormatError, match="journal j"):
            Journal(io.BytesIO(whole[:length]), "j", entry)


@pytest.mark.parametrize("seal", [False, True])
def test_every_damaged_byte_is_refused(seal: bool) -> None:
    whole = sample_bytes()
    entry = write(sample(), io.BytesIO()) if seal else None
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 0x40
        with pytest.raises(FormatError, match="journal j"):
            Journal(io.BytesIO(bytes(damaged)), "j", entry)


def test_bytes_after_the_end_are_refused() -> None:
    with pytest.raises(FormatError):
        Journal(io.BytesIO(sample_bytes() + b"x"), "j")


def test_a_journal_that_another_seal_names_is_refused() -> None:
    other = io.BytesIO()
    seal = write(sample()[:1], other)
    with pytest.raises(FormatError, match="expected"):
        Journal(io.BytesIO(sample_bytes()), "j", seal)


def forged(*entries: bytes) -> io.BytesIO:
    """A journal whose digest is right although its content is not."""
    import hashlib

    body = b"SYNCJRN1" + b"".join(entries)
    return io.BytesIO(body + hashlib.sha256(body).digest())


def head(tag: int, unit_bytes: int, name_bytes: int, count: int, start: int) -> bytes:
    return module._HEAD.pack(tag, unit_bytes, name_bytes, count, start)


END = head(0, 0, 0, 0, 0)
FORGED = {
    "unknown tag": (head(3, 2, 1, 1, 0), b"a" + bytes(4), END),
    "unknown width": (head(2, 3, 1, 1, 0), b"a" + bytes(6), END),
    "no name": (head(2, 2, 0, 1, 0), bytes(4), END),
    "long name": (head(2, 2, 5000, 1, 0), b"a" * 5000 + bytes(4), END),
    "name that is not UTF-8": (head(2, 2, 1, 1, 0), b"\xff" + bytes(4), head(0, 0, 0, 0, 1)),
    "no unit": (head(2, 2, 1, 0, 0), b"a", END),
    "too many units": (head(2, 2, 1, MAX_UNITS + 1, 0), b"a", END),
    "units that are not there": (head(2, 2, 1, MAX_UNITS, 0), b"a", END),
    "no end": (head(2, 2, 1, 1, 0), b"a" + bytes(4)),
    "wrong number": (head(2, 2, 1, 1, 0), b"a" + bytes(4), head(0, 0, 0, 0, 2)),
    "end with a field": (head(0, 1, 0, 0, 0),),
    "entries after the end": (END, head(2, 2, 1, 1, 0), b"a" + bytes(4), END),
}


@pytest.mark.parametrize("kind", sorted(FORGED))
def test_forged_entries_are_refused(kind: str) -> None:
    journal = Journal(forged(*FORGED[kind]), "j")
    with pytest.raises(FormatError, match="journal j"):
        list(journal)


def test_a_magic_of_another_kind_is_refused() -> None:
    with pytest.raises(FormatError, match="begin with"):
        Journal(io.BytesIO(b"SYNCJRN2" + bytes(100)), "j")


def test_long_records_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_UNITS", 3)
    bits = np.arange(8, dtype=np.uint8)
    offsets = np.arange(0, 80, 10, dtype=np.uint32)
    file = io.BytesIO()
    seal = write([Record("d", 5, None, bits, bits + 1), Record("s", 5, offsets, bits, bits)], file)
    found = list(Journal(file, "j", seal))
    assert [record.start for record in found] == [5, 8, 11, 5, 5, 5]
    assert [record.new_bits.size for record in found] == [3, 3, 2, 3, 3, 2]
    assert np.concatenate([record.new_bits for record in found[:3]]).tolist() == list(range(1, 9))
    sparse = [record.offsets for record in found[3:] if record.offsets is not None]
    assert np.concatenate(sparse).tolist() == offsets.tolist()


def test_a_full_disk_says_that_nothing_was_changed() -> None:
    class Full(io.BytesIO):
        def write(self, data: object) -> int:
            raise OSError(28, "No space left on device")

    with pytest.raises(CommitError, match=r"No space left on device; no weight was changed"):
        JournalWriter(Full())


def test_a_journal_that_shrinks_while_it_is_read_is_refused() -> None:
    class Shrinking(io.BytesIO):
        is_cut = False

        def read(self, size: int | None = -1) -> bytes:
            return super().read(size)[:-1] if self.is_cut else super().read(size)

    file = Shrinking(sample_bytes())
    journal = Journal(file, "j")
    file.is_cut = True
    with pytest.raises(FormatError, match="cut short"):
        list(journal)
