"""The door to the kernels of `tight`: classes by exponent, and the lists that tell changes.

Source: docs/reference/format.md section 6.7. As behind `syncline.kernels`, arguments are checked
here, native kernels run where they are built, and numpy gives the same results bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from syncline.errors import CodecError, LayoutError
from syncline.kernels.backend import fastest
from syncline.types import Bits

MAX_CLASSES = 16


@dataclass(frozen=True, slots=True)
class Classes:
    """How a unit's base bits give its class: the exponent field, clamped to `count` values.

    Attributes:
        shift, mask: the exponent is `bits >> shift & mask`; mask 0 puts every unit into class 0.
        lowest: this exponent, and all below it, are class 0.
        count: 1 to 16 classes; the last one takes all higher exponents.

    Example:
        >>> from syncline.kernels.tight_reference import classify
        >>> bf16 = Classes(shift=7, mask=0xFF, lowest=120, count=8)
        >>> classify(np.array([0x3F80, 0x3C23, 0xC2C8], np.uint16), bf16).tolist()
        [7, 0, 7]
    """

    shift: int
    mask: int
    lowest: int
    count: int


class ClassEntry(NamedTuple):
    """What a window's header says about the lists of one class.

    Attributes:
        changes: changed members, each of which has a step.
        marks: marked members: the changed ones, or if `unchanged_marked` those that stay.
        gap_bits: low bits of every gap between marks.
        large: changes of more than one ulp.
        large_marks: marked changes: the large ones, or if `small_marked` the others.
        run_bits, excess_bits: low bits of every gap between these marks, and of every excess.
    """

    changes: int = 0
    marks: int = 0
    gap_bits: int = 0
    unchanged_marked: bool = False
    large: int = 0
    large_marks: int = 0
    run_bits: int = 0
    small_marked: bool = False
    excess_bits: int = 0


class Ranked(NamedTuple):
    """The changes of a window, class by class, each class in ascending order of places.

    Attributes:
        members: (classes,) int64, units of each class in the base.
        changes: (classes,) int64, changed ones among them.
        ranks: (k,) uint32, how many members of its class stand before each changed one.
        order: (k,) uint32, its index among the changes of the window.
    """

    members: NDArray[np.int64]
    changes: NDArray[np.int64]
    ranks: NDArray[np.uint32]
    order: NDArray[np.uint32]


def rank_changes(
    new: Bits, offsets: NDArray[np.uint32], old_bits: Bits, classes: Classes
) -> Ranked:
    """Count each class's members in the base, and rank the changed ones among them, in one pass.

    Args:
        new: (n,) bits of the window after the change.
        offsets, old_bits: (k,) where it differs from the base, and the base's bits there.

    Raises:
        LayoutError: widths or lengths do not fit.
        CodecError: offsets do not rise strictly, or lie beyond the window.

    Example:
        >>> base = np.array([0x3F80, 0x4000, 0x3F80, 0x3F81], np.uint16)
        >>> new = np.array([0x3F80, 0x4001, 0x3F80, 0x4000], np.uint16)
        >>> at = np.array([1, 3], np.uint32)
        >>> [part.tolist() for part in rank_changes(new, at, base[at], Classes(7, 255, 127, 2))]
        [[3, 1], [1, 1], [2, 0], [1, 0]]
    """
    _check_classes(classes)
    _check_flat(new, offsets, old_bits)
    if offsets.size != old_bits.size or new.dtype != old_bits.dtype:
        raise LayoutError(
            f"{offsets.size} offsets need as many old bits of {new.dtype}, found "
            f"{old_bits.size} of {old_bits.dtype}"
        )
    return Ranked(*fastest("tight").rank_changes(new, offsets, old_bits, classes))


def find_changes(
    base: Bits, classes: Classes, entries: list[ClassEntry], marks: NDArray[np.uint32]
) -> tuple[NDArray[np.uint32], NDArray[np.uint32], Bits]:
    """Undo `rank_changes`: find the changed units of a window in its base, in one pass.

    Args:
        base: (n,) bits of the window before the change.
        entries: one for each class.
        marks: for each class the ranks of its marked members, strictly ascending.

    Returns:
        offsets (k,) uint32, strictly ascending; order (k,) uint32, the index of each among the
        changes class by class; the base's bits (k,) there.

    Raises:
        CodecError: a mark is not below the members of its class, or a class has not as many
            changes as announced.
    """
    _check_classes(classes)
    _check_flat(base, marks)
    if len(entries) != classes.count or sum(entry.marks for entry in entries) != marks.size:
        raise LayoutError(f"{marks.size} marks do not fit to {len(entries)} classes")
    found: tuple[NDArray[np.uint32], NDArray[np.uint32], Bits] = fastest("tight").find_changes(
        base, classes, entries, marks
    )
    return found


def write_lists(
    entries: list[ClassEntry], marks: NDArray[np.uint32], zigzag: Bits
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Code marks and steps, class by class, into the unary and the field bits.

    Args:
        entries: one for each class; they say how the other two are divided.
        marks: as for `find_changes`.
        zigzag: steps as `syncline.kernels.steps` gives them, none of them 0.

    Raises:
        LayoutError: the entries do not fit to the arrays.
    """
    _check_flat(marks, zigzag)
    _check_entries(entries, marks.size, zigzag.size)
    coded: tuple[NDArray[np.uint8], NDArray[np.uint8]] = fastest("tight").write_lists(
        entries, marks, zigzag
    )
    return coded


def read_lists(
    entries: list[ClassEntry],
    unary: NDArray[np.uint8],
    fields: NDArray[np.uint8],
    units: int,
    unit_bytes: int,
) -> tuple[NDArray[np.uint32], Bits]:
    """Undo `write_lists`; any input is refused or gives ascending marks and steps that are not 0.

    Args:
        units: what marks must be below.
        unit_bytes: width of the steps.

    Raises:
        CodecError: the bits are not what `write_lists` makes for these entries.

    Memory: O(marks + changes), each at most `units`.
    """
    _check_flat(unary, fields)
    if sum(max(entry.changes, entry.marks) for entry in entries) > units:
        raise CodecError(f"at most {units} marks or changes may be announced, found more")
    read: tuple[NDArray[np.uint32], Bits] = fastest("tight").read_lists(
        entries, unary, fields, units, unit_bytes
    )
    return read


def _check_flat(*arrays: NDArray[np.unsignedinteger]) -> None:
    for array in arrays:
        if array.dtype.kind != "u" or array.ndim != 1 or not array.flags.c_contiguous:
            raise LayoutError(
                f"arrays must be unsigned, flat and contiguous, not {array.dtype} of shape "
                f"{array.shape} and strides {array.strides}"
            )


def _check_classes(classes: Classes) -> None:
    if not 1 <= classes.count <= MAX_CLASSES:
        raise LayoutError(f"there are 1 to {MAX_CLASSES} classes, not {classes.count}")


def _check_entries(entries: list[ClassEntry], marks: int, changes: int) -> None:
    found = sum(entry.marks for entry in entries), sum(entry.changes for entry in entries)
    if found != (marks, changes):
        raise LayoutError(f"entries announce {found} marks and changes, found {marks}, {changes}")
