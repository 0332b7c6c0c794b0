"""The demo with a real vLLM process: weights travel through a store, and the worker holds the trainer's bits."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from demo_runs import check_demo
from vllm_plugin import with_plugin

_SPEC = find_spec("vllm")
pytestmark = pytest.mark.skipif(
    _SPEC is None or _SPEC.origin is None, reason="no vLLM here: make test-vllm"
)


def test_the_worker_ends_bit_identical_and_no_process_is_left(tmp_path: Path) -> None:
    check_demo("vllm", tmp_path / "out", with_plugin(tmp_path))
