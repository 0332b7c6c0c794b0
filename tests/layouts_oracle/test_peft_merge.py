"""PEFT itself as an oracle of merged adapters, in an environment of its own (`make test-long` makes it)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venvs" / "oracles" / "bin" / "python"


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="no .venvs/oracles: make test-long makes it")
def test_merged_adapters_are_those_of_peft() -> None:
    done = subprocess.run(
        [PYTHON, ROOT / "tests" / "oracles" / "peft_merge.py"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
