"""Where a family transforms values and not only places: an integer is added, exactly or not at all."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from syncline.errors import LayoutError
from syncline.layouts.blocks import Block
from syncline.types import TensorMeta, unsigned

_FLOATS = {"F16": np.float16, "F32": np.float32, "F64": np.float64}


def to_canonical(bits: NDArray[Any], block: Block, meta: TensorMeta) -> NDArray[Any]:
    """Return canonical bits for local ones; the same array unless the block adds something.

    Raises:
        LayoutError: a sum is not exact in the canonical dtype.
    """
    return bits if block.add == 0 else _plus(bits, block.add, meta)


def to_local(bits: NDArray[Any], block: Block, meta: TensorMeta) -> NDArray[Any]:
    """Return local bits for canonical ones; the same array unless the block adds something.

    Raises:
        LayoutError: a difference is not exact in the canonical dtype.
    """
    return bits if block.add == 0 else _plus(bits, -block.add, meta)


def _plus(bits: NDArray[Any], amount: int, meta: TensorMeta) -> NDArray[Any]:
    """Add to every value in double precision; refuse where the sum is rounded, there or in the dtype."""
    if meta.dtype not in _FLOATS and meta.dtype != "BF16":
        raise LayoutError(f"{meta.name}: cannot add to values of {meta.dtype}", tensor=meta.name)
    values = _as_double(np.ascontiguousarray(bits), meta.dtype)
    added = values + amount
    result = _from_double(added, meta)
    exact = (_as_double(result, meta.dtype) == added) & (added - amount == values)
    if not exact.all():
        raise LayoutError(
            f"{meta.name}: adding {amount} is not exact in {meta.dtype} for "
            f"{np.count_nonzero(~exact)} of {exact.size} values; keep this tensor in a wider dtype",
            tensor=meta.name,
        )
    return result


def _as_double(bits: NDArray[Any], dtype: str) -> NDArray[np.float64]:
    if dtype == "BF16":
        return (bits.astype("<u4") << np.uint32(16)).view("<f4").astype(np.float64)
    return bits.view(_FLOATS[dtype]).astype(np.float64)


def _from_double(values: NDArray[np.float64], meta: TensorMeta) -> NDArray[Any]:
    if meta.dtype == "BF16":
        # Cutting the low bits rounds; the caller's comparison finds it.
        return (values.astype("<f4").view("<u4") >> np.uint32(16)).astype("<u2")
    return values.astype(_FLOATS[meta.dtype]).view(unsigned(meta.unit_bytes))
