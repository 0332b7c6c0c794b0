"""Reading and writing single units of torch tensors, wherever and however they lie."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from syncline import arrays, device, kernels
from syncline.arrays import torch_meta, torch_module
from syncline.engines.memory import ArrayTarget
from syncline.errors import LayoutError
from syncline.types import Bits, Record, unsigned


def check_writable(name: str, tensor: Any) -> None:
    """Check that a tensor has memory in which every element has its own place.

    Raises:
        LayoutError: it does not.
    """
    torch_meta(name, tensor)
    if tensor.is_conj() or tensor.is_neg():
        raise LayoutError(
            f"tensor {name!r} is a lazy conjugate or negative, whose memory holds other bits; give the "
            "module a resolved copy",
            tensor=name,
        )
    if any(
        stride == 0 < side - 1 for stride, side in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        raise LayoutError(
            f"tensor {name!r} is expanded: several elements share one place in memory, so it cannot be "
            "overwritten; give the module a contiguous copy",
            tensor=name,
        )


def same_memory(tensor: Any) -> object:
    """Return something that is equal for tied tensors alone; None for an empty one, which has no memory."""
    if tensor.numel() == 0:
        return None
    return (
        str(tensor.device),
        tensor.data_ptr(),
        str(tensor.dtype),
        tuple(tensor.shape),
        tensor.stride(),
    )


def identity(live: Mapping[str, Any]) -> tuple[object, ...]:
    """Return something that changes when a tensor is replaced by another."""
    return tuple((name, same_memory(tensor)) for name, tensor in live.items())


class TorchTarget:
    """Torch tensors as the target of an update; the kernels write those whose elements lie in order."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        viewed: dict[str, Bits] = {}
        self._others: dict[str, _OnGpu | _Strided] = {}
        for name, tensor in tensors.items():
            if tensor.is_contiguous() and arrays.is_on_gpu(tensor):
                self._others[name] = _OnGpu(name, tensor)
            elif tensor.is_contiguous() and tensor.device.type == "cpu":
                viewed[name] = arrays.as_bits(name, tensor)[1]
            else:
                self._others[name] = _Strided(tensor)
        self._arrays = ArrayTarget(viewed)
        self.is_concurrent = self._arrays.is_concurrent and not self._others

    def first_difference(self, record: Record, bits: Bits) -> int | None:
        """Return the index of the first of the record's places where other bits than these stand."""
        other = self._others.get(record.name)
        if other is None:
            return self._arrays.first_difference(record, bits)
        return kernels.first_difference(other.read(record), bits)

    def read(self, record: Record) -> Bits:
        """Return the bits at the record's places."""
        other = self._others.get(record.name)
        return self._arrays.read(record) if other is None else other.read(record)

    def write(self, record: Record, bits: Bits) -> None:
        """Put bits at the record's places."""
        other = self._others.get(record.name)
        if other is None:
            self._arrays.write(record, bits)
        else:
            other.write(record, bits)

    def flush(self) -> None:
        """Wait until the devices have done what was asked."""
        for place in {other.device for other in self._others.values()}:
            if place.type == "cuda":
                torch_module().cuda.synchronize(place)


class _OnGpu:
    """A contiguous tensor in GPU memory: records go there and are written by the kernels."""

    def __init__(self, name: str, tensor: Any) -> None:
        self.device = tensor.device
        self._bits = arrays.device_bits(name, tensor)[1]

    def read(self, record: Record) -> Bits:
        window = self._bits[record.start :]
        if record.offsets is None:
            return device.to_host(window[: record.new_bits.size])
        return device.to_host(kernels.gather(window, device.to_device(record.offsets, window)))

    def write(self, record: Record, bits: Bits) -> None:
        window = self._bits[record.start :]
        values = device.to_device(bits, window)
        if record.offsets is None:
            with torch_module().inference_mode():
                window[: bits.size].copy_(values)
        else:
            kernels.scatter(window, device.to_device(record.offsets, window), values)


class _Strided:
    """A tensor on a device, or one whose elements do not lie in order."""

    def __init__(self, tensor: Any) -> None:
        torch = torch_module()
        signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        plain = tensor.detach()
        self.device = tensor.device
        self._shape = tuple(tensor.shape)
        self._strides = tensor.stride()
        self._is_contiguous = tensor.is_contiguous()
        self._unsigned = unsigned(tensor.element_size())
        self._integer = np.dtype(
            "u1" if tensor.element_size() == 1 else f"i{tensor.element_size()}"
        )
        extent = sum((s - 1) * t for s, t in zip(self._shape, self._strides, strict=True)) + 1
        with torch.inference_mode():
            integers = plain.view(signed[tensor.element_size()])
            self._memory = integers.as_strided(
                (extent if tensor.numel() else 0,), (1,), integers.storage_offset()
            )

    def read(self, record: Record) -> Bits:
        with torch_module().inference_mode():
            found: Bits = self._memory[self._where(record)].cpu().numpy()
        return found.view(self._unsigned)

    def write(self, record: Record, bits: Bits) -> None:
        torch = torch_module()
        with torch.inference_mode():
            values = torch.from_numpy(np.ascontiguousarray(bits).view(self._integer).copy())
            self._memory[self._where(record)] = values.to(self.device)

    def _where(self, record: Record) -> Any:
        """Return a slice or an index tensor of the places in memory of a record's units."""
        stop = record.start + record.new_bits.size
        if record.offsets is None and self._is_contiguous:
            return slice(record.start, stop)
        if record.offsets is None:
            units = np.arange(record.start, stop, dtype=np.int64)
        else:
            units = record.start + record.offsets.astype(np.int64)
        places = units if self._is_contiguous else self._places(units)
        return torch_module().from_numpy(places).to(self.device)

    def _places(self, units: NDArray[np.int64]) -> NDArray[np.int64]:
        places = np.zeros_like(units)
        for side, stride in zip(reversed(self._shape), reversed(self._strides), strict=True):
            places += units % side * stride
            units = units // side
        return places
