"""Watch what optimizers write: the arguments of `watch`, checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from syncline.arrays import torch_module
from syncline.errors import ConfigError
from syncline.sources.watched import WatchedWeights

CHECKS = ("full", "sampled")
COMPARES = ("operations", "step")

_NO_FILES: Mapping[str, bytes] = MappingProxyType({})


def watch(
    optimizers: Any,
    weights: Any,
    *,
    dtype: Any = None,
    check: str = "full",
    compare: str = "operations",
    bucket_bytes: int = 64 << 20,
    files: Mapping[str, bytes] = _NO_FILES,
) -> WatchedWeights:
    """Return weights that see what `optimizer.step` changes in them, exactly; give them to a publisher.

    A publisher then needs no copy of the last version: what is kept is which units changed, and their
    old bits. Deltas are the same as those of the copy, byte for byte.

    Args:
        optimizers: a torch optimizer, or several. They may hold the weights themselves, or masters.
        weights: a torch module (its parameters and persistent buffers), or torch tensors by canonical
            name. Tied names are all published.
        dtype: the torch dtype in which floating-point weights are published; None: their own.
        check: `full`: every publish proves every tensor by its fingerprint, so that a write that was
            not seen is found; `sampled`: every eighth tensor, another eighth each time.
        compare: `operations`: copy, run and compare one operation of torch after the other, a bucket at
            a time; `step`: copy all weights for the time of a step, for optimizers whose kernels torch
            does not know of.
        bucket_bytes: the most old bits to hold while weights are written, unless one operation writes
            a larger tensor, or several that cannot be taken apart.
        files: the checkpoint's other files by name, for the first version of a run.

    Raises:
        ConfigError: not an optimizer of torch, or a setting that does not exist.
        LayoutError: a weight is no plain torch tensor (a DTensor, say), or of a dtype that cannot be sent.

    Example:
        >>> import torch, syncline
        >>> model = torch.nn.Linear(64, 64).to(torch.bfloat16)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        >>> weights, publisher = syncline.watch(optimizer, model), syncline.Publisher(syncline.MemoryStore())
        >>> publisher.publish(weights).kind
        'full'
        >>> model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
        >>> publisher.publish(weights).kind
        'delta'
    """
    _check_options(check, compare, bucket_bytes)
    several = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
    for optimizer in several:
        _check_optimizer(optimizer)
    return WatchedWeights(
        several,
        _walker(weights),
        dtype=dtype,
        check=check,
        compare=compare,
        bucket_bytes=bucket_bytes,
        files=files,
    )


def _check_options(check: str, compare: str, bucket_bytes: int) -> None:
    if check not in CHECKS:
        raise ConfigError(f"check: expected one of {', '.join(CHECKS)}, found {check!r}")
    if compare not in COMPARES:
        raise ConfigError(f"compare: expected one of {', '.join(COMPARES)}, found {compare!r}")
    if bucket_bytes < 1:
        raise ConfigError(f"bucket_bytes: expected at least 1, found {bucket_bytes}")


def _check_optimizer(optimizer: object) -> None:
    if not isinstance(optimizer, torch_module().optim.Optimizer):
        raise ConfigError(
            f"optimizer: expected a torch.optim.Optimizer, found {type(optimizer).__name__}, whose "
            "writes cannot be seen; publish the weights without watching them"
        )


def _walker(weights: Any) -> Callable[[], Mapping[str, Any]]:
    """Return what finds the weights by name, again each time it is called."""
    if hasattr(weights, "state_dict"):
        return lambda: dict(weights.state_dict(keep_vars=True))
    if isinstance(weights, Mapping):
        return lambda: dict(weights)
    if isinstance(weights, Iterable):
        pairs = dict(weights)
        return lambda: pairs
    raise ConfigError(
        f"weights: expected a torch module or torch tensors by name, found {type(weights).__name__}"
    )
