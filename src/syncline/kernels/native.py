"""The compiled kernels with the reference's signatures; loaded by the door where they are built.

What a kernel refuses is refused again by the reference, which says in words what is wrong.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from syncline import config
from syncline.errors import ConfigError
from syncline.kernels import _native, reference
from syncline.types import Bits, Fingerprint

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]

_FIRST_ROOM = 1 << 16


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


choose_isa(config.forced_isa())


def diff(old: Bits, new: Bits, *, refresh: bool) -> tuple[U32, Bits, Bits]:
    """See `reference.diff`. Room grows with what is found, so memory is O(changes)."""
    found: list[tuple[U32, Bits, Bits]] = []
    begin, room = 0, min(_FIRST_ROOM, old.size)
    while begin < old.size:
        piece = np.empty(room, np.uint32), np.empty(room, old.dtype), np.empty(room, old.dtype)
        begin, count = _native.diff(old, new, begin, old.itemsize, refresh, *piece, room)
        found.append((piece[0][:count], piece[1][:count], piece[2][:count]))
        room = min(4 * room, old.size - begin)
    if len(found) == 1:
        return found[0]
    offsets = [piece[0] for piece in found] or [np.empty(0, np.uint32)]
    olds = [piece[1] for piece in found] or [np.empty(0, old.dtype)]
    news = [piece[2] for piece in found] or [np.empty(0, old.dtype)]
    return np.concatenate(offsets), np.concatenate(olds), np.concatenate(news)


def scatter(target: Bits, offsets: U32, bits: Bits) -> None:
    """See `reference.scatter`."""
    if not _native.scatter(target, offsets, bits, target.itemsize):
        reference.check_range(offsets, target.size)


def gather(source: Bits, offsets: U32) -> Bits:
    """See `reference.gather`."""
    bits = np.empty(offsets.size, source.dtype)
    if not _native.gather(source, offsets, bits, source.itemsize):
        reference.check_range(offsets, source.size)
    return bits


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
        *_native.fingerprint_change(offsets, old_bits, new_bits, width, start, *seeds)
    )


def encode_gaps(offsets: U32, low_bytes: int) -> tuple[U8, U8]:
    """See `reference.encode_gaps`."""
    low = np.empty((low_bytes, offsets.size), np.uint8)
    last = int(offsets[-1]) if offsets.size else 0
    high = np.empty(offsets.size + (last >> 8 * low_bytes) // reference.ESCAPE, np.uint8)
    used = _native.encode_gaps(offsets, low_bytes, low, high)
    if used < 0:
        reference.check_ascending(offsets, 1 << 32)
    return low, high[:used]


def decode_gaps(low: U8, high: U8, count: int, limit: int) -> U32:
    """See `reference.decode_gaps`."""
    offsets = np.empty(count, np.uint32)
    if not _native.decode_gaps(low, low.shape[0], high, limit, offsets):
        return reference.decode_gaps(low, high, count, limit)
    return offsets
