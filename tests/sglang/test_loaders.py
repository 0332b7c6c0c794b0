"""SGLang's own model classes in a process of their own: where its loaders write is learned, and changes go there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import sglang_in_process
import sglang_tiny as tiny
from sglang_real import SOURCE

pytest.importorskip("sglang.srt", reason="needs the environment of make sglang-env")


@pytest.mark.parametrize(
    "name, arguments",
    [*((name, ()) for name in tiny.MODELS), ("qwen3_moe", ("--ep-num-redundant-experts", "2"))],
)
def test_changes_in_place_are_what_sglang_loads(
    tmp_path: Path, name: str, arguments: tuple[str, ...]
) -> None:
    """With the tables of `layouts.engines`, what DeepSeek derives, and Qwen3-MoE's experts balanced anew each time."""
    done = subprocess.run(
        [sys.executable, sglang_in_process.__file__, name, str(tmp_path), *arguments],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    layers = tiny.DEEPSEEK_V3["num_hidden_layers"]
    assert found["derived"] == (2 * layers if name == "deepseek_v3" else 0)
