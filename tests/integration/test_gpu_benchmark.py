"""benchmarks/gpu.py runs from end to end, if only interpreted, and says what it lacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton is made for Linux alone")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "SYNCLINE_THREADS": "1", **environment},
    )


def test_without_a_gpu_it_says_so() -> None:
    out = run()
    assert (out.returncode, out.stdout) == (1, "")
    assert out.stderr.startswith("gpu.py needs a CUDA device")


def test_a_dry_run_needs_the_interpreter() -> None:
    out = run("--dry-run", TRITON_INTERPRET="0")
    assert out.returncode == 1
    assert "set TRITON_INTERPRET=1" in out.stderr


def test_a_dry_run_measures_everything() -> None:
    out = run("--dry-run", TRITON_INTERPRET="1")
    assert out.returncode == 0, out.stderr
    result = json.loads(out.stdout)
    assert result["is_dry_run"]
    assert result["roofs_bytes_per_s"].keys() == {
        "device copy",
        "device read",
        *(f"to {side}, {kind}" for side in ("host", "device") for kind in ("pinned", "pageable")),
    }
    timed = {figure["name"].split(",")[0] for figure in result["figures"]}
    assert timed > {"compare", "compact", "diff and refresh", "gather", "scatter", "fingerprint"}
    assert [sync["device_copy"] for sync in result["syncs"]] == [True, False]
    for sync in result["syncs"]:
        assert sync["changed"] > 0
        assert sync["publish_s"]["total"] > 0
        assert sync["sync_s"]["total"] > 0
