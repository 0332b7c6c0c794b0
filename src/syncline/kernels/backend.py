"""Where the kernels are that run: compiled, numpy, or on a GPU; every door asks here."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from syncline import config
from syncline.errors import ConfigError


@cache
def is_native() -> bool:
    """Return whether the native kernels run: where they are built, unless numpy is forced.

    Raises:
        ConfigError: SYNCLINE_KERNELS asks for native kernels, and they are not built.
    """
    forced = config.forced_kernels()
    is_built = find_spec("syncline.kernels._native") is not None
    if forced == "native" and not is_built:
        raise ConfigError(
            "SYNCLINE_KERNELS: native kernels are not built here; install the package"
        )
    return is_built and forced != "numpy"


@cache
def fastest(name: str) -> ModuleType:
    """Return the module of kernels that run: `name`_native, or `name`_reference; no name: native, reference."""
    prefix = f"syncline.kernels.{name}_" if name else "syncline.kernels."
    return import_module(prefix + ("native" if is_native() else "reference"))


def on_gpu() -> ModuleType:
    """Return the kernels for bits in GPU memory.

    Raises:
        ConfigError: triton is not installed.
    """
    if find_spec("triton") is None:
        raise ConfigError(
            "weights in GPU memory need triton, which is not installed: install syncline[gpu]"
        )
    return import_module("syncline.kernels.gpu")
