"""Weights in plain arrays: the reference of what an engine does, and the publisher's snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from syncline import kernels
from syncline.abc import Engine
from syncline.commit.overwrite import apply_in_memory
from syncline.engines.incoming import each_once
from syncline.errors import LayoutError, TornUpdateError
from syncline.types import Bits, Record, Span, TensorMeta, unsigned
from syncline.version import HeldVersion

Allocate = Callable[[TensorMeta], Bits]


def new_array(meta: TensorMeta) -> Bits:
    """Return an uninitialised array for a tensor's bits."""
    return np.empty(meta.unit_count, unsigned(meta.unit_bytes))


class MemoryEngine(Engine):
    """An engine that keeps the bits in arrays of its own.

    Args:
        tensors: what it holds at first, copied: for every name the meta and an array of `meta.nbytes`
            bytes, of any dtype. Empty: `create` fills it.
        allocate: makes the array for a tensor's bits; memory-mapped files are one use.

    Example:
        >>> meta = TensorMeta("w", "U8", (3,))
        >>> engine = MemoryEngine({"w": (meta, np.array([1, 2, 3], np.uint8))})
        >>> engine.view("w").tolist(), engine.held()
        ([1, 2, 3], None)
    """

    def __init__(
        self,
        tensors: Mapping[str, tuple[TensorMeta, NDArray[Any]]] = MappingProxyType({}),
        *,
        allocate: Allocate = new_array,
    ) -> None:
        self._allocate = allocate
        self._metas: dict[str, TensorMeta] = {}
        self._bits: dict[str, Bits] = {}
        self._held: HeldVersion | None = None
        self.files: Mapping[str, bytes] = {}
        for name, (meta, array) in tensors.items():
            if (name, array.nbytes) != (meta.name, meta.nbytes):
                raise LayoutError(
                    f"tensor {name!r}: expected {meta.nbytes} bytes for {meta}, found {array.nbytes}",
                    tensor=name,
                )
            raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            self.add(meta)[:] = raw.view(unsigned(meta.unit_bytes))

    def add(self, meta: TensorMeta) -> Bits:
        """Make room for one more tensor and return its bits, to be filled by the caller.

        Raises:
            LayoutError: the engine has a tensor of this name.
        """
        if meta.name in self._metas:
            raise LayoutError(f"tensor {meta.name!r} came twice", tensor=meta.name)
        self._bits[meta.name] = self._allocate(meta)
        self._metas[meta.name] = meta
        return self._bits[meta.name]

    def bits(self, name: str) -> Bits:
        """Return the live, writable bits of a tensor; who writes to them answers for the version."""
        return self._bits[name]

    def tensors(self) -> Mapping[str, TensorMeta]:
        """Return the tensors that the engine holds; see `Engine.tensors`."""
        return MappingProxyType(self._metas)

    def held(self) -> HeldVersion | None:
        """Return the committed version; see `Engine.held`. None after a `TornUpdateError`."""
        return self._held

    def view(self, name: str) -> Bits:
        """Return a read-only view of the live bits; see `Engine.view`."""
        bits = self._bits[name].view()
        bits.flags.writeable = False
        return bits

    def apply(self, records: Iterable[Record], held: HeldVersion) -> None:
        """Overwrite what the records list; see `Engine.apply`."""
        target, before = ArrayTarget(self._bits), self._held
        try:
            apply_in_memory(
                records, self._metas, target, lambda: self._hold(held), lambda: self._hold(before)
            )
        except TornUpdateError:
            self._held = None
            raise

    def _hold(self, held: HeldVersion | None) -> None:
        self._held = held

    def create(
        self,
        held: HeldVersion,
        spans: Iterable[tuple[TensorMeta, Iterable[Span]]],
        files: Mapping[str, bytes],
    ) -> None:
        """Fill the empty engine; see `Engine.create`."""
        if self._metas:
            raise LayoutError(
                "create: the engine holds tensors already; apply a version to it instead"
            )
        try:
            for meta, pieces in each_once(held, spans):
                bits = self.add(meta)
                for piece in pieces:
                    bits[piece.start : piece.start + piece.bits.size] = piece.bits
        except BaseException:
            self._metas.clear()
            self._bits.clear()
            raise
        self.files = dict(files)
        self._held = held


class ArrayTarget:
    """Arrays as the target of an update."""

    def __init__(self, bits: Mapping[str, Bits]) -> None:
        self._bits = bits
        self.is_concurrent = not _overlap(bits.values())

    def first_difference(self, record: Record, bits: Bits) -> int | None:
        """Return the index of the first of the record's places where other bits than these stand."""
        if record.offsets is None:
            return kernels.first_difference(self.read(record), bits)
        return kernels.first_difference(
            self._bits[record.name][record.start :], bits, record.offsets
        )

    def read(self, record: Record) -> Bits:
        """Return the bits at the record's places."""
        window = self._bits[record.name][record.start :]
        if record.offsets is None:
            return window[: record.new_bits.size]
        return kernels.gather(window, record.offsets)

    def write(self, record: Record, bits: Bits) -> None:
        """Put bits at the record's places."""
        window = self._bits[record.name][record.start :]
        if record.offsets is None:
            window[: bits.size] = bits
        else:
            kernels.scatter(window, record.offsets, bits)

    def flush(self) -> None:
        """Do nothing: memory does not outlive the process."""


def _overlap(arrays: Iterable[Bits]) -> bool:
    """Tell whether any two arrays share memory, as those of tied tensors do."""
    begins = [(array.ctypes.data, array.nbytes) for array in arrays if array.nbytes]
    begins.sort()
    return any(begin + nbytes > following for (begin, nbytes), (following, _) in pairwise(begins))
