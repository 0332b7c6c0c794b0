"""The second reader's section 6.7, `tight`: the page read bit by bit, in plain Python integers.

Unlike the rest of the second reader it was written by someone who knows the project's own codec. It
shares no code with it and follows the page's order, so the page is still checked against a reading.
"""

from __future__ import annotations

from typing import NamedTuple

FIELDS = {"BF16": (7, 8), "F32": (23, 8), "F16": (10, 5), "F64": (52, 11)}
FIELDS |= {"F8_E4M3": (3, 4), "F8_E4M3FNUZ": (3, 4), "F8_E5M2": (2, 5), "F8_E5M2FNUZ": (2, 5)}


def need(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(f"tight: {message}")


class Row:
    """A row of bits: bit i is bit i & 7 of byte i >> 3."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def bit(self) -> int:
        need(self.at < 8 * len(self.data), "a row of bits is too short")
        self.at += 1
        return self.data[self.at - 1 >> 3] >> (self.at - 1 & 7) & 1

    def unary(self) -> int:
        zeros = 0
        while not self.bit():
            zeros += 1
        return zeros

    def field(self, width: int) -> int:
        return sum(self.bit() << i for i in range(width))

    def end(self) -> None:
        need(len(self.data) == (self.at + 7) // 8, "a row of bits has bytes left over")
        while self.at & 7:
            need(self.bit() == 0, "bits that are left over are not 0")


class Entry(NamedTuple):
    changes: int = 0
    gap_bits: int = 0
    unchanged: int | None = None
    large: int = 0
    run_bits: int = 0
    ones_marked: bool = False
    excess_bits: int = 0

    @property
    def marks(self) -> int:
        return self.changes if self.unchanged is None else self.unchanged


def read_entry(data: bytes, at: int, unit_bits: int) -> tuple[Entry, int]:
    changes, at = read_varint(data, at)
    if not changes:
        return Entry(), at
    gap_bits, at = read_byte(data, at)
    need(gap_bits & 127 <= 24, "gap_bits")
    unchanged = None
    if gap_bits & 128:
        unchanged, at = read_varint(data, at)
    large, at = read_varint(data, at)
    need(large <= changes, "more large steps than steps")
    entry = Entry(changes, gap_bits & 127, unchanged, large)
    if not large:
        return entry, at
    run_bits, at = read_byte(data, at)
    excess_bits, at = read_byte(data, at)
    need(run_bits & 127 <= 24 and excess_bits <= unit_bits - 2, "run_bits or excess_bits")
    told = {"run_bits": run_bits & 127, "ones_marked": run_bits > 127, "excess_bits": excess_bits}
    return entry._replace(**told), at


def read_byte(data: bytes, at: int) -> tuple[int, int]:
    need(at < len(data), "a window is cut short")
    return data[at], at + 1


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for i in range(10):
        byte, at = read_byte(data, at)
        value |= (byte & 127) << (7 * i)
        if byte < 128:
            need(byte != 0 or i == 0, "a varint is longer than it needs to be")
            return value, at
    raise ValueError("tight: a varint has more than 10 bytes")


def new_units(dtype: str, unit_bytes: int, window: bytes, base: list[int]) -> list[int]:
    """The new units of a window that has changes, from its bytes and its base's units."""
    unit_bits = 8 * unit_bytes
    shift, width = FIELDS.get(dtype, (0, 0))
    count, at = read_byte(window, 0)
    need(1 <= count <= 16, f"{count} classes")
    lowest, at = read_varint(window, at)
    need(lowest < 1 << width, f"lowest {lowest}")
    entries = []
    for _ in range(count):
        entry, at = read_entry(window, at, unit_bits)
        entries.append(entry)
    need(any(entry.changes for entry in entries), "a window without changes")
    most = sum(max(entry.changes, entry.marks) for entry in entries)
    need(most <= len(base), "more changes or marks than units")
    size, at = read_varint(window, at)
    need(size <= len(window) - at, "unary_bytes")
    unary, fields = Row(window[at : at + size]), Row(window[at + size :])
    classes = [
        min(max((unit >> shift & ((1 << width) - 1)) - lowest, 0), count - 1) for unit in base
    ]
    new = list(base)
    for index, entry in enumerate(entries):
        members = [unit for unit, its in enumerate(classes) if its == index]
        changed = subset(unary, fields, entry.marks, entry.gap_bits, members)
        if entry.unchanged is not None:
            changed = [unit for unit in members if unit not in set(changed)]
        need(len(changed) == entry.changes, "not as many changes as announced")
        for unit, step in zip(changed, steps(unary, fields, entry, unit_bits), strict=True):
            new[unit] = (base[unit] + step) % (1 << unit_bits)
    unary.end()
    fields.end()
    return new


def subset(unary: Row, fields: Row, marks: int, bits: int, things: list[int]) -> list[int]:
    """The marked ones of the things."""
    found, place = [], -1
    for _ in range(marks):
        place += 1 + (unary.unary() << bits) + fields.field(bits)
        need(place < len(things), "a mark beyond the things")
        found.append(things[place])
    return found


def steps(unary: Row, fields: Row, entry: Entry, unit_bits: int) -> list[int]:
    every = list(range(entry.changes))
    large: list[int] = []
    if entry.large:
        marks = entry.changes - entry.large if entry.ones_marked else entry.large
        large = subset(unary, fields, marks, entry.run_bits, every)
        if entry.ones_marked:
            large = [step for step in every if step not in set(large)]
    ulps = [1] * entry.changes
    for step in large:
        top = unary.unary() + entry.excess_bits
        need(top < unit_bits, "an excess is too large")
        ulps[step] = 2 + (1 << top) + fields.field(top) - (1 << entry.excess_bits)
    signed = [-size if fields.bit() else size for size in ulps]
    half = 1 << (unit_bits - 1)
    need(all(-half <= step < half for step in signed), "a step is too large")
    return signed
