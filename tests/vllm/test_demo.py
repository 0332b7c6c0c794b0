"""The demo with a real vLLM process: weights travel through a store, and the worker holds the trainer's bits."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from engine_leftovers import commands
from vllm_plugin import with_plugin

_SPEC = find_spec("vllm")
pytestmark = pytest.mark.skipif(
    _SPEC is None or _SPEC.origin is None, reason="no vLLM here: make test-vllm"
)


def test_the_worker_ends_bit_identical_and_no_process_is_left(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "syncline.cli", "demo", "--engine", "vllm", "--tiny"]
    ended = subprocess.run(
        [*command, "--steps", "3", "--out", str(out), "--json"],
        env=with_plugin(tmp_path),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [line["kind"] for line in lines] == ["base", *["step"] * 3, "result"]
    assert lines[-1]["bit_identical"] is True
    assert lines[-1]["tensors"] == lines[0]["tensors"] == 20
    assert [line["version"] for line in lines[1:-1]] == [2, 3, 4]
    for line in lines[1:-1]:
        assert 0 < line["changed"] < line["total"]
        assert line["pause_s"] > 0
    served = str(out / "base").encode()
    assert not [command for command in commands() if served in command]
