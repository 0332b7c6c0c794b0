"""The compiled kernels with the reference's signatures; loaded by the door where they are built.

What a kernel refuses is refused again by the reference, which says in words what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from syncline import config
from syncline.errors import ConfigError
from syncline.kernels import _native, reference
from syncline.kernels.reference import Axis
from syncline.types import ZERO, Bits, Fingerprint, unsigned

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]
I64 = NDArray[np.int64]

# The first round of `diff` has room for one change in so many units, and for a dense beginning.
_UNITS_A_CHANGE = 16
_ROOM_AT_LEAST = 512


def choose_isa(name: str | None) -> str:
    """Use this instruction set, or by default the fastest; return which is in use.

    Raises:
        ConfigError: this machine or build does not have it.
    """
    if name is not None and not _native.select_isa(name):
        raise ConfigError(
            f"SYNCLINE_ISA: {name} is not available here; expected one of "
            f"{', '.join(_native.available_isas())}"
        )
    return _native.selected_isa()


def available_isas() -> list[str]:
    """Return the instruction sets whose kernels this build has and this processor runs."""
    return _native.available_isas()


choose_isa(config.forced_isa())


def diff(old: Bits, new: Bits, *, refresh: bool) -> tuple[U32, Bits, Bits]:
    """See `reference.diff`. Memory is O(changes), and O(window) of address space while it runs."""
    return _diff(old, new, refresh, 0, None)[0]


def diff_and_fingerprint(
    old: Bits, new: Bits, start: int, seeds: tuple[int, int], *, refresh: bool
) -> tuple[tuple[U32, Bits, Bits], Fingerprint]:
    """See `reference.diff_and_fingerprint`; memory as `diff`."""
    return _diff(old, new, refresh, start, seeds)


def _diff(
    old: Bits, new: Bits, refresh: bool, start: int, seeds: tuple[int, int] | None
) -> tuple[tuple[U32, Bits, Bits], Fingerprint]:
    found: list[tuple[U32, Bits, Bits]] = []
    rise = ZERO
    begin, room = 0, old.size // _UNITS_A_CHANGE + _ROOM_AT_LEAST
    while begin < old.size or not found:
        piece = np.empty(room, np.uint32), np.empty(room, old.dtype), np.empty(room, old.dtype)
        begin, count, *lanes = _native.find_changes(
            old, new, begin, old.itemsize, refresh, *piece, room, start, seeds
        )
        rise += Fingerprint(*lanes)
        for array in piece:
            array.resize(count, refcheck=False)  # gives back the rest of the room without a copy
        found.append(piece)
        # Memory that is not touched costs nothing, so the second round has room for the worst case.
        room = old.size - begin
    if len(found) == 1:
        return found[0], rise
    offsets, old_bits, new_bits = (np.concatenate(pieces) for pieces in zip(*found, strict=True))
    return (offsets, old_bits, new_bits), rise


def scatter(target: Bits, offsets: U32, bits: Bits) -> None:
    """See `reference.scatter`."""
    if not _native.scatter(target, aligned(offsets), bits, target.itemsize):
        reference.check_range(offsets, target.size)


def gather(source: Bits, offsets: U32) -> Bits:
    """See `reference.gather`."""
    bits = np.empty(offsets.size, source.dtype)
    if not _native.gather(source, aligned(offsets), bits, source.itemsize):
        reference.check_range(offsets, source.size)
    return bits


def first_difference(source: Bits, bits: Bits, offsets: U32) -> int | None:
    """See `reference.first_difference`."""
    found: int = _native.compare(source, aligned(offsets), bits, source.itemsize)
    if found < -1:
        reference.check_range(offsets, source.size)
    return found if found >= 0 else None


def check_ascending(offsets: U32, limit: int) -> None:
    """See `reference.check_ascending`."""
    if not _native.check_ascending(aligned(offsets), limit):
        reference.check_ascending(offsets, limit)


def xor(a: Bits, b: Bits) -> Bits:
    """See `reference.xor`."""
    mixed = np.empty(a.size, a.dtype)
    _native.xor(a, b, mixed)
    return mixed


def read_words(first: Bits, second: Bits) -> int:
    """See `reference.read_words`."""
    return _native.read_words(first, second)


def fingerprint(bits: Bits, start: int, seeds: tuple[int, int]) -> Fingerprint:
    """See `reference.fingerprint`."""
    return Fingerprint(*_native.fingerprint(bits, bits.itemsize, start, *seeds))


def fingerprint_change(
    start: int, offsets: U32, old_bits: Bits, new_bits: Bits, seeds: tuple[int, int]
) -> Fingerprint:
    """See `reference.fingerprint_change`."""
    width = old_bits.itemsize
    return Fingerprint(
        *_native.fingerprint_change(aligned(offsets), old_bits, new_bits, width, start, *seeds)
    )


def split_planes(bits: Bits, *, rotated: bool) -> U8:
    """See `reference.split_planes`."""
    planes = np.empty((bits.itemsize, bits.size), np.uint8)
    _native.split_planes(bits, bits.itemsize, rotated, planes)
    return planes


def join_planes(planes: Sequence[U8], *, rotated: bool) -> Bits:
    """See `reference.join_planes`."""
    bits = np.empty(planes[0].size, unsigned(len(planes)))
    _native.join_planes(planes, len(planes), rotated, bits)
    return bits


def map_positions(
    positions: I64, bits: Bits, axes: Sequence[Axis], first: int, other: int
) -> tuple[I64, Bits]:
    """See `reference.map_positions`. Memory that is not touched costs nothing."""
    mapped, moved = np.empty(positions.size, np.int64), np.empty(bits.size, bits.dtype)
    sides = np.array(axes or [(1, 1, 0)], np.uint64)
    places = positions if positions.flags.aligned else positions.copy()
    found = _native.map_positions(places, bits, bits.itemsize, sides, first, other, mapped, moved)
    mapped.resize(found, refcheck=False)
    moved.resize(found, refcheck=False)
    return mapped, moved


def aligned(offsets: U32) -> U32:
    """Return the offsets where the kernels, which read units at any address, may read them too."""
    return offsets if offsets.flags.aligned else offsets.copy()
