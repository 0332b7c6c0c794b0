"""A PEFT model with LoRA adapters as one set of weights: every adapted matrix with its adapters added.

The arithmetic is PEFT's own, on the model's own device, so the bits are those that `merge_and_unload()` would
leave. The model is not changed. What is not plain LoRA is refused: it would have to be rounded in some way of
our own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from syncline.errors import ConfigError, LayoutError

_PREFIX = "base_model.model."
_BASE = ".base_layer"
_ADAPTER_MARKS = (".lora_A.", ".lora_B.", ".lora_embedding_A.", ".lora_embedding_B.")
_FOREIGN_MARKS = (".modules_to_save.", ".lora_magnitude_vector.", ".original_module.")


def merged_lora(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and tensor of every weight of a PEFT model, merged, by the names of its base model.

    Args:
        model: a `PeftModel` whose active adapters are plain LoRA and not merged yet; only read.

    Returns:
        pairs for `Publisher.publish`. A merged matrix is a new tensor of the base's dtype, the others are
        the model's own.

    Raises:
        ConfigError: the model has no adapters.
        LayoutError: an adapter is merged already, or is not plain LoRA (DoRA and other variants, biases,
            `modules_to_save`, adapters of bare parameters); names the module.

    Cost: the product of the adapters' matrices. Memory: one matrix, and the product in its dtype.

    Example:
        >>> list(merged_lora(object()))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        syncline.errors.ConfigError: expected a PEFT model with LoRA adapters, found object: ...
    """
    find = getattr(model, "named_modules", None)
    adapted = {} if find is None else {name: m for name, m in find() if hasattr(m, "lora_A")}
    if not adapted:
        raise ConfigError(
            f"expected a PEFT model with LoRA adapters, found {type(model).__name__}: publish "
            "its named_parameters()"
        )
    for path, module in adapted.items():
        _check_plain(path, module)
    for name, parameter in model.named_parameters():
        if any(mark in name for mark in _ADAPTER_MARKS):
            continue
        if any(mark in name for mark in _FOREIGN_MARKS):
            raise _refusal(name, "is trained beside the adapters, or is a variant of LoRA")
        path, _, leaf = name.rpartition(".")
        module = adapted.get(path.removesuffix(_BASE))
        tensor = parameter
        if module is not None and path.endswith(_BASE) and leaf == "weight":
            tensor = _merged(module, parameter)
        yield name.replace(f"{_BASE}.", ".").removeprefix(_PREFIX), tensor


def _merged(module: Any, weight: Any) -> Any:
    merged = weight.detach().clone()
    for adapter in module.active_adapters:
        if adapter in module.scaling:
            # In place, as PEFT does: the sum is rounded once, to the base's dtype.
            merged += module.get_delta_weight(adapter).detach()
    return merged


def _check_plain(path: str, module: Any) -> None:
    if hasattr(module, "parameter_name"):
        raise _refusal(path, "adapts a bare parameter")
    if module.merged_adapters:
        raise _refusal(
            path, f"has merged {module.merged_adapters} already; unmerge_adapter() first"
        )
    for adapter in module.active_adapters:
        if adapter in module.lora_variant:
            kind = type(module.lora_variant[adapter]).__name__
            raise _refusal(path, f"has a variant of LoRA, {kind}")
        if module.lora_bias.get(adapter):
            raise _refusal(path, "has a bias in its adapter")
    if getattr(module, "disable_adapters", False):
        raise _refusal(path, "has its adapters disabled; enable them, or publish the base model")


def _refusal(path: str, problem: str) -> LayoutError:
    return LayoutError(
        f"{path} {problem}; only plain LoRA adapters are merged exactly. Merge with PEFT itself "
        "(merge_and_unload), and publish what comes out",
        tensor=path,
    )
