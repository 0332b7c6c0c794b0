"""The kernels for torch tensors in GPU memory, with the reference's signatures; loaded by the door.

Bits are flat, contiguous torch tensors of uint8, uint16, uint32 or uint64 on one device, offsets are
uint32. Work goes to the device's current stream. Arguments are checked here. Tensors in host memory are
taken only where Triton interprets its programs (TRITON_INTERPRET=1), which is how they are tested.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import triton

from syncline.errors import ConfigError, LayoutError
from syncline.kernels import gpu_programs, reference
from syncline.types import ZERO, DeviceBits, Fingerprint

BLOCK_UNITS = 2048
BLOCK_CHANGES = 1024
ROWS_A_PROGRAM = 32
GROUPS_A_ROW = 128

OPTIONS = {"enable_fp_fusion": False}  # there are no floats; said so that Triton does not ask
"""How every program is compiled."""

_UNITS = {torch.uint8: 1, torch.uint16: 2, torch.uint32: 4, torch.uint64: 8}
_MAX_UNITS = 1 << 32
_MASK_64 = (1 << 64) - 1


def is_interpreting() -> bool:
    """Tell whether Triton runs its programs on the host; settled when this module was imported."""
    return not isinstance(gpu_programs.compare, triton.JITFunction)


def diff(
    old: DeviceBits, new: DeviceBits, *, refresh: bool
) -> tuple[DeviceBits, DeviceBits, DeviceBits]:
    """See `syncline.kernels.diff`; the results are on the device. Waits until their number is known.

    Reads both arrays once, and the sectors with changes twice. Temporary memory: 1 bit a unit.
    """
    _check_pair(old, new)
    if len(old) > _MAX_UNITS:
        raise LayoutError(f"a window holds at most {_MAX_UNITS} units, not {len(old)}; split it")
    return compact(old, new, *compare(old, new), refresh=refresh)


def compare(old: DeviceBits, new: DeviceBits) -> tuple[DeviceBits, DeviceBits]:
    """Do the half of `diff` that reads everything; does not wait.

    Returns:
        mask (blocks, BLOCK_UNITS / 8) uint8: a bit for every unit, set where both differ; starts
        (blocks + 1,) int64: how many differ before each block, and in all.
    """
    blocks = triton.cdiv(len(old), BLOCK_UNITS)
    mask = torch.empty((blocks, BLOCK_UNITS // 8), dtype=torch.uint8, device=old.device)
    counts = torch.zeros(blocks + 1, dtype=torch.int64, device=old.device)
    run(gpu_programs.compare, blocks, old, new, len(old), mask, counts, BLOCK=BLOCK_UNITS)
    return mask, counts.cumsum(0)


def compact(
    old: DeviceBits, new: DeviceBits, mask: DeviceBits, starts: DeviceBits, *, refresh: bool
) -> tuple[DeviceBits, DeviceBits, DeviceBits]:
    """Do the half of `diff` that is about what differs; waits until its number is known."""
    found = int(starts[-1])
    offsets = torch.empty(found, dtype=torch.uint32, device=old.device)
    old_bits = torch.empty(found, dtype=old.dtype, device=old.device)
    new_bits = torch.empty(found, dtype=old.dtype, device=old.device)
    if found:
        run(
            gpu_programs.compact,
            len(mask),
            old,
            new,
            mask,
            starts,
            offsets,
            old_bits,
            new_bits,
            REFRESH=refresh,
            BLOCK=BLOCK_UNITS,
            num_warps=8,  # with fewer, a thread needs so many registers that few threads fit
        )
    return offsets, old_bits, new_bits


def scatter(target: DeviceBits, offsets: DeviceBits, bits: DeviceBits) -> None:
    """See `syncline.kernels.scatter`, but the offsets must rise strictly: a device keeps no order."""
    _check_changes(offsets, bits)
    _check_width(target, bits)
    _check_offsets(offsets, len(target), is_ascending=True)
    blocks = triton.cdiv(len(bits), BLOCK_CHANGES)
    run(gpu_programs.scatter, blocks, target, offsets, bits, len(bits), BLOCK=BLOCK_CHANGES)


def gather(source: DeviceBits, offsets: DeviceBits) -> DeviceBits:
    """See `syncline.kernels.gather`; the result is on the device."""
    _check_width(source, source)
    _check_offsets(offsets, len(source), is_ascending=False)
    bits = torch.empty(len(offsets), dtype=source.dtype, device=source.device)
    blocks = triton.cdiv(len(bits), BLOCK_CHANGES)
    run(gpu_programs.gather, blocks, source, offsets, bits, len(bits), BLOCK=BLOCK_CHANGES)
    return bits


def fingerprint(bits: DeviceBits, start: int, seeds: tuple[int, int]) -> Fingerprint:
    """See `syncline.kernels.fingerprint`; 16 bytes come back to the host."""
    _check_width(bits, bits)
    _check_start(start)
    if not len(bits):
        return ZERO
    halves = _halves(bits)
    digits = bits.view(torch.uint32) if halves == 2 else bits
    first = start * halves
    rows = triton.cdiv(first % reference.ROW_DIGITS + len(digits), reference.ROW_DIGITS)
    programs = triton.cdiv(rows, ROWS_A_PROGRAM)
    sums = _sums(programs, bits)
    run(
        gpu_programs.fingerprint,
        programs,
        digits,
        first,
        len(digits),
        *seeds,
        sums,
        NARROW=bits.dtype in (torch.uint8, torch.uint16),
        ROWS=ROWS_A_PROGRAM,
        GROUPS=GROUPS_A_ROW,
    )
    return _total(sums)


def fingerprint_change(
    start: int,
    offsets: DeviceBits,
    old_bits: DeviceBits,
    new_bits: DeviceBits,
    seeds: tuple[int, int],
) -> Fingerprint:
    """See `syncline.kernels.fingerprint_change`; 16 bytes come back to the host."""
    _check_pair(old_bits, new_bits)
    _check_changes(offsets, new_bits)
    _check_start(start)
    blocks = triton.cdiv(len(offsets), BLOCK_CHANGES)
    sums = _sums(blocks, new_bits)
    run(
        gpu_programs.fingerprint_change,
        blocks,
        offsets,
        old_bits,
        new_bits,
        start,
        len(offsets),
        *seeds,
        sums,
        HALVES=_halves(old_bits),
        BLOCK=BLOCK_CHANGES,
    )
    return _total(sums)


def run(program: Any, grid: int, first: DeviceBits, *rest: object, **constants: int) -> None:
    """Run so many instances of a program on the device of its first argument; none is none."""
    if grid:
        # Triton launches on the current device, which need not be the tensor's.
        with torch.cuda.device(first.device) if first.is_cuda else nullcontext():
            program[(grid,)](first, *rest, **constants, **OPTIONS)


def _halves(bits: DeviceBits) -> int:
    return 2 if bits.dtype == torch.uint64 else 1


def _sums(programs: int, like: DeviceBits) -> DeviceBits:
    return torch.empty((programs, 2), dtype=torch.uint64, device=like.device)


def _total(sums: DeviceBits) -> Fingerprint:
    """Add up both lanes; int64 wraps around just as uint64, which torch cannot add."""
    a, b = sums.view(torch.int64).sum(0).tolist()
    return Fingerprint(a & _MASK_64, b & _MASK_64)


def _check_bits(bits: DeviceBits) -> None:
    if not isinstance(bits, torch.Tensor) or bits.dtype not in _UNITS:
        kind = bits.dtype if isinstance(bits, torch.Tensor) else type(bits).__name__
        raise LayoutError(
            f"bits on a device must be torch tensors of uint8, uint16, uint32 or uint64, not {kind}"
        )
    if bits.ndim != 1 or not bits.is_contiguous():
        raise LayoutError(
            f"bits must be flat and contiguous, not of shape {tuple(bits.shape)} and strides "
            f"{bits.stride()}"
        )
    if not bits.is_cuda and not is_interpreting():
        raise ConfigError(
            f"the GPU kernels were given a tensor on {bits.device}; pass its numpy view to use the "
            "host's kernels"
        )


def _check_width(a: DeviceBits, b: DeviceBits) -> None:
    _check_bits(a)
    _check_bits(b)
    if a.dtype != b.dtype or a.device != b.device:
        raise LayoutError(
            f"both arrays must have one width and device, not {a.dtype} on {a.device} and {b.dtype} "
            f"on {b.device}"
        )


def _check_pair(a: DeviceBits, b: DeviceBits) -> None:
    _check_width(a, b)
    if len(a) != len(b):
        raise LayoutError(f"both arrays must have one length, not {len(a)} and {len(b)}")


def _check_changes(offsets: DeviceBits, bits: DeviceBits) -> None:
    _check_bits(offsets)
    _check_bits(bits)
    if offsets.dtype != torch.uint32 or offsets.device != bits.device:
        raise LayoutError(
            f"offsets must be uint32 on {bits.device}, not {offsets.dtype} on {offsets.device}"
        )
    if len(offsets) != len(bits):
        raise LayoutError(f"there are {len(offsets)} offsets for {len(bits)} units")


def _check_offsets(offsets: DeviceBits, limit: int, *, is_ascending: bool) -> None:
    """Check the offsets on the device; only if one is bad do they come to the host, to be named."""
    if offsets.dtype != torch.uint32:
        raise LayoutError(f"offsets must be uint32, not {offsets.dtype}")
    blocks = triton.cdiv(len(offsets), BLOCK_CHANGES)
    if not blocks:
        return
    faults = torch.empty(blocks, dtype=torch.int64, device=offsets.device)
    run(
        gpu_programs.first_fault,
        blocks,
        offsets,
        len(offsets),
        limit,
        faults,
        ASCENDING=is_ascending,
        BLOCK=BLOCK_CHANGES,
    )
    if int(faults.min()) < len(offsets):
        check = reference.check_ascending if is_ascending else reference.check_range
        check(offsets.cpu().numpy(), limit)


def _check_start(start: int) -> None:
    if not 0 <= start <= _MASK_64 >> 2:
        raise LayoutError(f"a window starts at a unit index of 0 to 2**62 - 1, not {start}")
