"""The kernels of `tight` in plain numpy: the definition that the native ones are tested against.

Arguments are already checked by the door (`syncline.kernels.tight`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from syncline.errors import CodecError
from syncline.kernels.reference import check_ascending
from syncline.types import Bits, unsigned

if TYPE_CHECKING:
    from syncline.kernels.tight import ClassEntry, Classes

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]

_ONE = np.uint64(1)
_POWERS = _ONE << np.arange(64, dtype=np.uint64)
_UNARY_BYTES_AT_ONCE = 1 << 16


def classify(bits: Bits, classes: Classes) -> U8:
    """Return the class of every unit."""
    exponents = bits >> bits.dtype.type(classes.shift) & bits.dtype.type(classes.mask)
    last = classes.lowest + classes.count - 1
    class_of: U8 = (exponents.clip(classes.lowest, last) - classes.lowest).astype(np.uint8)
    return class_of


def rank_changes(
    new: Bits, offsets: U32, old_bits: Bits, classes: Classes
) -> tuple[I64, I64, U32, U32]:
    """Return members and changes by class, and the ranks and order of the changes."""
    check_ascending(offsets, new.size)
    base = new.copy()
    base[offsets] = old_bits
    class_of = classify(base, classes)
    changed_class = class_of[offsets]
    order = np.argsort(changed_class, kind="stable").astype(np.uint32)
    ranks = [
        np.cumsum(class_of == index, dtype=np.uint32)[offsets[changed_class == index]] - 1
        for index in range(classes.count)
    ]
    members = np.bincount(class_of, minlength=classes.count)
    changes = np.bincount(changed_class, minlength=classes.count)
    return members, changes, np.concatenate(ranks).astype(np.uint32), order


def find_changes(
    base: Bits, classes: Classes, entries: list[ClassEntry], marks: U32
) -> tuple[U32, U32, Bits]:
    """Return offsets, order and old bits of the changes."""
    class_of = classify(base, classes)
    found = [
        _changed_members(np.flatnonzero(class_of == index), entry, ranks, index)
        for index, (entry, ranks) in enumerate(zip(entries, _by_class(entries, marks), strict=True))
    ]
    places = np.concatenate(found)
    order = np.argsort(places)
    offsets = places[order].astype(np.uint32)
    return offsets, order.astype(np.uint32), base[offsets]


def _by_class(entries: list[ClassEntry], marks: U32) -> Iterator[U32]:
    start = 0
    for entry in entries:
        yield marks[start : start + entry.marks]
        start += entry.marks


def _changed_members(members: I64, entry: ClassEntry, ranks: U32, index: int) -> I64:
    if ranks.size and int(ranks[-1]) >= members.size:
        raise beyond_members(index, int(ranks[np.argmax(ranks >= members.size)]))
    changed = members[ranks]
    if entry.unchanged_marked:
        changed = np.delete(members, ranks)
    if changed.size != entry.changes:
        raise wrong_changes(index, entry.changes)
    return changed


def beyond_members(index: int, mark: int) -> CodecError:
    """Return the error for a mark that no member of its class can carry."""
    return CodecError(
        f"class {index}: a mark must be below the members of the class in the base, found {mark}: "
        "damaged, or another base"
    )


def wrong_changes(index: int, changes: int) -> CodecError:
    """Return the error for a class whose unmarked members are not as many as its changes."""
    return CodecError(
        f"class {index}: {changes} units of the base must be unmarked, found another number: "
        "damaged, or another base"
    )


def write_lists(entries: list[ClassEntry], marks: U32, zigzag: Bits) -> tuple[U8, U8]:
    """Return the unary and the field bits."""
    none = np.empty(0, np.uint64)
    quotients, lows, widths = [none], [none], [none]
    start = 0
    for entry, ranks in zip(entries, _by_class(entries, marks), strict=True):
        steps = zigzag[start : start + entry.changes].astype(np.uint64)
        start += entry.changes
        is_large = steps > 2
        for places, bits in (
            (ranks, entry.gap_bits),
            (np.flatnonzero(is_large != entry.small_marked), entry.run_bits),
        )[: 1 + bool(entry.large)]:
            gaps = np.diff(places.astype(np.int64), prepend=-1).astype(np.uint64) - _ONE
            quotients.append(gaps >> np.uint64(bits))
            lows.append(gaps & np.uint64((1 << bits) - 1))
            widths.append(np.full(gaps.size, bits, np.uint64))
        sums = _excess(steps[is_large]) + np.uint64(1 << entry.excess_bits)
        tops = np.searchsorted(_POWERS, sums, "right").astype(np.uint64) - _ONE
        quotients.append(tops - np.uint64(entry.excess_bits))
        lows += [sums - (_ONE << tops), steps & _ONE]
        widths += [tops, np.ones(steps.size, np.uint64)]
    unary = _bits_at(np.cumsum(np.concatenate(quotients) + _ONE) - _ONE)
    return unary, _pack(np.concatenate(lows), np.concatenate(widths))


def _excess(zigzag: U64) -> U64:
    """Return by how much steps of more than one ulp exceed two ulps."""
    return (zigzag >> _ONE) + (zigzag & _ONE) - np.uint64(2)


def _bits_at(places: U64) -> U8:
    bits = np.zeros(int(places[-1]) + 1 if places.size else 0, np.uint8)
    bits[places] = 1
    return np.packbits(bits, bitorder="little")


def _pack(values: U64, widths: U64) -> U8:
    """Return every value's lowest bits, as many as its width, without gaps."""
    starts = np.cumsum(widths) - widths
    index = np.arange(int(widths.sum()), dtype=np.uint64) - np.repeat(
        starts, widths.astype(np.int64)
    )
    bits = np.repeat(values, widths.astype(np.int64)) >> index & _ONE
    return np.packbits(bits.astype(np.uint8), bitorder="little")


def read_lists(
    entries: list[ClassEntry], unary: U8, fields: U8, units: int, unit_bytes: int
) -> tuple[U32, Bits]:
    """Return marks and steps."""
    quotients = list(_split(entries, _quotients(unary, count_ones(entries))))
    widths: list[U64] = []
    for index, (entry, (gaps, runs, tops)) in enumerate(zip(entries, quotients, strict=True)):
        if tops.size and int(tops.max()) + entry.excess_bits >= 8 * unit_bytes:
            raise too_large(index, unit_bytes)
        widths.append(np.full(gaps.size, entry.gap_bits, np.uint64))
        widths.append(np.full(runs.size, entry.run_bits, np.uint64))
        widths.append(tops + np.uint64(entry.excess_bits))
        widths.append(np.ones(entry.changes, np.uint64))
    lows = iter(_unpack(fields, widths))
    marks, zigzag = [np.empty(0, np.uint32)], [np.empty(0, np.uint64)]
    for index, (entry, (gaps, runs, tops)) in enumerate(zip(entries, quotients, strict=True)):
        marks.append(_ascending(gaps << np.uint64(entry.gap_bits) | next(lows), units, index))
        large = _ascending(runs << np.uint64(entry.run_bits) | next(lows), entry.changes, index)
        is_large = np.zeros(entry.changes, np.bool_)
        is_large[large] = True
        least = np.uint64(1 << entry.excess_bits)
        excess = (least << tops) + next(lows) - least
        zigzag.append(_steps(is_large ^ entry.small_marked, excess, next(lows), index, unit_bytes))
    return np.concatenate(marks), np.concatenate(zigzag).astype(unsigned(unit_bytes))


def _quotients(unary: U8, count: int) -> U64:
    """Return how many zeros stand before each of the `count` ones."""
    places = [np.array([-1], np.int64)]
    found = 0
    for start in range(0, unary.size, _UNARY_BYTES_AT_ONCE):
        bits = np.unpackbits(unary[start : start + _UNARY_BYTES_AT_ONCE], bitorder="little")
        ones = np.flatnonzero(bits)
        found += ones.size
        if found > count:
            break
        places.append(ones + 8 * start)
    at = np.concatenate(places)
    if found != count or unary.size != (int(at[-1]) + 8) // 8:
        raise wrong_unary(count, unary.size)
    return (np.diff(at) - 1).astype(np.uint64)


def count_ones(entries: list[ClassEntry]) -> int:
    """Return how many ones the unary bits hold."""
    return sum(entry.marks + entry.large_marks + entry.large for entry in entries)


def wrong_unary(count: int, size_bytes: int) -> CodecError:
    """Return the error for unary bits that are not as announced."""
    return CodecError(
        f"unary bits: {size_bytes} bytes must hold exactly {count} ones and end with the last"
    )


def _split(entries: list[ClassEntry], quotients: U64) -> Iterator[list[U64]]:
    """Yield the quotients of gaps, runs and excesses of each class."""
    start = 0
    for entry in entries:
        lists = []
        for count in (entry.marks, entry.large_marks, entry.large):
            lists.append(quotients[start : start + count])
            start += count
        yield lists


def _unpack(fields: U8, widths: list[U64]) -> list[U64]:
    """Return what `_pack` packed, in arrays as long as those of `widths`."""
    flat = np.concatenate(widths) if widths else np.empty(0, np.uint64)
    total = int(flat.sum())
    spare = -total % 8
    if fields.size != (total + spare) // 8 or (spare and int(fields[-1]) >> (8 - spare)):
        raise wrong_fields(total, fields.size)
    padded = np.concatenate((fields, np.zeros(16, np.uint8)))
    words: U64 = np.ndarray((fields.size + 8,), np.uint64, padded.data, strides=(1,))
    starts = np.cumsum(flat) - flat
    at, shift = (starts >> np.uint64(3)).astype(np.int64), starts & np.uint64(7)
    # A field of up to 63 bits may reach into a ninth byte.
    ninth = padded[at + 8].astype(np.uint64) << (np.uint64(63) - shift) << _ONE
    values = (words[at] >> shift | ninth) & ((_ONE << flat) - _ONE)
    return np.split(values, np.cumsum([width.size for width in widths])[:-1])


def wrong_fields(total_bits: int, size_bytes: int) -> CodecError:
    """Return the error for field bits that are not as announced."""
    return CodecError(
        f"field bits: {total_bits} bits must fill {size_bytes} bytes, the last one up with zeros"
    )


def _ascending(gaps: U64, limit: int, index: int) -> U32:
    """Return the marks that the gaps lead to, all below `limit`."""
    if not gaps.size:
        return np.empty(0, np.uint32)
    # Sums of at most 2**24 gaps below 2**32 cannot wrap.
    if int(gaps.max()) < limit:
        marks: U64 = np.cumsum(gaps + _ONE) - _ONE
        if int(marks[-1]) < limit:
            return marks.astype(np.uint32)
    raise beyond_limit(index, limit)


def beyond_limit(index: int, limit: int) -> CodecError:
    """Return the error for a mark that is too high."""
    return CodecError(f"class {index}: a mark must be below {limit}, found one that is not")


def _steps(
    is_large: NDArray[np.bool_], excess: U64, signs: U64, index: int, unit_bytes: int
) -> U64:
    """Return the steps of a class in zigzag form."""
    most = np.uint64((1 << 8 * unit_bytes - 1) - 2)
    if (excess + (signs[is_large] ^ _ONE) > most).any():
        raise too_large(index, unit_bytes)
    ulps = np.ones(is_large.size, np.uint64)
    ulps[is_large] = excess + np.uint64(2)
    # As many ulps as half the range are there only with a minus, so that this fits into 64 bits.
    return (ulps - signs) + ulps


def too_large(index: int, unit_bytes: int) -> CodecError:
    """Return the error for a step that does not fit into the unit."""
    return CodecError(f"class {index}: a step must fit into {unit_bytes} bytes, found a larger one")
