"""What the demo reads out of a vLLM worker at the end: every weight, as the kernels that generate use it.

A class for `--worker-extension-cls`. It knows vLLM's own modules and nothing of where Syncline wrote. A CPU kernel may
keep a weight packed, with nothing left to read; then the identity matrix is run through it, which gives every weight
back (times 1, plus zeros), all but the sign of a zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from syncline.demo.fused import parts
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
    seen: set[int] = set()
    for path, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if leaf != "weight" or not hasattr(module, "quant_method"):
                yield f"{path}.{leaf}", parameter.detach(), False
                continue
            yield from _of_layer(path, module, parameter.detach())


def _of_layer(path: str, module: Any, weight: Any) -> Iterator[tuple[str, Any, bool]]:
    """Yield what one linear layer, embedding or output head holds."""
    is_gone = not weight.numel()
    # An output head packs a copy for its kernel, and keeps the weight for the embedding.
    packed = _through_kernel(module) if is_gone or hasattr(module, "cpu_linear") else None
    at = 0
    for name, rows in parts(path, module):
        part = slice(at, at + rows)
        at += rows
        if packed is not None and is_gone:
            yield f"{name}.weight", packed[part], True
            continue
        yield f"{name}.weight", weight[part], False
        if packed is not None and sha256(packed[part]) != sha256(weight[part] + 0.0):
            yield f"{name}.weight as its kernel reads it", packed[part], True


def _through_kernel(module: Any) -> Any:
    """Return (outputs, inputs) of a packed layer: what its kernel makes of the identity."""
    import torch

    inputs = getattr(module, "input_size_per_partition", None)
    size = module.embedding_dim if inputs is None else inputs
    # An embedding has no `params_dtype` in every release, but it always has its weight.
    dtype = module.weight.dtype
    return module.quant_method.apply(module, torch.eye(size, dtype=dtype), None).T + 0.0
