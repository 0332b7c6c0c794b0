"""Runs of the demo with another project's server, and what all of them must end with."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from engine_leftovers import commands


def check_demo(engine: str, out: Path, environment: Mapping[str, str] | None = None) -> None:
    """Run the tiny demo: the engine ends bit-identical, and no process of it is left."""
    command = [sys.executable, "-m", "syncline.cli", "demo", "--engine", engine, "--tiny"]
    ended = subprocess.run(
        [*command, "--steps", "3", "--out", str(out), "--json"],
        env=environment,
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
