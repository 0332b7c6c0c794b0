from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from syncline.errors import ConfigError, TransportUnavailableError
from syncline.vllm import versions


@pytest.mark.parametrize("found", ["0.32.0", "0.32.0+cpu"])
def test_known_versions_pass(found):
    versions.check(found)


@pytest.mark.parametrize("found", ["0.31.0", "0.32.1", "0.33.0+cu129", "1.0"])
def test_unknown_versions_are_refused_unless_overridden(found, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=found))
    with pytest.raises(TransportUnavailableError) as raised:
        versions.check_installed()
    assert f"vLLM {found}: expected a version that Syncline was run with (0.32.0)" in str(
        raised.value
    )
    assert "SYNCLINE_VLLM_UNTESTED=1" in str(raised.value)
    monkeypatch.setenv("SYNCLINE_VLLM_UNTESTED", "1")
    versions.check_installed()
    monkeypatch.setenv("SYNCLINE_VLLM_UNTESTED", "yes")
    with pytest.raises(ConfigError, match="expected one of 0, 1"):
        versions.check_installed()


def test_no_vllm_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(TransportUnavailableError, match=r"pip install vllm==0\.32\.0"):
        versions.check_installed()
