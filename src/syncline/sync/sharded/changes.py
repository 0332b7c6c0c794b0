"""Changes in canonical terms on their way from the rank that found them to the rank that encodes them.

A message is 8 bytes with the length of a JSON header, the header, and for each tensor in it positions
(4 bytes each, or 8 where the tensor needs them), old bits and new bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from syncline import kernels
from syncline.errors import FormatError
from syncline.format import strict_json
from syncline.layouts import Catalog
from syncline.layouts.positions import Positions
from syncline.sync.sharded.shares import Copy, HeldBlock
from syncline.types import ZERO, Bits, Fingerprint, TensorMeta, Window, unsigned
from syncline.version import TensorEntry

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 1 << 28
_REACH = 1 << 32
_KEYS = ("tensors", "copies")
_TENSOR_KEYS = ("name", "count", "difference")
_COPY_KEYS = ("name", "box", "copy", "difference")
_HEX_DIGITS = 32


@dataclass(frozen=True, slots=True, eq=False)
class Moved:
    """Changes of one canonical tensor: (k,) flat indices in any order, bits before and after."""

    positions: Positions
    old_bits: Bits
    new_bits: Bits


@dataclass(slots=True)
class RankChanges:
    """What one rank found, or what one rank was told, by canonical name.

    Attributes:
        moved: the changes that a rank answers for.
        differences: what they add to each tensor's fingerprint.
        copies: what each changed copy of a box adds; a copy without changes is not there.
    """

    moved: dict[str, list[Moved]] = field(default_factory=dict)
    differences: dict[str, Fingerprint] = field(default_factory=dict)
    copies: dict[Copy, Fingerprint] = field(default_factory=dict)

    def add(self, name: str, moved: Moved, difference: Fingerprint, held: HeldBlock) -> None:
        """Take changes in one block."""
        if held.is_answered:
            self.moved.setdefault(name, []).append(moved)
            self.differences[name] = self.differences.get(name, ZERO) + difference
        if held.copy is not None:
            self.copies[held.copy] = self.copies.get(held.copy, ZERO) + difference


def nothing(meta: TensorMeta) -> Moved:
    """Return no changes of a tensor."""
    none = np.empty(0, unsigned(meta.unit_bytes))
    return Moved(np.empty(0, np.int64), none, none)


def joined(meta: TensorMeta, pieces: Iterable[Moved]) -> Moved:
    """Return changes of one tensor as one, at ascending places."""
    found = [nothing(meta), *pieces]
    positions = np.concatenate([piece.positions for piece in found])
    old_bits = np.concatenate([piece.old_bits for piece in found])
    new_bits = np.concatenate([piece.new_bits for piece in found])
    if _rises(positions):
        return Moved(positions, old_bits, new_bits)
    order = np.argsort(positions)
    return Moved(positions[order], old_bits[order], new_bits[order])


def change_fingerprint(moved: Moved, seeds: tuple[int, int]) -> Fingerprint:
    """Return what changes at any places add to their tensor's fingerprint. Cost: O(changes)."""
    positions = moved.positions
    if not positions.size:
        return ZERO
    first = int(positions.min())
    if int(positions.max()) - first < _REACH:
        offsets = (positions - first).astype(np.uint32)
        return kernels.fingerprint_change(first, offsets, moved.old_bits, moved.new_bits, seeds)
    far = positions - first >= _REACH
    near, rest = (
        Moved(positions[which], moved.old_bits[which], moved.new_bits[which])
        for which in (~far, far)
    )
    return change_fingerprint(near, seeds) + change_fingerprint(rest, seeds)


def pack(changes: RankChanges, names: Iterable[str], catalog: Catalog) -> bytes:
    """Return the message with what a rank found in these tensors, which leave its memory with that."""
    wanted = set(names)
    found = sorted(wanted & changes.differences.keys())
    arrays: list[bytes] = []
    rows = []
    for name in found:
        pieces = changes.moved.pop(name, [])
        place = _place_dtype(catalog[name].meta)
        rows.append(
            {
                "name": name,
                "count": sum(piece.positions.size for piece in pieces),
                "difference": changes.differences[name].hex(),
            }
        )
        arrays += [piece.positions.astype(place).tobytes() for piece in pieces]
        arrays += [piece.old_bits.tobytes() for piece in pieces]
        arrays += [piece.new_bits.tobytes() for piece in pieces]
    copies = [
        {"name": name, "box": box, "copy": copy, "difference": difference.hex()}
        for (name, box, copy), difference in changes.copies.items()
        if name in wanted
    ]
    head = strict_json.dump({"tensors": rows, "copies": copies})
    return b"".join([len(head).to_bytes(_LENGTH_BYTES, "little"), head, *arrays])


def unpack(message: bytes, catalog: Catalog, where: str) -> RankChanges:
    """Return what `pack` put into a message.

    Raises:
        FormatError: it is not one, or names a tensor that the catalog does not have.
    """
    size = int.from_bytes(message[:_LENGTH_BYTES], "little")
    place = _LENGTH_BYTES + size
    text = message[_LENGTH_BYTES:place]
    document = strict_json.parse(text, where, limit_bytes=_MAX_HEADER_BYTES)
    fields = strict_json.Fields(document, where, _KEYS)
    changes = RankChanges()
    for index, row in enumerate(fields.items("tensors")):
        entry = strict_json.Fields(row, where, _TENSOR_KEYS, f"tensors[{index}]")
        name, count = entry.text("name"), entry.integer("count")
        if name not in catalog:
            entry.refuse("name", "a tensor of the layout")
        meta = catalog[name].meta
        arrays = []
        for dtype in (_place_dtype(meta), unsigned(meta.unit_bytes), unsigned(meta.unit_bytes)):
            stop = place + count * dtype.itemsize
            if stop > len(message):
                raise FormatError(f"{where}: cut short at byte {len(message)}, needs {stop}")
            arrays.append(np.frombuffer(message[place:stop], dtype))
            place = stop
        changes.moved[name] = [Moved(arrays[0].astype(np.int64), arrays[1], arrays[2])]
        changes.differences[name] = Fingerprint.from_hex(
            entry.hexadecimal("difference", _HEX_DIGITS)
        )
    if place != len(message):
        raise FormatError(f"{where}: must end at byte {place}, has {len(message)}")
    for index, row in enumerate(fields.items("copies")):
        entry = strict_json.Fields(row, where, _COPY_KEYS, f"copies[{index}]")
        copy = entry.text("name"), entry.integer("box"), entry.integer("copy")
        changes.copies[copy] = Fingerprint.from_hex(entry.hexadecimal("difference", _HEX_DIGITS))
    return changes


def merge(meta: TensorMeta, told: Mapping[int, RankChanges]) -> tuple[Moved, Fingerprint]:
    """Return all ranks' changes of one tensor, ascending, and what these add to its fingerprint.

    Raises:
        FormatError: two ranks changed one element, one lies outside of the tensor, or what arrived is not
            what the ranks found.
    """
    merged = joined(
        meta, (piece for changes in told.values() for piece in changes.moved.get(meta.name, ()))
    )
    positions = merged.positions
    if positions.size and not (
        _rises(positions) and positions[0] >= 0 and positions[-1] < meta.unit_count
    ):
        raise FormatError(
            f"tensor {meta.name!r}: ranks {sorted(told)} changed an element twice, or one outside of its "
            f"{meta.unit_count}: the ranks do not have one layout",
            tensor=meta.name,
        )
    found = sum((changes.differences.get(meta.name, ZERO) for changes in told.values()), ZERO)
    if change_fingerprint(merged, kernels.seeds(meta.name)) != found:
        raise FormatError(
            f"tensor {meta.name!r}: the changes that arrived are not those that ranks {sorted(told)} "
            "found: damaged on the way between them",
            tensor=meta.name,
        )
    return merged, found


def check_sum(entry: TensorEntry, told: Mapping[int, RankChanges]) -> None:
    """Check that a whole tensor is what the ranks hold of it, by the sum of their fingerprints.

    Raises:
        FormatError: it is not.
    """
    name = entry.meta.name
    total = sum((changes.differences.get(name, ZERO) for changes in told.values()), ZERO)
    if total != entry.fingerprint:
        raise FormatError(
            f"tensor {name!r}: what was written is not what ranks {sorted(told)} hold of it: expected "
            f"fingerprint {total.hex()}, found {entry.fingerprint.hex()}; damaged on the way, or the layout is "
            "not the trainer's",
            tensor=name,
        )


def windows(
    meta: TensorMeta, moved: Moved, dense: Bits | None, window_units: int
) -> Iterator[Window]:
    """Yield the windows of a tensor with ascending changes.

    Args:
        dense: the tensor's new bits; None: nobody has them, and the encoding must not look at them.
    """
    starts = np.arange(0, meta.unit_count, window_units, dtype=np.int64)
    bounds = np.searchsorted(moved.positions, np.append(starts, meta.unit_count))
    nothing = np.zeros(1, unsigned(meta.unit_bytes))
    for start, (low, high) in zip(starts.tolist(), pairwise(bounds.tolist()), strict=True):
        stop = min(start + window_units, meta.unit_count)
        # One unit seen many times: a window's length without a window's memory.
        new = np.broadcast_to(nothing, stop - start) if dense is None else dense[start:stop]
        offsets = (moved.positions[low:high] - start).astype(np.uint32)
        yield Window(start, new, offsets, moved.old_bits[low:high], moved.new_bits[low:high])


def _place_dtype(meta: TensorMeta) -> np.dtype[np.uint32] | np.dtype[np.uint64]:
    return np.dtype("<u4") if meta.unit_count <= _REACH else np.dtype("<u8")


def _rises(positions: Positions) -> bool:
    return bool((positions[1:] > positions[:-1]).all())
