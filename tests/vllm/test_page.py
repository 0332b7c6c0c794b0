"""The commands on the how-to page work as they stand there, ports and the eager mode of the tests aside."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vllm_serving import START_S, environment, free_port, status_of

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "keep-a-vllm-server-on-the-trainer.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture
def background(tmp_path):
    """Run a command of the page beside the test; everything is stopped at its end."""
    with contextlib.ExitStack() as stack:

        def run(line: str) -> subprocess.Popen:
            log = stack.enter_context((tmp_path / "page.log").open("ab"))
            process = subprocess.Popen(
                ["bash", "-c", f"exec env {line}"],
                cwd=tmp_path,
                env=environment(tmp_path),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            stack.callback(_stop, process)
            return process

        yield run


@pytest.mark.slow
def test_the_page(tmp_path, monkeypatch, background):
    monkeypatch.chdir(tmp_path)
    vllm, follower = (f"127.0.0.1:{free_port()}" for _ in range(2))
    names: dict = {"__name__": "page"}
    shown = []
    text = PAGE.read_text()
    for here, there in (("8000", vllm), ("8100", follower)):
        text = text.replace(f"127.0.0.1:{here}", there)
        text = text.replace(f"--port {here}", f"--port {there.split(':')[1]}")
    for language, code in BLOCK.findall(text):
        if language == "python":
            exec(compile(code, str(PAGE), "exec"), names)
        for line in code.splitlines() if language == "sh" else ():
            if "vllm serve" in line:
                background(f"{line} --enforce-eager")
                wait_for(lambda: asked(f"curl --fail --silent http://{vllm}/health") is not None)
            elif line.startswith("syncline"):
                background(
                    line.replace("syncline", f"{shlex.quote(sys.executable)} -m syncline.cli", 1)
                )
                wait_for(lambda: is_ready(follower, 2))
            elif "hot_load" in line:
                wait_for(lambda: is_ready(follower, 3))
                shown.append(asked(line))
            else:
                shown.append(asked(line))
    status, metrics, info, *lifecycle = shown
    assert json.loads(status)["replicas"][0]["readiness"] is True
    assert 'syncline_version{replica="0"} 3' in metrics
    assert 'syncline_ready{replica="0"} 1' in metrics
    assert re.search(r'syncline_pause_seconds\{replica="0"\} 0\.\d', metrics)
    assert json.loads(info) == {"weight_version": "3"}
    assert len(lifecycle) == 5
    assert None not in lifecycle
    log = (tmp_path / "page.log").read_text()
    assert "version 2 is in place" in log
    assert "version 3 is in place" in log


def is_ready(follower: str, version: int) -> bool:
    try:
        found = status_of(f"http://{follower}")
    except OSError:
        return False
    return found["readiness"] and found["current_snapshot_identity"] == f"weight_v{version:06}"


def asked(line: str) -> str | None:
    done = subprocess.run(
        shlex.split(line), check=False, capture_output=True, text=True, timeout=60
    )
    return done.stdout if done.returncode == 0 else None


def wait_for(is_so):
    until_s = time.monotonic() + START_S
    while not is_so():
        assert time.monotonic() < until_s, Path("page.log").read_text()[-3000:]
        time.sleep(0.3)


def _stop(process: subprocess.Popen) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            continue
        break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
