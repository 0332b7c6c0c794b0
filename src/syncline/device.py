"""Weights in GPU memory beside weights in host memory: one stream, pinned arrays, windows.

Everything asked of a `SideStream` runs beside the caller's own stream, in order. Results come to the host
in pinned arrays, a window ahead of the one that is being used, so that copying overlaps with it. With
tensors in host memory the same code runs and every step is done when it returns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import numpy as np

from syncline import kernels
from syncline.arrays import torch_module
from syncline.errors import ConfigError
from syncline.types import WINDOW_UNITS, Bits, DeviceBits, TensorMeta


class SideStream:
    """Work beside the stream that the caller uses; in host memory everything happens at once.

    Example:
        >>> import torch
        >>> side = SideStream(torch.device("cpu"))
        >>> side
        SideStream(cpu, at once)
        >>> [array.tolist() for array in side.bring(torch.tensor([1, 2], dtype=torch.uint8)).wait()]
        [[1, 2]]
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        is_cuda = device.type == "cuda"
        self._stream = torch_module().cuda.Stream(device) if is_cuda else None

    def __repr__(self) -> str:
        return f"SideStream({self._device}, {'at once' if self._stream is None else 'beside'})"

    def follow(self) -> None:
        """Let what is asked from now on wait for what the caller's stream has been asked so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch_module().cuda.current_stream(self._device))

    def asked(self) -> AbstractContextManager[Any]:
        """Inside, work is asked of this stream."""
        return nullcontext() if self._stream is None else torch_module().cuda.stream(self._stream)

    def bring(self, *tensors: DeviceBits) -> Arrival:
        """Begin to copy tensors into pinned arrays of their own."""
        with self.asked():
            copies = [_pinned_like(tensor).copy_(tensor, non_blocking=True) for tensor in tensors]
            return Arrival(copies, None if self._stream is None else self._stream.record_event())

    def wait(self) -> None:
        """Return when everything that was asked is done."""
        if self._stream is not None:
            self._stream.synchronize()


class Arrival:
    """Arrays that are under way to the host."""

    def __init__(self, copies: list[Any], event: Any) -> None:
        self._copies = copies
        self._event = event

    def wait(self) -> tuple[Bits, ...]:
        """Return the arrays when they have come. They belong to the caller and are not used again."""
        if self._event is not None:
            self._event.synchronize()
        return tuple(copy.numpy() for copy in self._copies)


@cache
def side_stream(device: Any) -> SideStream:
    """Return the one side stream of a device; torch reuses memory only on the stream that freed it."""
    return SideStream(device)


class DeviceCopies:
    """The last version's bits on the devices where the weights are, to compare the next one with there.

    Memory: on each device as many bytes as its weights have.
    """

    def __init__(self) -> None:
        self._copies: dict[str, DeviceBits] = {}

    def of(self, meta: TensorMeta, base: Bits, new: DeviceBits) -> DeviceBits:
        """Return the copy of a tensor on the device of `new`, to be used on its side stream.

        One that is not there yet is made from `base`, the same bits on the host.

        Raises:
            ConfigError: the device has no room for it.
        """
        copy = self._copies.get(meta.name)
        if copy is None or copy.device != new.device:
            try:
                with side_stream(new.device).asked():
                    copy = self._copies[meta.name] = to_device(base, new)
            except torch_module().OutOfMemoryError as error:
                raise ConfigError(
                    f"{new.device} has no room for a copy of the {meta.nbytes} bytes of tensor "
                    f"{meta.name!r}; free memory there, or leave device_copy out to compare on the host",
                    tensor=meta.name,
                ) from error
        return copy


def changes_on_device(
    copy: DeviceBits, new: DeviceBits, units: range
) -> Iterator[tuple[int, tuple[Bits, ...]]]:
    """Yield each window's start, and on the host the offsets, old and new bits of what differs there.

    Afterwards `copy` holds the new bits. Each window is compared and begins to come while the caller has
    the one before. The caller has let the side stream follow its own.
    """
    side = side_stream(new.device)

    def begun(start: int) -> Arrival:
        window = slice(start, min(start + WINDOW_UNITS, units.stop))
        with side.asked():
            return side.bring(*kernels.diff(copy[window], new[window], refresh=True))

    return _one_ahead(side, units, begun)


def host_windows(bits: Bits | DeviceBits, units: range) -> Iterator[tuple[int, Bits]]:
    """Yield the start and the bits of each window, in host memory, of bits that lie anywhere.

    Bits on a device come through pinned memory, each window while the caller has the one before; those
    on the host are views. The caller has let the side stream follow its own.
    """
    if isinstance(bits, np.ndarray):
        for start in range(units.start, units.stop, WINDOW_UNITS):
            yield start, bits[start : min(start + WINDOW_UNITS, units.stop)]
        return
    side = side_stream(bits.device)

    def begun(start: int) -> Arrival:
        return side.bring(bits[start : min(start + WINDOW_UNITS, units.stop)])

    for start, (window,) in _one_ahead(side, units, begun):
        yield start, window


def follow(bits: Bits | DeviceBits) -> None:
    """Let the side stream wait for what this thread's stream has been asked; nothing for bits on the host."""
    if not isinstance(bits, np.ndarray):
        side_stream(bits.device).follow()


def finish(bits: DeviceBits) -> None:
    """Return when what this thread's stream was asked is done, so that any stream may use these bits."""
    follow(bits)
    side_stream(bits.device).wait()


def to_host(bits: DeviceBits) -> Bits:
    """Return a copy in (pinned) host memory; what the caller's stream was asked before is in it."""
    side = side_stream(bits.device)
    side.follow()
    (copy,) = side.bring(bits).wait()
    return copy


def to_device(bits: Bits, like: DeviceBits) -> DeviceBits:
    """Return a copy on the device of a tensor, for use by the caller's stream; goes through pinned memory."""
    torch = torch_module()
    dtype = getattr(torch, bits.dtype.name)
    copy = torch.empty(bits.size, dtype=dtype, device=like.device)
    for start, window in host_windows(bits, range(bits.size)):
        there = copy[start : start + WINDOW_UNITS]
        pinned = _pinned_like(there)
        pinned.numpy()[:] = window
        there.copy_(pinned, non_blocking=True)
    return copy


def _pinned_like(bits: DeviceBits) -> DeviceBits:
    """Return a new host tensor, pinned if the other is on a GPU; torch keeps and reuses pinned memory."""
    return torch_module().empty(len(bits), dtype=bits.dtype, pin_memory=bits.is_cuda)


def _one_ahead(
    side: SideStream, units: range, begin: Callable[[int], Arrival]
) -> Iterator[tuple[int, tuple[Bits, ...]]]:
    """Yield each window's start and what came of it, when the next one has been begun."""
    coming: deque[tuple[int, Arrival]] = deque()
    try:
        for start in range(units.start, units.stop, WINDOW_UNITS):
            coming.append((start, begin(start)))
            if len(coming) > 1:
                earlier, arrival = coming.popleft()
                yield earlier, arrival.wait()
        for last, arrival in coming:
            yield last, arrival.wait()
    except BaseException:
        side.wait()  # the memory may be gone when the caller is
        raise
