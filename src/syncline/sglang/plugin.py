"""The second door into the ranks: a hook on SGLang's own load from disk, through its plugin entry points.

With it `/update_weights_from_disk` takes the staging directory for an order, needs no session, and answers what
became of it. Every other path is loaded as ever. It is installed with Syncline, and does nothing
unless `SYNCLINE_SGLANG_STAGING` is set.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from syncline import config
from syncline.errors import ConfigError
from syncline.sglang import worker

TARGET = (
    "sglang.srt.model_executor.model_runner_components.weight_updater"
    ".WeightUpdater.update_weights_from_disk"
)
"""Of 0.5.20 to 0.5.23."""


def register() -> None:
    """Hook SGLang's load from disk; the entry point `syncline` of `sglang.srt.plugins` names this."""
    try:
        config.sglang_staging()
    except ConfigError:
        return
    registry: Any = import_module("sglang.srt.plugins.hook_registry")
    registry.HookRegistry.register(TARGET, around, registry.HookType.AROUND)


def around(
    original: Callable[..., tuple[bool, str]],
    updater: Any,
    model_path: str,
    *more: Any,
    **named: Any,
) -> tuple[bool, str]:
    """Obey the order if the path is the staging directory's; else load from disk."""
    directory = Path(config.sglang_staging())
    if Path(model_path) != directory:
        return original(updater, model_path, *more, **named)
    try:
        answer = worker.obey(updater.get_model(), directory, int(updater.tp_rank))
    except Exception as error:  # noqa: BLE001 - SGLang would die of it
        return False, f"syncline: {type(error).__name__}: {error}"
    return answer.error is None, f"syncline: {'done' if answer.error is None else answer.error}"
