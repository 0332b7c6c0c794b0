"""The native kernels of `tight` behind the signatures of `tight_reference`.

Memory is allocated here, the status is turned into the reference's errors, and nothing is computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from syncline.kernels import _native, reference
from syncline.kernels import tight_reference as errors
from syncline.types import Bits, unsigned

if TYPE_CHECKING:
    from syncline.kernels.tight import ClassEntry, Classes

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]
I64 = NDArray[np.int64]

# As in native/include/tight.h.
_BEYOND_MEMBERS, _WRONG_CHANGES, _NOT_ASCENDING = 1, 2, 3
_WRONG_UNARY, _WRONG_FIELDS, _BEYOND_LIMIT = 4, 5, 6


def rank_changes(
    new: Bits, offsets: U32, old_bits: Bits, classes: Classes
) -> tuple[I64, I64, U32, U32]:
    """Return members and changes by class, and the ranks and order of the changes."""
    members, changes = np.empty(classes.count, np.uint64), np.empty(classes.count, np.uint64)
    ranks, order = np.empty(offsets.size, np.uint32), np.empty(offsets.size, np.uint32)
    status, _, _ = _native.tight_rank(
        new,
        _aligned(offsets),
        old_bits,
        new.itemsize,
        _map(classes),
        members,
        changes,
        ranks,
        order,
    )
    if status == _NOT_ASCENDING:
        reference.check_ascending(offsets, new.size)
    return members.view(np.int64), changes.view(np.int64), ranks, order


def find_changes(
    base: Bits, classes: Classes, entries: list[ClassEntry], marks: U32
) -> tuple[U32, U32, Bits]:
    """Return offsets, order and old bits of the changes."""
    count = sum(entry.changes for entry in entries)
    offsets, order = np.empty(count, np.uint32), np.empty(count, np.uint32)
    old_bits = np.empty(count, base.dtype)
    status, index, value = _native.tight_find(
        base,
        base.itemsize,
        _map(classes),
        _numbers(entries),
        _aligned(marks),
        offsets,
        order,
        old_bits,
    )
    if status == _BEYOND_MEMBERS:
        raise errors.beyond_members(index, value)
    if status == _WRONG_CHANGES:
        raise errors.wrong_changes(index, entries[index].changes)
    return offsets, order, old_bits


def write_lists(entries: list[ClassEntry], marks: U32, zigzag: Bits) -> tuple[U8, U8]:
    """Return the unary and the field bits."""
    unary_bits, field_bits = _most_bits(entries, marks, 8 * zigzag.itemsize)
    unary, fields = np.zeros(unary_bits // 8 + 1, np.uint8), np.empty(field_bits // 8 + 1, np.uint8)
    unary_bytes, field_bytes = _native.tight_write(
        _numbers(entries), _aligned(marks), zigzag, zigzag.itemsize, unary, fields
    )
    return unary[:unary_bytes], fields[:field_bytes]


def _most_bits(entries: list[ClassEntry], marks: U32, unit_bits: int) -> tuple[int, int]:
    """Return at most how many unary and field bits `write_lists` makes."""
    unary = fields = end = 0
    for entry in entries:
        end += entry.marks
        zeros = int(marks[end - 1]) >> entry.gap_bits if entry.marks else 0
        unary += entry.marks + zeros
        unary += (
            entry.large_marks + (entry.changes >> entry.run_bits) + entry.large * (unit_bits + 1)
        )
        fields += entry.marks * entry.gap_bits + entry.large_marks * entry.run_bits
        fields += entry.large * unit_bits + entry.changes
    return unary, fields


def read_lists(
    entries: list[ClassEntry], unary: U8, fields: U8, units: int, unit_bytes: int
) -> tuple[U32, Bits]:
    """Return marks and steps."""
    marks = np.empty(sum(entry.marks for entry in entries), np.uint32)
    zigzag: Bits = np.empty(sum(entry.changes for entry in entries), unsigned(unit_bytes))
    status, index, value = _native.tight_read(
        _numbers(entries), unary, fields, units, unit_bytes, marks, zigzag
    )
    if status == _WRONG_UNARY:
        raise errors.wrong_unary(errors.count_ones(entries), unary.size)
    if status == _WRONG_FIELDS:
        raise errors.wrong_fields(value, fields.size)
    if status == _BEYOND_LIMIT:
        raise errors.beyond_limit(index, value)
    if status:
        raise errors.too_large(index, unit_bytes)
    return marks, zigzag


def _map(classes: Classes) -> U32:
    return np.array((classes.shift, classes.mask, classes.lowest, classes.count), np.uint32)


def _numbers(entries: list[ClassEntry]) -> U32:
    return np.array(entries, np.uint32).reshape(-1)


def _aligned(numbers: U32) -> NDArray[Any]:
    return np.require(numbers, requirements="A")
