"""The one door to fast code: arguments are validated here, the kernels assume them."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from syncline.errors import CodecError
from syncline.kernels import reference
from syncline.types import Bits, Fingerprint, unsigned

steps = reference.steps
unsteps = reference.unsteps
encode_gaps = reference.encode_gaps
decode_gaps = reference.decode_gaps


def diff(old: Bits, new: Bits, *, refresh: bool = False) -> tuple[NDArray[np.uint32], Bits, Bits]:
    """Return offsets, old and new bits of the units that differ; with `refresh` old becomes new."""
    found = reference.diff(old, new)
    if refresh:
        old[found[0]] = found[2]
    return found


def scatter(target: Bits, offsets: NDArray[np.uint32], bits: Bits) -> None:
    """Write bits at offsets."""
    target[offsets] = bits


def gather(source: Bits, offsets: NDArray[np.uint32]) -> Bits:
    """Read bits at offsets."""
    return source[offsets]


def xor(a: Bits, b: Bits) -> Bits:
    """Return a ^ b."""
    return a ^ b


def check_ascending(offsets: NDArray[np.uint32], limit: int) -> None:
    """Raise CodecError unless offsets ascend strictly and stay below limit."""
    wide = offsets.astype(np.int64)
    if wide.size and (wide[-1] >= limit or (np.diff(wide) <= 0).any()):
        bad = int(np.argmax(np.append(np.diff(wide) <= 0, True)))
        raise CodecError(f"offset {bad + 1} is out of order or not below {limit}")


def seeds(name: str) -> tuple[int, int]:
    """Return the two 64-bit seeds of a tensor's fingerprint."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little")


def fingerprint(bits: Bits, start: int, seeds: tuple[int, int]) -> Fingerprint:
    """Return the fingerprint of the units from `start` on."""
    at = np.arange(start, start + bits.size, dtype=np.uint64)
    digits, where = reference.digits(bits, at)
    return reference.fingerprint(where, digits, seeds)


def fingerprint_change(
    start: int,
    offsets: NDArray[np.uint32],
    old_bits: Bits,
    new_bits: Bits,
    seeds: tuple[int, int],
) -> Fingerprint:
    """Return what changes add to a fingerprint."""
    at = np.uint64(start) + offsets.astype(np.uint64)
    new_digits, where = reference.digits(new_bits, at)
    old_digits, _ = reference.digits(old_bits, at)
    return reference.fingerprint(where, new_digits - old_digits, seeds)


def split_planes(bits: Bits) -> NDArray[np.uint8]:
    """Return (unit_bytes, k) byte planes, low byte first."""
    return np.ascontiguousarray(
        np.ascontiguousarray(bits).view(np.uint8).reshape(-1, bits.itemsize).T
    )


def join_planes(planes: NDArray[np.uint8]) -> Bits:
    """Undo `split_planes`."""
    return np.ascontiguousarray(planes.T).reshape(-1).view(unsigned(planes.shape[0]))
