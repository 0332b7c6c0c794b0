"""GPU memory shared between processes by CUDA IPC; never run yet, because no GPU was there.

Memory is allocated, shared and freed through the driver itself, so that a handle is the 64 plain bytes that CUDA
defines, names no file, and goes when its process does. torch only gives the context and wraps the pointers.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from syncline.errors import FormatError, TransportUnavailableError
from syncline.types import DeviceBits

_BUFFERS = 2
_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_HEX = re.compile(r"[0-9a-f]{128}")


class _Handle(ctypes.Structure):
    """What `cuIpcGetMemHandle` fills in; passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * _HANDLE_BYTES),)


class CudaBuffers:
    """Two buffers in the memory of one GPU that a trainer shares; see `shared_memory.Buffers`.

    Args:
        device: index of the GPU among those that this process sees. An engine must see the same one.
    """

    kind = "cuda"

    def __init__(self, bucket_bytes: int, device: int) -> None:
        self.bucket_bytes = bucket_bytes
        self._torch = _torch(device)
        self._driver = _driver()
        self._device = device
        pointer = ctypes.c_uint64()
        _check(
            self._driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(2 * bucket_bytes)),
            f"{2 * bucket_bytes} bytes of GPU memory",
        )
        self._pointer = pointer
        self._bits = _wrapped(self._torch, pointer, bucket_bytes, device)

    def at(self, slot: int) -> DeviceBits:
        """Return one of the buffers."""
        return self._bits[slot]

    def told(self) -> tuple[Mapping[str, object], list[int]]:
        """Return size and handle, as plain values."""
        handle = _Handle()
        _check(self._driver.cuIpcGetMemHandle(ctypes.byref(handle), self._pointer), "an IPC handle")
        told = {
            "kind": self.kind,
            "bucket_bytes": self.bucket_bytes,
            "handle": bytes(handle.reserved).hex(),
        }
        return told, []

    def settle(self) -> None:
        """Wait for the copies into the buffers."""
        self._torch.cuda.current_stream(self._device).synchronize()

    def free(self) -> None:
        """Free the memory, once nothing of it is in use."""
        self._torch.cuda.synchronize(self._device)
        del self._bits
        _check(self._driver.cuMemFree_v2(self._pointer), "freeing GPU memory")


class CudaView:
    """An engine's view of such buffers, on the device that is current in torch.

    Args:
        handle: the 64 bytes in hexadecimal.

    Raises:
        FormatError: it is not that.
        TransportUnavailableError: the memory cannot be opened here.
    """

    def __init__(self, handle: str, bucket_bytes: int) -> None:
        if _HEX.fullmatch(handle) is None:
            raise FormatError(f"the trainer's IPC handle must be 128 digits, found {handle!r:.80}")
        self.bucket_bytes = bucket_bytes
        self._torch = _torch(None)
        self._driver = _driver()
        raw = _Handle((ctypes.c_ubyte * _HANDLE_BYTES).from_buffer_copy(bytes.fromhex(handle)))
        pointer = ctypes.c_uint64()
        _check(
            self._driver.cuIpcOpenMemHandle_v2(
                ctypes.byref(pointer), raw, ctypes.c_uint(_LAZY_PEER_ACCESS)
            ),
            "opening the trainer's GPU memory; both processes must see the same GPU",
        )
        self._pointer = pointer
        device = self._torch.cuda.current_device()
        self._bits = _wrapped(self._torch, pointer, bucket_bytes, device)

    def at(self, slot: int) -> DeviceBits:
        """Return one of the buffers."""
        return self._bits[slot]

    def settle(self) -> None:
        """Wait for what this process reads from the buffers."""
        self._torch.cuda.current_stream().synchronize()

    def free(self) -> None:
        """Close the handle, once nothing of the memory is in use."""
        self._torch.cuda.synchronize()
        del self._bits
        _check(self._driver.cuIpcCloseMemHandle(self._pointer), "closing the trainer's GPU memory")


class _Pointer:
    """Memory of the driver's as torch takes it over without owning it."""

    def __init__(self, pointer: ctypes.c_uint64, bucket_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (_BUFFERS, bucket_bytes),
            "typestr": "|u1",
            "data": (pointer.value, False),
            "version": 2,
        }


def _wrapped(torch: Any, pointer: ctypes.c_uint64, bucket_bytes: int, device: int) -> DeviceBits:
    return torch.as_tensor(_Pointer(pointer, bucket_bytes), device=f"cuda:{device}")


def _torch(device: int | None) -> Any:
    if find_spec("torch") is None:
        raise TransportUnavailableError("torch is not installed; pip install syncline[torch]")
    torch = import_module("torch")
    if not torch.cuda.is_available():
        raise TransportUnavailableError(
            "CUDA IPC needs a GPU, and torch finds none; leave device out for shared host memory"
        )
    if device is not None:
        torch.cuda.set_device(device)
    torch.cuda.current_stream().synchronize()  # makes the device's context and lets it be current
    return torch


def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise TransportUnavailableError(f"the CUDA driver cannot be loaded: {error}") from error


def _check(status: int, what: str) -> None:
    if status:
        raise TransportUnavailableError(f"{what}: the CUDA driver says error {status}")
