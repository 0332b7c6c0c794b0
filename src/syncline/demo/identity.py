"""The proof at the end: SHA-256 of every tensor on both sides, compared by name.

The digests of the engine are made in the engine process, over the memory of the module that
generates. Nothing here looks at what Syncline believes about either side.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def live_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the module's parameters and persistent buffers by name, tied ones once.

    Aliasing: the tensors are the module's own memory.
    """
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    persistent = model.state_dict().keys()
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return tensors


def sha256_by_name(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Return the SHA-256 of each tensor's bytes, in the order of its elements, as hex digits.

    Cost: one pass; copies only tensors that are not contiguous or not in main memory.
    """
    return {name: sha256(tensor) for name, tensor in tensors}


def sha256(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes, in the order of its elements, as hex digits."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()


def differences(trainer: Mapping[str, str], engine: Mapping[str, str]) -> dict[str, str]:
    """Return, for every tensor that is not the same on both sides, what is wrong with it.

    Example:
        >>> differences({"a": "00", "b": "11"}, {"a": "00", "c": "22"})
        {'b': 'missing in the engine', 'c': 'not known to the trainer'}
        >>> differences({"a": "00"}, {"a": "01"})
        {'a': 'SHA-256 is 00 in the trainer and 01 in the engine'}
    """
    found = {}
    for name in sorted(trainer.keys() | engine.keys()):
        if name not in engine:
            found[name] = "missing in the engine"
        elif name not in trainer:
            found[name] = "not known to the trainer"
        elif trainer[name] != engine[name]:
            found[name] = (
                f"SHA-256 is {trainer[name]} in the trainer and {engine[name]} in the engine"
            )
    return found
