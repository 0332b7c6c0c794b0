"""The packed forms of one worker's layers, kept in step with the weights that they were packed from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import numpy as np

from syncline.abc import Base
from syncline.errors import LayoutError
from syncline.layouts.blocks import Block, run_of
from syncline.layouts.dense import canonical_view, local_view
from syncline.layouts.proof import block_fingerprint
from syncline.types import ZERO, Bits, Fingerprint, unsigned
from syncline.vllm.packed import Packed, PackedLinear
from syncline.vllm.placement import WorkerPlacement

View = Callable[[str], Bits]


class Forms:
    """Packs layers again when tensors in them change.

    Args:
        placement: what the worker holds, and which layers compute with a packed form.
    """

    def __init__(self, placement: WorkerPlacement) -> None:
        self._placement = placement
        self._blocks: dict[str, list[Block]] = {local: [] for local, _ in placement.packed}
        for block in placement.learned.placement.blocks:
            if block.local in self._blocks and not block.is_alias:
                self._blocks[block.local].append(block)
        for local, linear in placement.packed:
            if not linear.is_readable and self._padding(local):
                raise LayoutError(
                    f"{local!r} is packed, and {self._padding(local)} of its elements come from nowhere in the "
                    "checkpoint",
                    tensor=local,
                )
        self._made: list[tuple[PackedLinear, Packed, Any]] = []
        self._swapped: list[Packed] = []

    @property
    def unreadable(self) -> frozenset[str]:
        """Local names of weights that are kept in their packed form alone."""
        return frozenset(n for n, linear in self._placement.packed if not linear.is_readable)

    def check(self, base: Base) -> None:
        """Ask every kernel for some of the weight that it uses.

        Raises:
            VerifyError: it is not that of the checkpoint.
        """
        for local, linear in self._placement.packed:
            linear.check(self._weight(local, linear, lambda name: base(name)[1]))

    def prepare(self, names: Iterable[str], view: View) -> None:
        """Pack every layer that has a changed tensor; nothing that is used is touched.

        Args:
            names: canonical names of tensors that changed.
            view: their new bits, whole.
        """
        self.settle()
        wanted = set(names)
        for local, linear in self._placement.packed:
            if any(block.name in wanted for block in self._blocks[local]):
                weight = self._weight(local, linear, view)
                self._made.append((linear, linear.pack(weight), weight))

    def swap(self) -> None:
        """Use what was packed.

        Raises:
            VerifyError: a kernel computes with something else.
        """
        for linear, packed, weight in self._made:
            self._swapped.append(packed)
            packed.swap()
            linear.check(weight)

    def swap_back(self) -> None:
        """Use what was used before."""
        while self._swapped:
            self._swapped.pop().swap()

    def settle(self) -> None:
        """Forget what is not used."""
        self._made.clear()
        self._swapped.clear()

    def shares(self, blocks: Iterable[Block], view: View) -> Fingerprint:
        """Return the fingerprint of what was packed into unreadable forms, of these blocks alone."""
        linears = dict(self._placement.packed)
        total = ZERO
        by_local: dict[str, list[Block]] = {}
        for block in blocks:
            if block.local in self.unreadable:
                by_local.setdefault(block.local, []).append(block)
        for local, of_local in by_local.items():
            bits = self._bits(local, linears[local], view)
            for block in of_local:
                tensor = self._placement.learned.layout.catalog[block.name]
                total += block_fingerprint(block, tensor, bits)
        return total

    def _weight(self, local: str, linear: PackedLinear, view: View) -> Any:
        """Return the weight in the form that the loader fills."""
        import torch  # noqa: PLC0415

        bits = self._bits(local, linear, view)
        shape = self._local(local).shape
        raw = torch.from_numpy(bits.view(np.uint8))
        return raw.view(linear.module.weight.dtype).reshape(shape)

    def _bits(self, local: str, linear: PackedLinear, view: View) -> Bits:
        catalog = self._placement.learned.layout.catalog
        itemsize = linear.module.weight.element_size()
        if linear.is_readable:
            bits = self._placement.memories[local].bits().copy()
        else:
            bits = np.zeros(prod(self._local(local).shape), unsigned(itemsize))
        for block in self._blocks[local]:
            tensor = catalog[block.name]
            run = run_of(block, tensor.grid)
            here = local_view(run, tensor.meta, bits)
            here[...] = canonical_view(run, tensor.meta, view(block.name))
        return bits

    def _local(self, name: str) -> Any:
        return next(t for t in self._placement.learned.placement.tensors if t.name == name)

    def _padding(self, name: str) -> int:
        padding: int = self._local(name).padding
        return padding
