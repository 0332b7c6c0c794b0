"""Page-locked host memory, so that a GPU copies from it by itself. Never ran: there was no GPU."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

from syncline.abc import ByteArray
from syncline.errors import TransportError


def pin_if_cuda() -> Callable[[ByteArray], None] | None:
    """Return what page-locks memory for CUDA; None where there is no CUDA device.

    The memory stays locked as long as the process: unlocking belongs to the driver's clean-up.
    """
    if find_spec("torch") is None or not import_module("torch").cuda.is_available():
        return None
    return _pin


def _pin(memory: ByteArray) -> None:
    if not memory.size:
        return
    cudart = import_module("torch").cuda.cudart()
    status = int(cudart.cudaHostRegister(int(memory.ctypes.data), memory.size, 0))
    if status:
        raise TransportError(f"cudaHostRegister of {memory.size} bytes failed with error {status}")
