"""Nothing of a killed server stays behind."""

from __future__ import annotations

import pytest

import engine_leftovers


@pytest.fixture(scope="session", autouse=True)
def no_leftovers(tmp_path_factory):
    tmp_path_factory.getbasetemp()  # kept for who looks into a failure, so made outside
    with engine_leftovers.removed():
        yield
