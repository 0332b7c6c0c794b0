"""The memories of a live model: each torch storage once, as one flat array of units, however it is viewed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from syncline import arrays, kernels
from syncline.arrays import host_bits, torch_meta, torch_module
from syncline.errors import LayoutError
from syncline.layouts.blocks import LocalTensor
from syncline.types import Bits, DeviceBits, Fingerprint, TensorMeta, unsigned


class Memory:
    """One storage, as long as it lives.

    Attributes:
        name: of the first live tensor in it.
        names: of every live tensor in it, in order.
        local: how a placement knows it; the shape is that of the first tensor if that fills the storage.
        tensors: the live tensors, by name.
    """

    def __init__(self, name: str, tensor: Any) -> None:
        torch = torch_module()
        plain = tensor.data
        self.name = name
        self.names = [name]
        self.tensors = {name: tensor}
        self.unit_bytes: int = plain.element_size()
        storage = plain.untyped_storage()
        count = storage.nbytes() // self.unit_bytes
        integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[self.unit_bytes]
        self._storage = storage
        self.flat = torch.empty(0, dtype=integer, device=plain.device)
        with torch.no_grad():
            self.flat.set_(storage, 0, (count,), (1,))
        fills = plain.is_contiguous() and plain.numel() == count
        shape = tuple(plain.shape) if fills else (count,)
        dtype = arrays.NUMPY_NAMES.get(str(plain.dtype).removeprefix("torch."))
        if dtype is None:
            raise LayoutError(f"tensor {name!r} is of dtype {plain.dtype}", tensor=name)
        self.local = LocalTensor(name, dtype, shape, padding=count)

    @property
    def is_meta(self) -> bool:
        """Whether it has a size but no bits."""
        return bool(self.flat.is_meta)

    def bits(self) -> Bits:
        """Return the units: a view that can be written in host memory, else a copy of a GPU's."""
        return host_bits(self.flat)

    def resident(self) -> Bits | DeviceBits:
        """Return the units where they lie, to be read or written there by `syncline.kernels`."""
        if not arrays.is_on_gpu(self.flat):
            return self.bits()
        return self.flat.view(getattr(torch_module(), unsigned(self.unit_bytes).name))

    def fingerprint(self) -> Fingerprint:
        """Return what changes if a unit does. Cost: reads all of it."""
        return kernels.fingerprint(self.resident(), 0, kernels.seeds(self.name))


class Memories:
    """The memories of live tensors.

    Args:
        live: every parameter and buffer by name, tied ones under each of their names. Those without
            plain memory (quantised wrappers, sparse ones) are left out, and so is what has no elements.
    """

    def __init__(self, live: Mapping[str, Any]) -> None:
        self._by_key: dict[int, Memory] = {}
        for name, tensor in live.items():
            if not _is_plain(name, tensor):
                continue
            key = key_of(tensor)
            if key in self._by_key:
                self._by_key[key].names.append(name)
                self._by_key[key].tensors[name] = tensor
            else:
                self._by_key[key] = Memory(name, tensor)
        self._addresses = self._identity()

    def __iter__(self) -> Iterator[Memory]:
        return iter(self._by_key.values())

    def of(self, tensor: Any) -> Memory | None:
        """Return the memory that a torch tensor is a view of, if it is a live one."""
        return self._by_key.get(key_of(tensor))

    def replaced(self) -> list[str]:
        """Return the names of live tensors that have other memory than when this was made."""
        now = self._identity()
        return [name for name, key in self._addresses.items() if now[name] != key]

    def _identity(self) -> dict[str, object]:
        return {
            name: (key_of(tensor), tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
            for memory in self
            for name, tensor in memory.tensors.items()
        }


def key_of(tensor: Any) -> int:
    """Return what names a tensor's storage while it lives, on the meta device too."""
    key: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - addresses are 0 on the meta device
    return key


def _is_plain(name: str, tensor: Any) -> bool:
    if hasattr(tensor, "__tensor_flatten__") or str(tensor.layout) != "torch.strided":
        return False
    if tensor.is_meta:
        return bool(tensor.numel())
    try:
        meta: TensorMeta = torch_meta(name, tensor)
    except LayoutError:
        return False
    return meta.unit_count == int(tensor.numel()) > 0
