"""The only reader of environment variables; each is read when it is needed, never at import."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from syncline.errors import ConfigError

ISAS = ("scalar", "avx2", "avx512", "neon")
KERNELS = ("native", "numpy")

_MOST_THREADS_UNASKED = 16
_MOST_THREADS = 1024
_LONGEST_S = 86_400


def forced_isa() -> str | None:
    """Return the instruction set that `SYNCLINE_ISA` forces; None: the fastest there is.

    Raises:
        ConfigError: the variable names none.
    """
    return _choice("SYNCLINE_ISA", ISAS)


def forced_kernels() -> str | None:
    """Return which kernels `SYNCLINE_KERNELS` forces; None: native ones where they are built.

    Raises:
        ConfigError: the variable names none.
    """
    return _choice("SYNCLINE_KERNELS", KERNELS)


def secret(variable: str) -> str:
    """Return what the environment variable with this name holds; it is never shown.

    Raises:
        ConfigError: it is not set, or empty.
    """
    value = os.environ.get(variable)
    if not value:
        raise ConfigError(f"{variable}: expected a token in this environment variable, found none")
    return value


def live_token_variable() -> str | None:
    """Return `SYNCLINE_LIVE_TOKEN` if it is set: a trainer and engines that meet by themselves prove it."""
    name = "SYNCLINE_LIVE_TOKEN"
    return name if os.environ.get(name) else None


def runtime_dir() -> Path:
    """Return where this user's sockets may lie: `XDG_RUNTIME_DIR`, or the directory for temporary files."""
    return Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())


def is_plain_http_allowed() -> bool:
    """Tell whether `AWS_ALLOW_HTTP` or `AZURE_ALLOW_HTTP` is true: obstore's own, for endpoints without TLS."""
    values = (os.environ.get(name, "") for name in ("AWS_ALLOW_HTTP", "AZURE_ALLOW_HTTP"))
    return any(value.lower() in ("1", "true") for value in values)


def store_deadline_s() -> float:
    """Return how long one request to a store is tried again: `SYNCLINE_STORE_DEADLINE_S`, or 120.

    Raises:
        ConfigError: the variable is no number from 0 to 86400.
    """
    return _seconds("SYNCLINE_STORE_DEADLINE_S", 120.0)


def store_visible_within_s() -> float:
    """Return how long a store's writes may stay unseen: `SYNCLINE_STORE_VISIBLE_WITHIN_S`, or 0: not at all.

    Raises:
        ConfigError: the variable is no number from 0 to 86400.
    """
    return _seconds("SYNCLINE_STORE_VISIBLE_WITHIN_S", 0.0)


def is_untested_vllm_allowed() -> bool:
    """Tell whether `SYNCLINE_VLLM_UNTESTED` is 1: a vLLM that Syncline was never run with may be followed.

    Raises:
        ConfigError: the variable is neither 0 nor 1.
    """
    return _choice("SYNCLINE_VLLM_UNTESTED", ("0", "1")) == "1"


def is_untested_sglang_allowed() -> bool:
    """Tell whether `SYNCLINE_SGLANG_UNTESTED` is 1: an SGLang that Syncline was never run with may be followed.

    Raises:
        ConfigError: the variable is neither 0 nor 1.
    """
    return _choice("SYNCLINE_SGLANG_UNTESTED", ("0", "1")) == "1"


def sglang_staging() -> str:
    """Return `SYNCLINE_SGLANG_STAGING`: where a server's ranks find orders, the same as its follower's.

    Raises:
        ConfigError: it is not set.
    """
    value = os.environ.get("SYNCLINE_SGLANG_STAGING")
    if not value:
        raise ConfigError(
            "SYNCLINE_SGLANG_STAGING: expected the follower's staging directory in the environment of the "
            "SGLang server, found none; set it and start the server anew"
        )
    return value


def threads() -> int:
    """Return how many threads compute: `SYNCLINE_THREADS`, or as many as this process may run on, at most 16.

    Raises:
        ConfigError: the variable is no number from 1 to 1024.
    """
    value = os.environ.get("SYNCLINE_THREADS")
    if value is None:
        # Not every system can say which cores are this process's own.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return min(_MOST_THREADS_UNASKED, 1 if cores is None else cores)
    if not value.isascii() or not value.isdigit() or not 1 <= int(value) <= _MOST_THREADS:
        raise ConfigError(
            f"SYNCLINE_THREADS: expected a number from 1 to {_MOST_THREADS}, found {value!r}"
        )
    return int(value)


def _choice(variable: str, choices: tuple[str, ...]) -> str | None:
    value = os.environ.get(variable)
    if value is not None and value not in choices:
        raise ConfigError(f"{variable}: expected one of {', '.join(choices)}, found {value!r}")
    return value


def _seconds(variable: str, default: float) -> float:
    value = os.environ.get(variable)
    if value is None:
        return default
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= _LONGEST_S:
        raise ConfigError(
            f"{variable}: expected a number of seconds from 0 to {_LONGEST_S}, found {value!r}"
        )
    return seconds
