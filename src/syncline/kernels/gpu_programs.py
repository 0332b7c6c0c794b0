"""The programs that run on a GPU, in Triton; `syncline.kernels.gpu` checks their arguments and starts them.

Every program owns a fixed range of units and writes to places that no other program writes to, so results
do not depend on the order in which a device runs them; there are no atomics. Addresses are a 64-bit base
plus 32-bit steps. Whole blocks are loaded without a mask, because a mask makes loads narrow.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def compare(old, new, count: tl.int64, mask, counts, BLOCK: tl.constexpr):
    """Set one bit of `mask` for every unit that differs; put their number for block b at counts[b + 1]."""
    block = tl.program_id(0).to(tl.int64)
    base = block * BLOCK
    eights = tl.arange(0, BLOCK // 8)
    bit = tl.arange(0, 8)[None, :]
    steps = eights[:, None] * 8 + bit
    if base + BLOCK <= count:
        before = tl.load(old + base + steps)
        after = tl.load(new + base + steps)
    else:
        inside = base + steps < count
        before = tl.load(old + base + steps, mask=inside, other=0)
        after = tl.load(new + base + steps, mask=inside, other=0)
    differs = (before != after).to(tl.int32)
    tl.store(mask + block * (BLOCK // 8) + eights, tl.sum(differs << bit, axis=1).to(tl.uint8))
    tl.store(counts + block + 1, tl.sum(tl.sum(differs, axis=1), axis=0).to(tl.int64))


@triton.jit
def compact(
    old,
    new,
    mask,
    starts,
    offsets,
    old_bits,
    new_bits,
    REFRESH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the marked units of block b, in order, from slot starts[b] on; maybe update `old` there."""
    block = tl.program_id(0).to(tl.int64)
    start = tl.load(starts + block)
    if tl.load(starts + block + 1) > start:
        base = block * BLOCK
        steps = tl.arange(0, BLOCK)
        eights = tl.load(mask + block * (BLOCK // 8) + steps // 8)
        differs = (eights.to(tl.int32) >> (steps % 8)) & 1
        marked = differs != 0
        slots = tl.cumsum(differs, axis=0) - 1
        before = tl.load(old + base + steps, mask=marked, other=0)
        after = tl.load(new + base + steps, mask=marked, other=0)
        tl.store(offsets + start + slots, (base + steps).to(tl.uint32), mask=marked)
        tl.store(old_bits + start + slots, before, mask=marked)
        tl.store(new_bits + start + slots, after, mask=marked)
        if REFRESH:
            tl.store(old + base + steps, after, mask=marked)


@triton.jit
def first_fault(
    offsets,
    count: tl.int64,
    limit: tl.int64,
    faults,
    ASCENDING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Put at faults[b] the index of block b's first offset that is not legal, or `count`."""
    block = tl.program_id(0).to(tl.int64)
    index = block * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    offset = tl.load(offsets + index, mask=inside, other=0).to(tl.int64)
    is_fault = offset >= limit
    if ASCENDING:
        has_previous = inside & (index > 0)
        previous = tl.load(offsets + index - 1, mask=has_previous, other=0).to(tl.int64)
        is_fault = is_fault | (has_previous & (previous >= offset))
    tl.store(faults + block, tl.min(tl.where(inside & is_fault, index, count), axis=0))


@triton.jit
def scatter(target, offsets, bits, count: tl.int64, BLOCK: tl.constexpr):
    """Write bits[i] at target[offsets[i]]; no offset comes twice."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    offset = tl.load(offsets + index, mask=inside, other=0).to(tl.int64)
    tl.store(target + offset, tl.load(bits + index, mask=inside, other=0), mask=inside)


@triton.jit
def gather(source, offsets, bits, count: tl.int64, BLOCK: tl.constexpr):
    """Write source[offsets[i]] at bits[i]."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    offset = tl.load(offsets + index, mask=inside, other=0).to(tl.int64)
    tl.store(bits + index, tl.load(source + offset, mask=inside, other=0), mask=inside)


@triton.jit
def splitmix(x):
    """Return the splitmix64 hash of x, as docs/reference/format.md section 5 has it."""
    z = x + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def row_key(row, seed):
    """Return the row key of a row (uint64) for one lane's seed."""
    return splitmix(row * 0xD1342543DE82EF95 + seed) | 1


@triton.jit
def fingerprint(
    digits,
    first: tl.int64,
    count: tl.int64,
    seed_a: tl.uint64,
    seed_b: tl.uint64,
    sums,
    NARROW: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Put at sums[2 p] and sums[2 p + 1] both lanes of program p's rows; `first` is digit 0's index.

    A row's 1024 digits lie in GROUPS groups; each group keeps its own sum over all rows, since
    multiplying by the row's key and adding up may change places: one reduction a program, not one a row.
    """
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, GROUPS)[:, None] * (1024 // GROUPS)
    columns = columns + tl.arange(0, 1024 // GROUPS)[None, :]
    keys = splitmix(columns.to(tl.uint64))
    keys_a = (keys & 0xFFFFFFFF) | 1
    keys_b = (keys >> 32) | 1
    sum_a = tl.zeros([GROUPS], tl.uint64)
    sum_b = tl.zeros([GROUPS], tl.uint64)
    for step in range(ROWS):
        row = first // 1024 + program * ROWS + step
        base = row * 1024 - first
        if (base >= 0) & (base + 1024 <= count):
            digit = tl.load(digits + base + columns)
        else:
            place = base + columns
            inside = (place >= 0) & (place < count)
            digit = tl.load(digits + place, mask=inside, other=0)
        if (
            NARROW
        ):  # of 1 or 2 bytes: 32 bits hold the square, and multiplying goes three times faster
            square = (digit.to(tl.uint32) * digit.to(tl.uint32)).to(tl.uint64)
        else:
            square = digit.to(tl.uint64) * digit.to(tl.uint64)
        place_in_tensor = row.to(tl.uint64)
        sum_a += tl.sum(keys_a * square, axis=1) * row_key(place_in_tensor, seed_a)
        sum_b += tl.sum(keys_b * square, axis=1) * row_key(place_in_tensor, seed_b)
    tl.store(sums + 2 * program, tl.sum(sum_a, axis=0))
    tl.store(sums + 2 * program + 1, tl.sum(sum_b, axis=0))


@triton.jit
def fingerprint_change(
    offsets,
    old_bits,
    new_bits,
    start: tl.int64,
    count: tl.int64,
    seed_a: tl.uint64,
    seed_b: tl.uint64,
    sums,
    HALVES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Put at sums[2 b] and sums[2 b + 1] what block b's changes add; units of 8 bytes have 2 HALVES."""
    block = tl.program_id(0).to(tl.int64)
    index = block * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    place = tl.load(offsets + index, mask=inside, other=0).to(tl.uint64) + start.to(tl.uint64)
    old = tl.load(old_bits + index, mask=inside, other=0).to(tl.uint64)
    new = tl.load(new_bits + index, mask=inside, other=0).to(tl.uint64)
    sum_a = tl.zeros([BLOCK], tl.uint64)
    sum_b = tl.zeros([BLOCK], tl.uint64)
    for half in tl.static_range(HALVES):
        before = (old >> (32 * half)) & 0xFFFFFFFF
        after = (new >> (32 * half)) & 0xFFFFFFFF
        rise = after * after - before * before
        digit = place * HALVES + half
        keys = splitmix(digit & 1023)
        sum_a += rise * ((keys & 0xFFFFFFFF) | 1) * row_key(digit >> 10, seed_a)
        sum_b += rise * ((keys >> 32) | 1) * row_key(digit >> 10, seed_b)
    tl.store(sums + 2 * block, tl.sum(sum_a, axis=0))
    tl.store(sums + 2 * block + 1, tl.sum(sum_b, axis=0))
