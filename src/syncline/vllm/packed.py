"""Weights that vLLM's CPU kernels keep in a form of their own, and how they follow a version.

A linear layer's weight is packed into a oneDNN handle, or into a tensor for AMX; its parameter is then
empty, or for embeddings and output heads no longer what the kernel reads. A new form is packed beside the
old one, and both change places in the memory that compiled code reads: so does taking it back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from syncline.errors import LayoutError, VerifyError

_PROBES = 8
_UNQUANTISED = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")


class Packed(Protocol):
    """A weight that has been packed, ready to change places with the one that is used."""

    def swap(self) -> None:
        """Change places; a second call takes the first back, bit for bit."""


class _Handle:
    """A oneDNN handle: its address lies in a tensor, which compiled code reads."""

    def __init__(self, used: Any, weight: Any) -> None:
        from vllm import _custom_ops as ops  # noqa: PLC0415

        self._used = used
        self._new = ops.create_onednn_mm(weight.t(), 32)

    def swap(self) -> None:
        """Exchange the addresses; each handle's owner releases the one that it has in the end."""
        used, new = self._used.handler_tensor, self._new.handler_tensor
        kept = used.clone()
        used.copy_(new)
        new.copy_(kept)


class _Tensor:
    """A packed tensor, which keeps its memory."""

    def __init__(self, used: Any, weight: Any) -> None:
        import torch  # noqa: PLC0415

        self._used = used
        self._new = torch.ops._C.convert_weight_packed(weight)  # noqa: SLF001 - as vLLM calls it
        if (self._new.shape, self._new.dtype) != (used.shape, used.dtype):
            raise LayoutError(
                f"vLLM packs to {tuple(self._new.shape)} what it keeps as {tuple(used.shape)}"
            )

    def swap(self) -> None:
        """Exchange the contents."""
        kept = self._used.clone()
        self._used.copy_(self._new)
        self._new.copy_(kept)


class PackedLinear:
    """One module whose kernel reads a packed weight.

    Args:
        name: of its weight parameter.
        module: a linear layer, an embedding or an output head.

    Raises:
        LayoutError: its weight is packed in a way that is not known here.
    """

    def __init__(self, name: str, module: Any) -> None:
        self.name = name
        self.module = module
        self.is_readable = bool(module.weight.numel())
        self._used()

    def pack(self, weight: Any) -> Packed:
        """Return another weight packed like the one that is used; nothing is changed.

        Args:
            weight: (out, in) contiguous, of the layer's dtype.
        """
        form, used = self._used()
        return form(used, weight)

    def _used(self) -> tuple[type[_Handle | _Tensor], Any]:
        """Return in which form the weight is, and where: vLLM's own reload puts another one there."""
        cells = _cells(self.module.cpu_linear)
        for kind, form in (("handler", _Handle), ("packed_weight", _Tensor)):
            if kind in cells:
                return form, cells[kind]
        raise LayoutError(
            f"{self.name!r} is packed by a kernel that is not known here ({sorted(cells)}): turn it off, or "
            "serve full checkpoints",
            tensor=self.name,
        )

    def check(self, weight: Any) -> None:
        """Ask the kernel for some columns of the weight that it uses.

        Raises:
            VerifyError: they are not those of `weight`.
        """
        import torch  # noqa: PLC0415

        columns = np.unique(np.linspace(0, weight.shape[1] - 1, _PROBES).astype(np.int64))
        chosen = torch.from_numpy(columns)
        ask = torch.zeros(len(columns), weight.shape[1], dtype=weight.dtype)
        ask[torch.arange(len(columns)), chosen] = 1
        with torch.inference_mode():
            found = self.module.cpu_linear(ask, self.module.weight, None)
        expected = weight[:, chosen].t()
        wrong = (found != expected) & ~(found.isnan() | expected.isnan() | expected.isinf())
        # A sum with an element that is not finite says nothing of the others in its row.
        finite = weight.isfinite().all(dim=1)
        if bool((wrong & finite).any()):
            raise VerifyError(
                f"{self.name!r}: its kernel computes with another weight than the one that was packed",
                tensor=self.name,
            )


def packed_linears(model: Any) -> list[PackedLinear]:
    """Return the modules of a model whose kernels read packed weights.

    Raises:
        LayoutError: one is packed in a way that is not known here.
    """
    found = []
    for name, module in model.named_modules():
        kernel = getattr(module, "cpu_linear", None)
        if kernel is None or not _cells(kernel):
            if type(getattr(module, "quant_method", None)).__name__ in _UNQUANTISED and not (
                module.weight.numel()
            ):
                raise LayoutError(f"{name}.weight has no elements, and nothing says where they are")
            continue
        found.append(PackedLinear(f"{name}.weight", module))
    return found


def _cells(function: Any) -> Mapping[str, Any]:
    """Return what a closure holds, by name; nothing for other callables."""
    code, closure = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or closure is None:
        return {}
    return dict(zip(code.co_freevars, (cell.cell_contents for cell in closure), strict=True))


class ExpertOrder:
    """Where the elements of stacked experts lie after packing: the same within each expert.

    Learned by packing numbers, and proved by packing random bits.

    Args:
        pack: what the engine does with stacked experts: (experts, rows, columns) to its own form.
        weight: a stack in the form that the loader fills, of the dtype and on the device that count.

    Raises:
        LayoutError: the packed form is no permutation within each expert.
    """

    def __init__(self, pack: Any, weight: Any) -> None:
        import torch  # noqa: PLC0415

        self.shape = tuple(weight.shape)
        self._count = int(weight[0].numel())
        itemsize = weight.element_size()
        integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(itemsize)
        if integer is None:
            raise LayoutError(f"experts of {weight.dtype} cannot be probed")
        # As many digits as it takes to number an expert's elements; 0 stands for padding.
        base = 1 << min(15, 8 * itemsize - 1)
        numbers = torch.arange(1, self._count + 1, dtype=torch.int64)
        found = np.zeros(0, np.int64)
        place = 1
        while place <= self._count:
            digits = (numbers // place % base).to(integer).view(weight.dtype)
            packed = pack(digits.view(1, *self.shape[1:])).contiguous().view(integer)
            digit = packed.reshape(-1).to(torch.int64).numpy() * place
            found = digit if place == 1 else found + digit
            place *= base
        self._packed_count = found.size
        places = np.flatnonzero(found)
        if not np.array_equal(np.sort(found[places]), np.arange(1, self._count + 1)):
            raise LayoutError("packed experts are no permutation of what the loader fills")
        self._within = np.empty(self._count, np.int64)
        self._within[found[places] - 1] = places
        self._prove(pack, weight.dtype, integer)

    @property
    def packed_count(self) -> int:
        """Elements of the packed form."""
        return self._packed_count * int(self.shape[0])

    def __getitem__(self, units: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where in the packed form these elements lie, all of them flat indices."""
        expert, inside = np.divmod(units, self._count)
        moved: NDArray[np.int64] = expert * self._packed_count + self._within[inside]
        return moved

    def _prove(self, pack: Any, dtype: Any, integer: Any) -> None:
        import torch  # noqa: PLC0415

        generator = torch.Generator().manual_seed(20260701)
        bits = torch.randint(0, 100, self.shape, generator=generator).to(integer)
        packed = pack(bits.view(dtype)).contiguous().view(integer).reshape(-1)
        ours = torch.zeros_like(packed)
        places = self[np.arange(bits.numel())]
        ours[torch.from_numpy(places)] = bits.reshape(-1)
        if packed.numel() != self.packed_count or not torch.equal(ours, packed):
            raise LayoutError(
                "packed experts are not ordered alike, so their order cannot be learned"
            )
