"""`tight`: which units change is told class by class, the class being the exponent in the base.

Within a class changes lie anywhere alike, so the gaps between them are Rice coded. A step of one
ulp costs its sign and its share of the gaps between larger ones. Decoding needs only shifts.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from syncline import kernels
from syncline.codecs import exponents
from syncline.codecs.payload import Cursor, varint
from syncline.codecs.prediction import STEP_BITS, place_bytes
from syncline.codecs.windows import Unpack, WindowCodec
from syncline.errors import CodecError
from syncline.kernels import tight as lists
from syncline.kernels.tight import ClassEntry, Classes, Ranked
from syncline.types import WINDOW_UNITS, Bits, Changes, TensorMeta, Window

MAX_GAP_BITS = 24
_OTHERS_MARKED = 0x80
# Of steps of 64 bits; those of other units stay below by themselves.
_MAX_EXCESS_BITS = 62
_LEGAL_CODES = (*range(MAX_GAP_BITS + 1), *range(_OTHERS_MARKED, _OTHERS_MARKED + MAX_GAP_BITS + 1))
_MAX_WINDOW_BYTES = (1 << 64) - 1

U32 = NDArray[np.uint32]


class Tight(WindowCodec):
    """Changes by exponent class; see `syncline.abc.Codec`."""

    name: ClassVar[str] = "tight"
    needs_base: ClassVar[bool] = True
    is_idempotent: ClassVar[bool] = False
    is_full: ClassVar[bool] = False

    def pack(self, meta: TensorMeta, window: Window) -> bytes:
        """Return length and lists of one window."""
        body = _pack(meta, window) if window.offsets.size else b""
        return varint(len(body)) + body

    def locate(self, meta: TensorMeta, flag: int, cursor: Cursor, start: int, units: int) -> Unpack:
        """Take the bytes of the window at the cursor."""
        size_bytes = cursor.varint("window bytes", 0, _MAX_WINDOW_BYTES)
        at = cursor.offset
        content = cursor.take(size_bytes, "window")

        def unpack(base: Bits) -> Changes | None:
            return _unpack(meta, Cursor(content, at), start, base) if content else None

        return unpack

    def predict_bytes(self, meta: TensorMeta, changed: int) -> int:
        """Return about the size for optimizer steps that lie anywhere alike.

        On weights out of training it is about 0.7 of this, since small weights change more often.
        """
        window_count = -(-meta.unit_count // WINDOW_UNITS)
        value_bytes = changed * STEP_BITS[meta.unit_bytes] / 8
        return int(12 + 16 * window_count + 1.01 * place_bytes(meta, changed) + value_bytes)


def _pack(meta: TensorMeta, window: Window) -> bytes:
    """Return what stands in the payload for a window with changes, without its length."""
    classes = exponents.choose(meta, window)
    ranked = lists.rank_changes(window.new, window.offsets, window.old_bits, classes)
    zigzag = kernels.steps(window.old_bits, window.new_bits)[ranked.order]
    entries = _describe(ranked, zigzag)
    unary, fields = lists.write_lists(entries, _marks(ranked, entries), zigzag)
    head = bytes((classes.count,)) + varint(classes.lowest)
    entry_bytes = b"".join(map(_entry_bytes, entries))
    return head + entry_bytes + varint(unary.size) + unary.tobytes() + fields.tobytes()


def _describe(ranked: Ranked, zigzag: Bits) -> list[ClassEntry]:
    """Return for each class how many marks and large steps it has, and how best to code them."""
    bounds = np.concatenate(([0], np.cumsum(ranked.changes)))
    large_at = np.flatnonzero(zigzag > 2)
    large_bounds = np.searchsorted(large_at, bounds)
    # Half the zigzag is the excess and one, or two if the step is up: near enough to choose bits.
    # Its logarithm is taken as linear between powers of two, which is the same on every machine.
    fractions, tops = np.frexp((zigzag[large_at] >> 1).astype(np.float64))
    logs = np.concatenate(([0.0], np.cumsum(tops + 2 * fractions - 2)))
    log_sums = np.diff(logs[large_bounds]).tolist()
    counts = zip(
        ranked.members.tolist(),
        ranked.changes.tolist(),
        np.diff(large_bounds).tolist(),
        log_sums,
        strict=True,
    )
    return [_describe_class(*count) for count in counts]


def _describe_class(members: int, changes: int, large: int, log_sum: float) -> ClassEntry:
    if not changes:
        return ClassEntry()
    unchanged_marked = 2 * changes > members
    marks = members - changes if unchanged_marked else changes
    small_marked = 2 * large > changes
    large_marks = changes - large if small_marked else large
    return ClassEntry(
        changes=changes,
        marks=marks,
        gap_bits=rice_bits(members, marks),
        unchanged_marked=unchanged_marked,
        large=large,
        large_marks=large_marks,
        run_bits=rice_bits(changes, large_marks) if large else 0,
        small_marked=small_marked,
        excess_bits=min(_MAX_EXCESS_BITS, int(log_sum / large)) if large else 0,
    )


def rice_bits(population: int, marks: int) -> int:
    """Return how many low bits of the gaps to keep apart, if the marks lie anywhere alike.

    Example:
        >>> rice_bits(1_000_000, 10_000), rice_bits(4, 2)
        (6, 0)
    """
    # The best Golomb code of this kind for a geometric distribution (A. Kiely, 2004).
    mean = (population - marks) / (marks + 1)
    return min(MAX_GAP_BITS, int(0.4812 * (mean + 0.5)).bit_length())


def _marks(ranked: Ranked, entries: list[ClassEntry]) -> U32:
    if not any(entry.unchanged_marked for entry in entries):
        return ranked.ranks
    pieces = np.split(ranked.ranks, np.cumsum(ranked.changes)[:-1])
    for index, entry in enumerate(entries):
        if entry.unchanged_marked:
            members = np.arange(ranked.members[index], dtype=np.uint32)
            pieces[index] = np.delete(members, pieces[index])
    return np.concatenate(pieces)


def _entry_bytes(entry: ClassEntry) -> bytes:
    if not entry.changes:
        return varint(0)
    out = varint(entry.changes) + bytes((entry.gap_bits | _OTHERS_MARKED * entry.unchanged_marked,))
    if entry.unchanged_marked:
        out += varint(entry.marks)
    out += varint(entry.large)
    if entry.large:
        run_code = entry.run_bits | _OTHERS_MARKED * entry.small_marked
        out += bytes((run_code, entry.excess_bits))
    return out


def _unpack(meta: TensorMeta, cursor: Cursor, start: int, base: Bits) -> Changes:
    """Return the changes of the window that is all that the cursor has left."""
    at, size_bytes = cursor.offset, cursor.left_bytes
    count = cursor.byte("class count", range(1, lists.MAX_CLASSES + 1))
    shift, mask = exponents.field(meta)
    classes = Classes(shift, mask, cursor.varint("lowest exponent", 0, mask), count)
    entries = [_entry(cursor, base.size, 8 * meta.unit_bytes) for _ in range(count)]
    unary = cursor.take(cursor.varint("unary bytes", 0, size_bytes), "unary bits")
    if not any(entry.changes for entry in entries):
        raise CodecError(f"byte {at}: a window of {size_bytes} bytes must have changes, found none")
    fields = cursor.take(cursor.left_bytes, "field bits")
    try:
        marks, zigzag = lists.read_lists(
            entries,
            np.frombuffer(unary, np.uint8),
            np.frombuffer(fields, np.uint8),
            base.size,
            meta.unit_bytes,
        )
        offsets, order, old = lists.find_changes(base, classes, entries, marks)
    except CodecError as error:
        raise CodecError(f"byte {at}: {error}") from error
    return Changes(start, offsets, kernels.unsteps(old, zigzag[order]), old)


def _entry(cursor: Cursor, units: int, unit_bits: int) -> ClassEntry:
    changes = cursor.varint("changes of a class", 0, units)
    if not changes:
        return ClassEntry()
    gap_bits, unchanged_marked = _code(cursor, "gap bits")
    marks = changes
    if unchanged_marked:
        marks = cursor.varint("unchanged units of a class", 0, units - changes)
    large = large_marks = cursor.varint("larger steps of a class", 0, changes)
    run_bits, small_marked, excess_bits = 0, False, 0
    if large:
        run_bits, small_marked = _code(cursor, "run bits")
        large_marks = changes - large if small_marked else large
        excess_bits = cursor.byte("excess bits", range(unit_bits - 1))
    return ClassEntry(
        changes,
        marks,
        gap_bits,
        unchanged_marked,
        large,
        large_marks,
        run_bits,
        small_marked,
        excess_bits,
    )


def _code(cursor: Cursor, what: str) -> tuple[int, bool]:
    """Return low bits, and whether it is the others that are marked."""
    code = cursor.byte(what, _LEGAL_CODES)
    return code & ~_OTHERS_MARKED, code >= _OTHERS_MARKED
