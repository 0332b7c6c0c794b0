"""Nothing of a killed server stays behind."""

from __future__ import annotations

import pytest

import engine_leftovers


@pytest.fixture(scope="session", autouse=True)
def no_leftovers():
    with engine_leftovers.removed():
        yield
