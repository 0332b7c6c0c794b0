"""Settings come from the environment when they are asked for, and a wrong one is an error."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from syncline import config
from syncline.errors import ConfigError

SETTINGS = [
    (config.forced_isa, "SYNCLINE_ISA", config.ISAS),
    (config.forced_kernels, "SYNCLINE_KERNELS", config.KERNELS),
]


@pytest.mark.parametrize(("read", "variable", "choices"), SETTINGS)
def test_setting(
    read: Callable[[], str | None],
    variable: str,
    choices: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(variable, raising=False)
    assert read() is None
    for choice in choices:
        monkeypatch.setenv(variable, choice)
        assert read() == choice
    for wrong in ("", choices[0].upper(), "no such thing"):
        monkeypatch.setenv(variable, wrong)
        with pytest.raises(ConfigError, match=f"{variable}: expected one of .*, found '{wrong}'"):
            read()
