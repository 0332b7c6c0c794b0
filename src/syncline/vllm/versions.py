"""Which vLLM this was run with; another one is refused unless the environment says otherwise."""

from __future__ import annotations

from syncline import config
from syncline.errors import TransportUnavailableError

KNOWN = ("0.32.0",)
"""Versions that the tests in `tests/vllm` pass with, oldest first."""


def check(found: str) -> None:
    """Check that this vLLM is one that is known to work, build tags such as `+cpu` aside.

    Raises:
        TransportUnavailableError: it is not; lists those that are, and the setting that overrides this.

    Example:
        >>> check("0.32.0+cpu")
    """
    if found.partition("+")[0] in KNOWN or config.is_untested_vllm_allowed():
        return
    raise TransportUnavailableError(
        f"vLLM {found}: expected a version that Syncline was run with ({', '.join(KNOWN)}); install one of "
        "them, or set SYNCLINE_VLLM_UNTESTED=1 and compare what it generates with the trainer's model first"
    )


def check_installed() -> None:
    """Check the vLLM of this process; see `check`.

    Raises:
        TransportUnavailableError: none is installed, or one that is not known to work.
    """
    try:
        import vllm  # noqa: PLC0415 - an optional package, and a slow import
    except ImportError as error:
        raise TransportUnavailableError(
            f"vLLM cannot be imported ({error}); install it: pip install vllm=={KNOWN[-1]}"
        ) from error
    check(str(vllm.__version__))
