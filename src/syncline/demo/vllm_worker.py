"""What the demo reads out of a vLLM worker at the end: every weight, as the kernels that generate use it.

A class for `--worker-extension-cls`. It knows vLLM's own modules and nothing of where Syncline wrote. A CPU kernel may
keep a weight packed, with nothing left to read; then the identity matrix is run through it, which gives every weight
back (times 1, plus zeros), all but the sign of a zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from syncline.demo.fused import parameters, parts
from syncline.demo.identity import sha256


class DemoWorker:
    """Mixed into a vLLM worker of an engine without tensor parallelism."""

    def demo_digests(self) -> dict[str, Any]:
        """Return the SHA-256 of every weight by its name in the checkpoint, and which were read by a kernel.

        Of the latter the digest is that of the weight plus 0, so that -0.0 counts as 0.0.
        """
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        found = list(_weights(model))
        return {
            "digests": {name: sha256(weight) for name, weight, _ in found},
            "through": [name for name, _, is_through_kernel in found if is_through_kernel],
        }


def _weights(model: Any) -> Iterator[tuple[str, Any, bool]]:
    """Yield name, weight, and whether it was read through a kernel."""
    for name, weight, layer in parameters(model):
        is_gone = not weight.numel()
        # An output head packs a copy for its kernel, and keeps the weight for the embedding.
        has_kernel = layer is not None and (is_gone or hasattr(layer, "cpu_linear"))
        packed = _through_kernel(layer) if has_kernel else None
        at = 0
        for part, rows in parts(name, weight, layer):
            place = slice(at, at + rows)
            at += rows
            if packed is not None and is_gone:
                yield part, packed[place], True
                continue
            yield part, weight[place], False
            if packed is not None and sha256(packed[place]) != sha256(weight[place] + 0.0):
                yield f"{part} as its kernel reads it", packed[place], True


def _through_kernel(module: Any) -> Any:
    """Return (outputs, inputs) of a packed layer: what its kernel makes of the identity."""
    import torch

    inputs = getattr(module, "input_size_per_partition", None)
    size = module.embedding_dim if inputs is None else inputs
    # An embedding has no `params_dtype` in every release, but it always has its weight.
    dtype = module.weight.dtype
    return module.quant_method.apply(module, torch.eye(size, dtype=dtype), None).T + 0.0
