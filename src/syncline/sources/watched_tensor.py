"""One tensor that an optimizer writes: its bits before a write, compared with its bits after it."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from syncline import kernels, threads
from syncline.arrays import (
    as_bits,
    host_bits,
    is_torch_tensor,
    torch_integers,
    torch_meta,
    torch_module,
)
from syncline.errors import LayoutError
from syncline.sources.dirty import DirtyWindow, Offsets
from syncline.types import WINDOW_UNITS, Bits, TensorMeta

Extent = tuple[int, int]


class WatchedTensor:
    """A torch tensor, what changed in it since a version, and how often torch says it was written.

    Args:
        name: the first of its names.
        dtype: the torch dtype in which it is published; None: its own.

    Attributes:
        memory: what `memory_of` said when it was first watched.

    Raises:
        LayoutError: it is no plain torch tensor, or of a dtype that safetensors cannot hold.
    """

    def __init__(self, name: str, tensor: Any, dtype: Any) -> None:
        if not is_torch_tensor(tensor):
            raise LayoutError(
                f"tensor {name!r}: expected a torch tensor that an optimizer writes, found "
                f"{type(tensor).__name__}",
                tensor=name,
            )
        if tensor.is_inference():
            raise LayoutError(
                f"tensor {name!r}: torch does not count the writes of a tensor that was made in "
                "inference_mode; make the model outside of it",
                tensor=name,
            )
        self.meta = torch_meta(name, tensor)
        self.name = name
        self.tensor = tensor
        self._dtype = dtype if tensor.is_floating_point() else None
        if self._dtype is not None:
            converted = torch_meta(name, tensor.new_empty(0, dtype=dtype))
            self.meta = TensorMeta(name, converted.dtype, self.meta.shape)
        self.memory = memory_of(tensor)
        self._writes = 0
        self._windows: list[DirtyWindow] = []
        self.clear()

    @property
    def is_frozen(self) -> bool:
        """Whether it is a parameter that no optimizer is meant to write."""
        is_parameter = isinstance(self.tensor, torch_module().nn.Parameter)
        return is_parameter and not self.tensor.requires_grad

    @property
    def memory_bytes(self) -> int:
        """Bytes of what is kept about changes."""
        return sum(window.memory_bytes for window in self._windows)

    def clear(self) -> None:
        """Forget all changes: the base is what the tensor holds now."""
        units = self.meta.unit_count
        self._windows = [
            DirtyWindow(min(WINDOW_UNITS, units - start), self.meta.unit_bytes)
            for start in range(0, units, WINDOW_UNITS)
        ]
        self.acknowledge()

    def acknowledge(self) -> None:
        """Take all writes up to now as seen."""
        self._writes = self.tensor._version  # noqa: SLF001 - torch documents no other way

    def fault(self) -> str | None:
        """Return how the tensor was written or replaced since the last `acknowledge`, if it shows."""
        if memory_of(self.tensor) != self.memory:
            return "its memory was replaced (by .data, .to or set_)"
        writes: int = self.tensor._version - self._writes  # noqa: SLF001
        return f"{writes} in-place operations wrote it unseen" if writes else None

    def bits(self) -> Bits:
        """Return the bits to publish, in host memory: a view of the tensor where it lies there."""
        return as_bits(self.name, self._published(self.tensor.detach()))[1]

    def hold(self) -> Any:
        """Return a copy of the bits as they are now, on the tensor's device."""
        held = self._integers()
        is_view = held.untyped_storage().data_ptr() == self.tensor.untyped_storage().data_ptr()
        return held.clone() if is_view else held

    def compare(self, held: Any) -> None:
        """Mark every unit that is not as in the copy any more.

        Cost: reads both once; memory O(changes), on a GPU O(one window).
        """
        now = self._integers()
        jobs = (
            partial(
                _differing, held[start : start + WINDOW_UNITS], now[start : start + WINDOW_UNITS]
            )
            for start in range(0, self.meta.unit_count, WINDOW_UNITS)
        )
        # Other threads may be on other streams of a GPU, where the write is not finished.
        on_host = now.device.type == "cpu"
        results = threads.in_order(jobs) if on_host else (job() for job in jobs)
        for window, found in zip(self._windows, results, strict=True):
            window.add(*found)

    def changes(self, start: int) -> tuple[Offsets, Bits]:
        """Return the places of dirty units in the window from unit `start`, and what stood there."""
        return self._windows[start // WINDOW_UNITS].merged()

    def _published(self, tensor: Any) -> Any:
        return tensor if self._dtype is None else tensor.to(self._dtype)

    def _integers(self) -> Any:
        return torch_integers(self._published(self.tensor.detach()), self.meta.unit_bytes)


def _differing(old: Any, new: Any) -> tuple[Offsets, NDArray[Any]]:
    """Return where two flat tensors of integers differ, and the old ones there, in host memory."""
    if old.device.type == "cpu":
        offsets, old_bits, _ = kernels.diff(host_bits(old), host_bits(new))
        return offsets, old_bits
    places = (old != new).nonzero().reshape(-1)
    return places.cpu().numpy().astype(np.uint32), host_bits(old[places])


def memory_of(tensor: Any) -> tuple[object, ...]:
    """Return what identifies a tensor's memory and how it is read."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    return tensor.data_ptr(), shape, strides, tensor.dtype, tensor.device


def extent_of(tensor: Any) -> Extent:
    """Return the address of a strided tensor's first byte, and of the byte after its last."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((side - 1) * stride for side, stride in sides)
    return start, start + (last + 1) * tensor.element_size()
