"""Write seeds for the native fuzz targets: what the golden tensors look like to each of them.

Usage: scripts/make_fuzz_seeds.py DIRECTORY; it gets one folder for each target. native/fuzz/ says how
an input is read.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np

from syncline import codecs, kernels
from syncline.kernels import tight as lists
from syncline.types import Bits, TensorMeta, Window

PAYLOADS = Path(__file__).parents[1] / "tests" / "golden" / "payloads"
SEED_BYTES = 4096


def numbers(*values: int) -> bytes:
    """Return 16-bit numbers, as the targets read them."""
    return struct.pack(f"<{len(values)}H", *values)


def tensors() -> Iterator[tuple[str, TensorMeta, Bits, Bits]]:
    """Yield every golden tensor that is not empty: its case, and its bits before and after."""
    for path in sorted(PAYLOADS.glob("*.json")):
        case = json.loads(path.read_bytes())
        meta = TensorMeta(path.stem, case["dtype"], tuple(case["shape"]))
        old, new = (
            np.frombuffer(bytes.fromhex(case[key]), f"<u{meta.unit_bytes}")
            for key in ("base", "new")
        )
        if old.size:
            yield path.stem, meta, old, new


def seeds_of(meta: TensorMeta, old: Bits, new: Bits) -> Iterator[tuple[str, bytes]]:
    """Yield target and input."""
    offsets, old_bits, new_bits = kernels.diff(old, new)
    log_width = meta.unit_bytes.bit_length() - 1
    dense = old.tobytes() + new.tobytes()
    yield "dense", numbers(log_width, 1, 50, 2) + dense
    if offsets.size < 100 and old.size < 400:
        head = numbers(log_width, old.size, offsets.size, 1)
        yield "changes", head + offsets.tobytes() + new_bits.tobytes() + old.tobytes()
    if offsets.size < 300:
        for low_bytes in (0, 1, 2):
            low, high = kernels.encode_gaps(offsets, low_bytes)
            head = struct.pack("<I", old.size) + numbers(offsets.size, low_bytes)
            yield "gaps", head + low.tobytes() + high.tobytes()
    if 0 < offsets.size <= 200:
        for is_step in (False, True):
            bits, symbols, excess = kernels.write_symbols(old_bits, new_bits, is_step=is_step)
            head = numbers(log_width, int(is_step), bits.bit_length() - 1, offsets.size - 1, 1)
            yield "symbols", head + symbols.tobytes() + excess.tobytes() + old_bits.tobytes()
    if offsets.size and old.size < 1100:
        yield "tight", tight_seed(meta, old, Window(0, new, offsets, old_bits, new_bits))
    blocks = {"a row": ((1, 5, 1),), "columns": ((8, 4, 3), (1, 3, 1)), "every other": ((2, 5, 9),)}
    for axes in blocks.values():
        yield "positions", block_seed(axes) + offsets.astype(np.uint64).tobytes()


def block_seed(axes: tuple[tuple[int, int, int], ...]) -> bytes:
    """Return a block from 3 to 100 as `fuzz_positions` reads it, the innermost axis first."""
    out, span = numbers(3) + struct.pack("<I", 100) + numbers(len(axes) - 1), 1
    for stride, count, other in reversed(axes):
        out += numbers(stride - span, count - 1, other)
        span = max(stride, span + (count - 1) * stride)
    return out + numbers(1)


def tight_seed(meta: TensorMeta, old: Bits, window: Window) -> bytes:
    """Return the one window of a `tight` payload as `fuzz_tight` reads it."""
    codec = codecs.get("tight")
    payload = b"".join(bytes(piece) for piece in codec.encode(meta, [window]))
    with (
        mock.patch.object(lists, "read_lists", wraps=lists.read_lists) as read,
        mock.patch.object(lists, "find_changes", wraps=lists.find_changes) as find,
    ):
        list(codec.decode(meta, payload, old))
    entries, unary, fields, _, unit_bytes = read.call_args.args
    classes = find.call_args.args[1]
    out = numbers(unit_bytes.bit_length() - 1, old.size)
    out += numbers(classes.shift, classes.mask, classes.lowest, classes.count - 1, 0)
    for entry in entries:
        out += numbers(int(entry.changes > 0))
        if entry.changes:
            out += numbers(entry.changes, entry.gap_bits, int(entry.unchanged_marked))
            out += numbers(entry.marks) if entry.unchanged_marked else b""
            out += numbers(entry.large)
            if entry.large:
                out += numbers(entry.run_bits, int(entry.small_marked), entry.excess_bits)
    return out + old.tobytes() + numbers(unary.size) + unary.tobytes() + fields.tobytes()


def main() -> None:
    """Write every seed that is not too long for a target."""
    directory = Path(sys.argv[1])
    for case, meta, old, new in tensors():
        for index, (target, seed) in enumerate(seeds_of(meta, old, new)):
            folder = directory / target
            folder.mkdir(parents=True, exist_ok=True)
            if len(seed) <= SEED_BYTES:
                (folder / f"{case}-{index}").write_bytes(seed)


if __name__ == "__main__":
    main()
