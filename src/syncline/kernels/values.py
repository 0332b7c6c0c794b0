"""The door to how changed units are told from their base: steps, and symbols of a few bits.

As everywhere behind `syncline.kernels`, where these are public: checked here, native where it is built.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from syncline.errors import LayoutError
from syncline.kernels import reference
from syncline.kernels.backend import is_native
from syncline.kernels.checks import check_bits, check_pair, check_width
from syncline.types import Bits


@cache
def _backend() -> ModuleType:
    return import_module("syncline.kernels.native") if is_native() else reference


def steps(old: Bits, new: Bits) -> Bits:
    """Return `new - old`, modulo the width, as a signed number in zigzag form: 0, -1, 1 -> 0, 1, 2.

    Raises:
        LayoutError: widths or lengths differ.

    Example:
        >>> steps(np.array([7, 7, 7], np.uint8), np.array([7, 6, 8], np.uint8)).tolist()
        [0, 1, 2]
    """
    check_pair(old, new)
    return reference.steps(old, new)


def unsteps(old: Bits, zigzag: Bits) -> Bits:
    """Undo `steps`: return the new bits.

    Raises:
        LayoutError: widths or lengths differ.
    """
    check_pair(old, zigzag)
    return reference.unsteps(old, zigzag)


def write_symbols(old: Bits, new: Bits, *, is_step: bool) -> tuple[int, NDArray[np.uint8], Bits]:
    """Tell changed units from their base in symbols of a few bits (docs/reference/format.md section 6.5).

    Args:
        old, new: (k,) bits of the same width that differ everywhere.
        is_step: tell the distance in steps, see `steps`; else the bits that differ.

    Returns:
        bits of a symbol (1, 4 or 8); symbols, packed; excess (m,), of those that a symbol cannot tell.

    Raises:
        LayoutError: widths or lengths differ.

    Example:
        >>> bits, symbols, excess = write_symbols(
        ...     np.array([7, 7, 7], np.uint16), np.array([8, 6, 99], np.uint16), is_step=True
        ... )
        >>> bits, symbols.tolist(), excess.tolist()
        (4, [1, 15], [168])
    """
    check_pair(old, new)
    told: tuple[int, NDArray[np.uint8], Bits] = _backend().write_symbols(old, new, is_step=is_step)
    return told


def read_symbols(
    old: Bits, symbols: NDArray[np.uint8], bits: int, excess: Bits, *, is_step: bool
) -> Bits:
    """Return the new bits that `write_symbols` told; any input is either refused or gives new bits.

    Raises:
        LayoutError: an argument is not of the right type or length.
        CodecError: these are not what `write_symbols` makes of so many changes.

    Example:
        >>> old, symbols = np.array([7, 7, 7], np.uint16), np.array([1, 15], np.uint8)
        >>> read_symbols(old, symbols, 4, np.array([168], np.uint16), is_step=True).tolist()
        [8, 6, 99]
    """
    check_width(old, excess)
    check_bits(symbols)
    if bits not in (1, 2, 4, 8) or symbols.dtype != np.uint8:
        raise LayoutError(
            f"symbols must be uint8 of 1, 2, 4 or 8 bits, not {symbols.dtype} of {bits}"
        )
    if symbols.size != -(-old.size * bits // 8):
        raise LayoutError(f"{symbols.size} bytes do not hold {old.size} symbols of {bits} bits")
    new: Bits = _backend().read_symbols(old, symbols, bits, excess, is_step=is_step)
    return new
