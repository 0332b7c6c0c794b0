"""Patches of vLLM's `sparse_nccl`: flat int32 indices and new values of checkpoint tensors.

vLLM takes them as values in memory and over a collective; releases up to 0.33 have no form of them at
rest, so this is no layout of a store. What is made here fits `SparseWeightPatch` (`name`, `indices`,
`values`, `full_shape`) and `update_weights` (`update_info`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from syncline.abc import Base
from syncline.codecs.payload import placing
from syncline.errors import CodecError, ConfigError, FormatError
from syncline.interchange import sparse
from syncline.types import Bits, Changes, TensorMeta, Window, unsigned

DTYPES: Mapping[str, str] = MappingProxyType(
    {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
)
"""Torch's name of every dtype that a patch can carry."""

_EXPONENTS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"BF16": (8, 7), "F16": (5, 10), "F32": (8, 23), "F64": (11, 52)}
)
"""Bits of exponent and of mantissa."""


@dataclass(frozen=True, slots=True, eq=False)
class Patch:
    """New values of some elements of one checkpoint tensor.

    Attributes:
        meta: the tensor in the checkpoint.
        indices: (k,) int32, flat, strictly ascending.
        bits: (k,) the new bits there; view them as `DTYPES[meta.dtype]`.
    """

    meta: TensorMeta
    indices: NDArray[np.int32]
    bits: Bits


def patches(tensors: Iterable[tuple[TensorMeta, Iterable[Window]]]) -> Iterator[Patch]:
    """Yield a patch for every tensor that changed.

    Raises:
        CodecError: what changed cannot be said in a patch: a dtype that is no float of 16, 32 or 64 bits
            (FP8 and integers), a NaN (which vLLM takes for "unchanged"), or a position above 2**31 - 1.

    Memory: O(changes of one tensor).
    """
    for meta, windows in tensors:
        positions, bits = sparse.gathered(meta, windows)
        if not positions.size:
            continue
        with placing(f"tensor {meta.name!r}, sparse_nccl", meta.name):
            _check_values(meta, bits)
            if positions[-1] > sparse.MAX_INT32:
                raise CodecError(
                    f"position {positions[-1]} is beyond {sparse.MAX_INT32}, what an int32 index reaches"
                )
            yield Patch(meta, positions.astype(np.int32), bits)


def update_info(sent: Sequence[Patch]) -> dict[str, Any]:
    """Return the `update_info` of vLLM's `update_weights` for these patches, in their order.

    Raises:
        ConfigError: there is no patch; vLLM refuses an empty update.

    Example:
        >>> meta = TensorMeta("w", "BF16", (4, 2))
        >>> info = update_info([Patch(meta, np.array([5], np.int32), np.array([0], np.uint16))])
        >>> info["dtype_names"], info["shapes"], info["num_updates_list"]
        (['bfloat16'], [[4, 2]], [1])
    """
    if not sent:
        raise ConfigError("there is no patch: nothing changed, so nothing is to be sent")
    return {
        "names": [patch.meta.name for patch in sent],
        "dtype_names": [DTYPES[patch.meta.dtype] for patch in sent],
        "shapes": [list(patch.meta.shape) for patch in sent],
        "num_updates_list": [patch.indices.size for patch in sent],
    }


def read(
    info: Mapping[str, Any],
    arrays: Iterable[tuple[NDArray[Any], Bits]],
    base: Base,
) -> Iterator[tuple[TensorMeta, Iterator[Changes]]]:
    """Yield every tensor of an update and what to overwrite in it.

    Args:
        info: the `update_info` that was sent.
        arrays: indices and bits of every patch, in the order of `info`.
        base: looks the tensor that is changed up.

    Raises:
        FormatError: `info` breaks a rule; names the field.
        CodecError: indices are not int32, out of range, out of order or repeated, or a value is NaN.
        LayoutError: the base has another tensor of this name, or none.
    """
    rows = _rows(info)
    for number, ((name, dtype, shape, count), (indices, bits)) in enumerate(
        zip(rows, arrays, strict=True)
    ):
        meta, _ = base(name)
        sparse.check_base(meta, dtype, shape)
        with placing(f"patch {number}, tensor {name!r}", name):
            if indices.dtype != np.int32 or indices.ndim != 1 or indices.size != count:
                raise CodecError(
                    f"expected {count} int32 indices, found {indices.dtype} {list(indices.shape)}"
                )
            if bits.dtype != unsigned(meta.unit_bytes) or bits.ndim != 1:
                raise CodecError(f"expected flat bits of {meta.dtype}, found {bits.dtype}")
            _check_values(meta, bits)
        yield meta, _placed(number, meta, indices, bits)


def _placed(
    number: int, meta: TensorMeta, indices: NDArray[np.int32], bits: Bits
) -> Iterator[Changes]:
    with placing(f"patch {number}, tensor {meta.name!r}", meta.name):
        yield from sparse.changes(meta, indices.astype(np.int64), bits)


def _rows(info: Mapping[str, Any]) -> list[tuple[str, str, tuple[int, ...], int]]:
    keys = ("names", "dtype_names", "shapes", "num_updates_list")
    for key in {*keys, *info}:
        if key not in info or key not in keys:
            fault = "is missing" if key not in info else "is not a known key"
            raise FormatError(f"update_info: {key:.80} {fault}")
    columns = [info[key] for key in keys]
    if not all(isinstance(column, list) for column in columns) or len(set(map(len, columns))) != 1:
        raise FormatError(f"update_info: {', '.join(keys)} must be lists of one length")
    by_torch = {torch: dtype for dtype, torch in DTYPES.items()}
    rows: list[tuple[str, str, tuple[int, ...], int]] = []
    seen: set[str] = set()
    for number, (name, torch, shape, count) in enumerate(zip(*columns, strict=True)):
        if torch not in by_torch:
            raise FormatError(
                f"update_info: dtype_names[{number}] must be one of {', '.join(by_torch)}, found {torch!r:.80}"
            )
        if name in seen:
            raise FormatError(f"update_info: names[{number}]: {name!r:.80} is there twice")
        seen.add(name)
        rows.append((name, by_torch[torch], tuple(shape), count))
    return rows


def _check_values(meta: TensorMeta, bits: Bits) -> None:
    if meta.dtype not in DTYPES:
        raise CodecError(
            f"a patch carries {', '.join(DTYPES)} alone, found {meta.dtype}: send the whole tensor instead"
        )
    exponent, mantissa = _EXPONENTS[meta.dtype]
    magnitude = bits & bits.dtype.type((1 << (exponent + mantissa)) - 1)
    infinity = bits.dtype.type(((1 << exponent) - 1) << mantissa)
    if (magnitude > infinity).any():
        raise CodecError(
            "a new value is NaN, which vLLM takes for 'unchanged': send the whole tensor instead"
        )
