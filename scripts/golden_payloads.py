"""Golden payloads: one tensor each, before and after, in every encoding."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from syncline import codecs, kernels
from syncline.codecs import streams
from syncline.codecs.packed import Packed
from syncline.codecs.payload import varint
from syncline.format import strict_json
from syncline.types import Bits, TensorMeta, Window, unsigned

Change = Callable[[Bits], Bits]


def noise(label: str, size_bytes: int) -> bytes:
    """Return bytes that look random and never change: not even with a release of numpy."""
    return hashlib.shake_128(label.encode()).digest(size_bytes)


def noise_bits(label: str, meta: TensorMeta) -> Bits:
    """Return random bits for a tensor; NaN payloads, infinities and -0.0 may be among them."""
    return np.frombuffer(noise(label, meta.nbytes), unsigned(meta.unit_bytes)).copy()


def weights(label: str, count: int) -> Bits:
    """Return BF16 bits that look like weights: signs and fractions at random, few exponents."""
    raw = np.frombuffer(noise(label, 2 * count), np.uint16)
    falls = np.frombuffer(noise(f"{label} exponents", count), np.uint8)
    exponents = np.uint16(121) - sum((falls >> bit > 0).astype(np.uint16) for bit in range(1, 8))
    return (raw & 0x8000 | exponents << np.uint16(7) | raw & 0x7F).astype(np.uint16)


def chance(label: str, count: int, of_256: int) -> np.ndarray:
    """Return Booleans that are true `of_256` times in 256."""
    return np.frombuffer(noise(label, count), np.uint8) < of_256


def ulps(label: str, of_256: int) -> Change:
    """Return a change of some units by one step up or down."""

    def apply(old: Bits) -> Bits:
        steps = np.where(chance(f"{label} sign", old.size, 128), 1, -1).astype(old.dtype)
        return np.where(chance(label, old.size, of_256), old + steps, old)

    return apply


def flips(label: str, of_256: int) -> Change:
    """Return a change of some units to anything else."""

    def apply(old: Bits) -> Bits:
        bits = np.frombuffer(noise(label, old.nbytes), old.dtype) | old.dtype.type(1)
        return np.where(chance(f"{label} where", old.size, of_256), old ^ bits, old)

    return apply


def at(changes: Mapping[int, int]) -> Change:
    """Return a change of named units by so many steps."""

    def apply(old: Bits) -> Bits:
        new = old.copy()
        for unit, step in changes.items():
            new[unit : unit + 1] += np.int64(step).astype(old.dtype)
        return new

    return apply


def windows_of(meta: TensorMeta, old: Bits, new: Bits, window_units: int) -> Iterator[Window]:
    """Yield the windows of a tensor."""
    for start in range(0, meta.unit_count, window_units):
        before, after = (bits[start : start + window_units] for bits in (old, new))
        yield Window(start, after, *kernels.diff(before, after))


def write_payloads(directory: Path) -> None:
    """Write one file for each case."""
    for name, (meta, old, change, window_units) in _cases().items():
        new = change(old)
        payloads = {
            encoding: b"".join(
                codecs.get(encoding).encode(meta, windows_of(meta, old, new, window_units))
            )
            for encoding in codecs.NAMES
        }
        xor = Packed("xor").encode(meta, windows_of(meta, old, new, window_units))
        document = _tensor(meta, old) | {
            "new": new.tobytes().hex(),
            "changed": int(np.count_nonzero(old != new)),
            "window_units": window_units,
            "payloads": {encoding: payload.hex() for encoding, payload in payloads.items()},
            "packed_xor": b"".join(xor).hex(),
        }
        (directory / f"{name}.json").write_bytes(strict_json.dump(document))


def _cases() -> dict[str, tuple[TensorMeta, Bits, Change, int]]:
    cases: dict[str, tuple[TensorMeta, Bits, Change, int]] = {}

    def add(
        name: str, dtype: str, shape: tuple[int, ...], change: Change, window_units: int = 1 << 22
    ) -> None:
        meta = TensorMeta("w", dtype, shape)
        old = weights(name, meta.count) if dtype == "BF16" else noise_bits(name, meta)
        cases[name] = meta, old, change, window_units

    add("bf16", "BF16", (16, 25), ulps("bf16", 20))
    add("bf16-windows", "BF16", (16, 25), ulps("bf16", 20), 200)
    add("bf16-tail", "BF16", (300,), lambda old: flips("tail", 4)(ulps("tail", 60)(old)), 256)
    add("bf16-everything", "BF16", (8, 8), flips("everything", 256), 50)
    add("bf16-nothing", "BF16", (8, 8), lambda old: old)
    add("bf16-sparse", "BF16", (400,), at({0: 1, 399: -1}))
    add("i8-sparse", "I8", (800,), at({700: 100, 799: -3}))
    add("f16", "F16", (16, 9), ulps("f16", 30))
    add("f32", "F32", (12, 7), flips("f32", 30), 50)
    add("f64", "F64", (40,), flips("f64", 40), 16)
    add("f64-steps", "F64", (40,), ulps("f64", 200), 40)
    for dtype in ("BOOL", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "F6_E2M3"):
        add(dtype.lower(), dtype, (8, 6), flips(dtype, 50))
    for dtype in ("U16", "I16", "U32", "I32", "U64", "I64", "C64"):
        add(dtype.lower(), dtype, (24,), flips(dtype, 50), 10)
    add("scalar", "F32", (), at({0: 1}))
    add("scalar-bool", "BOOL", (), at({0: 1}))
    add("empty", "BF16", (0, 3), lambda old: old)
    return cases


def write_foreign(directory: Path) -> None:
    """Write legal payloads that take other choices than Syncline's writer does."""
    meta = TensorMeta("w", "BF16", (140,))
    old = weights("foreign", 140)
    new = flips("foreign", 8)(ulps("foreign", 60)(old))
    dense = (old ^ new).tobytes()
    places = np.flatnonzero(np.frombuffer(dense, np.uint8)).astype("<u4")
    content = np.uint32(places.size).tobytes() + places.tobytes()
    content += np.frombuffer(new.tobytes(), np.uint8)[places].tobytes()
    every = np.arange(280, dtype="<u4")
    whole = np.uint32(280).tobytes() + every.tobytes() + new.tobytes()
    best = zstandard.ZstdCompressor(level=19, write_checksum=True)
    planes = [np.frombuffer(new.tobytes(), np.uint8)[byte::2] for byte in (0, 1)]
    payloads = {
        "xor-other-level": ("xor", best.compress(dense)),
        "overwrite-other-level": ("overwrite", best.compress(content)),
        "overwrite-every-byte": ("overwrite", best.compress(whole)),
        "planes-not-rotated": ("planes", b"\0\x02\x8c\x01\x8c\x01" + streams.pack(planes)),
        "planes-uncompressed": (
            "planes",
            b"\0\x02\x8c\x01\x8c\x01\xb0\x04\xb0\x04" + b"".join(map(bytes, planes)),
        ),
    }
    for low_bytes in (0, 1, 2):
        for symbol_bits in (1, 2, 4, 8):
            payload = _packed(old, new, low_bytes, symbol_bits)
            payloads[f"packed-{low_bytes}-low-{symbol_bits}-bits"] = "packed", payload
    for count in (1, 5, 16):
        for marked in (False, True):
            name = f"tight-{count}-classes-{'others' if marked else 'changes'}-marked"
            payloads[name] = "tight", _tight(old, new, count, others_marked=marked)
    for name, (encoding, payload) in payloads.items():
        document = _tensor(meta, old) | {
            "new": new.tobytes().hex(),
            "encoding": encoding,
            "payload": payload.hex(),
        }
        (directory / f"{name}.json").write_bytes(strict_json.dump(document))


def _packed(old: Bits, new: Bits, low_bytes: int, symbol_bits: int) -> bytes:
    """Return a payload of one window of 140 units, from the page rather than from the codec."""
    offsets, old_bits, new_bits = kernels.diff(old, new)
    low, high = kernels.encode_gaps(offsets, low_bytes)
    values = kernels.steps(old_bits, new_bits).astype(np.uint32) - 1
    escape = (1 << symbol_bits) - 1
    excess = (values[values >= escape] - escape).astype(np.uint16)
    joined = 0
    for place, value in enumerate(values.tolist()):
        joined |= min(value, escape) << (symbol_bits * place)
    symbols = joined.to_bytes(-(-len(values) * symbol_bits // 8), "little")
    contents = [*low, high, np.frombuffer(symbols, np.uint8)]
    if excess.size:
        contents += list(kernels.split_planes(excess))
    head = b"\x01\x02\x8c\x01\x8c\x01" + bytes([len(values), low_bytes, symbol_bits, excess.size])
    return head + streams.pack(contents)


def _tight(old: Bits, new: Bits, count: int, *, others_marked: bool) -> bytes:
    """Return a payload of one window of 140 units, from the page rather than from the codec."""
    lowest, head, unary, fields = 117, b"", "", ""
    classes = np.clip((old >> 7 & 0xFF).astype(int) - lowest, 0, count - 1)
    for index in range(count):
        gap_bits, run_bits, excess_bits = index % 4, index % 3, index % 7
        members = np.flatnonzero(classes == index)
        is_changed = old[members] != new[members]
        steps = (new[members].astype(int) - old[members].astype(int) + 32768) % 65536 - 32768
        steps = steps[is_changed]
        ulps, is_large = np.abs(steps), np.abs(steps) > 1
        if not steps.size:
            head += b"\0"
            continue
        code = 128 * others_marked
        head += bytes([steps.size, gap_bits + code])
        head += bytes([np.count_nonzero(~is_changed)]) if others_marked else b""
        head += bytes([np.count_nonzero(is_large)])
        head += bytes([run_bits + code, excess_bits]) if is_large.any() else b""
        # Strings of bits, the first one first; fields have their lowest bit first.
        for marks, bits in ((is_changed, gap_bits), (is_large, run_bits))[: 1 + is_large.any()]:
            places = np.flatnonzero(marks != others_marked)
            for gap in np.diff(places, prepend=-1) - 1:
                unary += "0" * (gap >> bits) + "1"
                fields += f"{gap % 2**bits:0{bits}b}"[::-1] if bits else ""
        for excess in ulps[is_large] - 2:
            whole = f"{excess + 2**excess_bits:b}"
            unary += "0" * (len(whole) - 1 - excess_bits) + "1"
            fields += whole[:0:-1]
        fields += "".join("1" if step < 0 else "0" for step in steps)
    ones, lows = (
        int(row[::-1] or "0", 2).to_bytes(-(-len(row) // 8), "little") for row in (unary, fields)
    )
    body = bytes([count, lowest]) + head + varint(len(ones)) + ones + lows
    return b"\0\x02\x8c\x01\x8c\x01" + varint(len(body)) + body


def _tensor(meta: TensorMeta, old: Bits) -> dict[str, Any]:
    return {"dtype": meta.dtype, "shape": list(meta.shape), "base": old.tobytes().hex()}
