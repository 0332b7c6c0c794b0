"""Torch tensors and numpy arrays as bits: their canonical dtype and shape, and a view of their memory.

torch is never imported here: who hands over a torch tensor has imported it already.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np

from syncline.errors import LayoutError
from syncline.types import Bits, DeviceBits, TensorMeta, unsigned

NUMPY_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "bool": "BOOL",
        "uint8": "U8",
        "int8": "I8",
        "uint16": "U16",
        "int16": "I16",
        "uint32": "U32",
        "int32": "I32",
        "uint64": "U64",
        "int64": "I64",
        "float16": "F16",
        "float32": "F32",
        "float64": "F64",
        "complex64": "C64",
        "bfloat16": "BF16",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e5m2": "F8_E5M2",
        "float8_e8m0fnu": "F8_E8M0",
        "float8_e4m3fnuz": "F8_E4M3FNUZ",
        "float8_e5m2fnuz": "F8_E5M2FNUZ",
    }
)
"""Canonical dtype by the name of a numpy dtype (those of ml_dtypes included) or a torch dtype."""

_PACKED_FP4 = "float4_e2m1fn_x2"
"""Torch's dtype of two 4-bit floats in a byte; a tensor of it is half as long as what it stands for."""


def as_bits(name: str, value: object) -> tuple[TensorMeta, Bits]:
    """Return the meta and the bits of an array, without a copy where its memory allows.

    Args:
        name: canonical name.
        value: a numpy array (bfloat16 and FP8 of ml_dtypes included) or a torch tensor of any device.

    Returns:
        meta; bits (meta.unit_count,): a view of the array's memory if it is contiguous, in host memory
        and little-endian, else one copy.

    Raises:
        LayoutError: not an array, not a plain strided one, or of a dtype that safetensors cannot hold.

    Example:
        >>> meta, bits = as_bits("w", np.array([1.0, -0.0], np.float32))
        >>> meta.dtype, [hex(unit) for unit in bits]
        ('F32', ['0x3f800000', '0x80000000'])
    """
    if isinstance(value, np.ndarray):
        return _numpy_bits(name, value)
    if is_torch_tensor(value):
        meta = torch_meta(name, value)
        return meta, _torch_bits(value, meta.unit_bytes)
    raise LayoutError(
        f"tensor {name!r}: expected a torch tensor or a numpy array, found {type(value).__name__}",
        tensor=name,
    )


def is_torch_tensor(value: Any) -> bool:
    """Tell whether a value is a torch tensor; torch is looked up, never imported."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_on_gpu(value: Any) -> bool:
    """Tell whether a value is a torch tensor whose bits the GPU kernels can work on where they are."""
    return is_torch_tensor(value) and bool(value.is_cuda)


def device_bits(name: str, tensor: Any) -> tuple[TensorMeta, DeviceBits]:
    """Return the meta and the bits of a torch tensor as an unsigned tensor on the same device.

    Returns:
        meta; bits (meta.unit_count,): a view of the tensor's memory if it is contiguous, else one copy
        on its device.

    Raises:
        LayoutError: see `torch_meta`.
    """
    meta = torch_meta(name, tensor)
    unsigned_dtype = getattr(torch_module(), unsigned(meta.unit_bytes).name)
    return meta, torch_integers(tensor, meta.unit_bytes).view(unsigned_dtype)


def torch_meta(name: str, tensor: Any) -> TensorMeta:
    """Return the canonical meta of a torch tensor that has plain memory of its own.

    Raises:
        LayoutError: a wrapper (DTensor, quantised, fake), sparse, without memory, or of a dtype that
            safetensors cannot hold.
    """
    # Wrapper subclasses say how to take them apart; what they report as memory is not the weights.
    if type(tensor).__name__ == "DTensor":
        fault = (
            "a DTensor, of which this rank holds a part: publish with ShardedPublisher on every rank "
            "(docs/how-to/publish-from-every-rank.md), or gather it first"
        )
    elif hasattr(tensor, "__tensor_flatten__"):
        fault = (
            f"a {type(tensor).__name__}, which wraps other tensors: pass those, or gather it first"
        )
    elif str(tensor.layout) != "torch.strided":
        fault = f"of layout {tensor.layout}: pass a plain tensor"
    elif tensor.is_meta:
        fault = "on the meta device, so it has no bits: load the weights first"
    else:
        dtype = str(tensor.dtype).removeprefix("torch.")
        shape = tuple(tensor.shape)
        if dtype == _PACKED_FP4 and shape:
            return TensorMeta(name, "F4", (*shape[:-1], 2 * shape[-1]))
        if dtype in NUMPY_NAMES:
            return TensorMeta(name, NUMPY_NAMES[dtype], shape)
        fault = f"of dtype {dtype}, which safetensors cannot hold"
    raise LayoutError(f"tensor {name!r} is {fault}", tensor=name)


def torch_module() -> ModuleType:
    """Return torch, which whoever holds a torch tensor has imported."""
    return sys.modules["torch"]


def _numpy_bits(name: str, array: np.ndarray[Any, Any]) -> tuple[TensorMeta, Bits]:
    if isinstance(array, np.ma.MaskedArray):
        raise LayoutError(f"tensor {name!r} is a masked array; pass plain data", tensor=name)
    little = array.dtype.newbyteorder("<")
    dtype = NUMPY_NAMES.get(little.name)
    if dtype is None:
        raise LayoutError(
            f"tensor {name!r} is of dtype {array.dtype}, which safetensors cannot hold", tensor=name
        )
    meta = TensorMeta(name, dtype, array.shape)
    swapped = array if array.dtype == little else array.byteswap().view(little)
    plain = np.ascontiguousarray(swapped).view(np.ndarray)
    return meta, plain.reshape(-1).view(unsigned(meta.unit_bytes))


def torch_integers(tensor: Any, unit_bytes: int) -> Any:
    """Return the units of a plain torch tensor as a flat tensor of integers, on the same device.

    Aliasing: a view of the tensor's memory if that is contiguous, else a copy.
    """
    torch = torch_module()
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[unit_bytes]
    # Copies are made of integers: torch would turn every byte of a bool that is not 0 into 1.
    plain = tensor.detach().resolve_conj().resolve_neg().view(integer)
    return plain.contiguous().reshape(-1)


def host_bits(integers: Any) -> Bits:
    """Return what `torch_integers` gave as bits in host memory: a view if it lies there already."""
    raw: Bits = integers.cpu().numpy()
    return raw.view(unsigned(raw.itemsize))


def _torch_bits(tensor: Any, unit_bytes: int) -> Bits:
    if tensor.numel() == 0:
        return np.empty(0, unsigned(unit_bytes))
    return host_bits(torch_integers(tensor, unit_bytes))
