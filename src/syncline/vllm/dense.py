"""Live weights through vLLM's own reload: all of them are loaded again, whatever changed.

Right where vLLM's reload is: dense models in unpacked or packed layouts. Cost: O(model) for every version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from syncline.sync.fingerprints import fingerprints
from syncline.types import ZERO, Bits, Fingerprint
from syncline.vllm.copy import HostCopy
from syncline.vllm.ranks import Workers


class DenseWeights:
    """A vLLM model whose weights are loaded again, layer by layer.

    Args:
        model: the module that the worker runs.
        model_config: vLLM's configuration of it.
        workers: who holds the rest.

    `fingerprint` is that of what was handed to the loaders, since these weights cannot be read back.
    """

    def __init__(self, model: Any, model_config: Any, workers: Workers) -> None:
        self._model = model
        self._model_config = model_config
        self._is_first = workers.rank == 0

    def prepare(self, copy: HostCopy) -> None:
        """Do nothing."""

    def write(self, copy: HostCopy, *, everything: bool = False) -> None:
        """Load every tensor of the copy; see `LiveWeights.write`."""
        try:
            self._load(copy, copy.view)
        except Exception:
            self.undo(copy)
            raise

    def undo(self, copy: HostCopy) -> None:
        """Load every tensor as it was before what is pending."""
        self._load(copy, copy.before)

    def fingerprint(self, copy: HostCopy) -> Fingerprint:
        """Return the fingerprint of the copy on the first worker, nothing on the others."""
        if not self._is_first:
            return ZERO
        found = fingerprints(copy.tensors().values(), copy.view)
        return sum((fingerprint for _, fingerprint in found), ZERO)

    def settle(self) -> None:
        """Do nothing: the copy knows what to undo."""

    def _load(self, copy: HostCopy, bits: Callable[[str], Bits]) -> None:
        from vllm.model_executor.model_loader.reload import (  # noqa: PLC0415
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        initialize_layerwise_reload(self._model)
        self._model.load_weights(_tensors(copy, bits))
        finalize_layerwise_reload(self._model, self._model_config)


def _tensors(copy: HostCopy, bits: Callable[[str], Bits]) -> Iterator[tuple[str, Any]]:
    import safetensors.torch  # noqa: PLC0415
    import torch  # noqa: PLC0415

    dtypes: Any = safetensors.torch._TYPES  # noqa: SLF001 - its table of its own names
    for name, meta in copy.tensors().items():
        raw = torch.frombuffer(bytearray(bits(name).tobytes()), dtype=torch.uint8)
        yield name, raw.view(dtypes[meta.dtype]).reshape(meta.shape)
