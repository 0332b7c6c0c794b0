"""The weights that an engine holds, as the base of a foreign delta."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from syncline.abc import Engine
from syncline.errors import LayoutError
from syncline.types import Bits, TensorMeta


class EngineBase:
    """Looks tensors up in an engine; asks it once what it holds, since walking a module is slow.

    Called with a name it is a `syncline.abc.Base`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.metas = engine.tensors()
        self._listed = frozenset(self.metas)

    def __call__(self, name: str) -> tuple[TensorMeta, Bits]:
        """Return meta and bits of a tensor under the name that is asked for.

        Raises:
            LayoutError: the engine has none of this name.
        """
        if name not in self.metas:
            raise LayoutError(
                f"tensor {name!r} is not in the base: the engine holds no tensor of this name; the two "
                "sides name the model's tensors differently",
                tensor=name,
            )
        return replace(self.metas[name], name=name), self._engine.view(name)

    def listed(self, name: str, bits: Bits) -> str:
        """Return the name that the engine lists for a tensor's memory: tied names are found, not listed.

        Args:
            bits: what the call with this name returned. A copy tells nothing: then the name itself.
        """
        if name in self._listed:
            return name
        same = (
            other
            for other, meta in self.metas.items()
            if meta.nbytes == bits.nbytes and np.may_share_memory(self._engine.view(other), bits)
        )
        return next(same, name)
