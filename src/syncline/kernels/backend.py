"""Whether the compiled kernels are used; every door asks here."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

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
