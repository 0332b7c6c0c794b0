"""`syncline serve` as a process: its first line, its signals, and a kill in the middle of a pull."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hot_load_servers import Run, eventually
from syncline import CheckpointDir, FilesystemStore
from syncline.errors import EndpointError
from syncline.serving import HotLoadClient

TOKEN = "the-token"
COMMAND = (sys.executable, "-m", "syncline.cli")

ENGINE = """
import os, signal, time
from pathlib import Path
from syncline import CheckpointDir

HERE = Path(__file__).parent

def observe(step):
    if (HERE / "stop-at").exists() and step.name == (HERE / "stop-at").read_text():
        (HERE / "reached").touch()
        time.sleep(60)

def engine():
    return CheckpointDir(HERE / "engine", observe=observe)

nothing = 7
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run(FilesystemStore(tmp_path / "store"))
    made.publish()
    made.publish()
    return made


@contextmanager
def command(tmp_path: Path, *arguments: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run the command; yield it and its URL; kill it if the test has not ended it."""
    words = ["serve", *arguments, "--store", tmp_path / "store", "--json"]
    process = subprocess.Popen(
        [*COMMAND, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "SERVE_TOKEN": TOKEN},
    )
    try:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())["url"]
    finally:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str], number: int) -> tuple[int, str]:
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors


def loaded(log: str) -> list[str]:
    return [line.rpartition(": ")[2] for line in log.splitlines()]


@pytest.mark.parametrize("mode", ["in_place", "swap"])
def test_a_directory_is_served_and_ends_on_sigterm(tmp_path: Path, run: Run, mode: str) -> None:
    arguments = (tmp_path / "engine", "--mode", mode, "--token-env", "SERVE_TOKEN")
    with command(tmp_path, *arguments) as (process, url):
        client = HotLoadClient(url, token=TOKEN)
        client.wait("weight_v000002", poll_s=0.05, timeout_s=60)
        run.publish()
        client.tell("weight_v000003", previous="weight_v000002")
        client.wait("weight_v000003", poll_s=0.05, timeout_s=60)
        with pytest.raises(EndpointError, match="401"):
            HotLoadClient(url).status()
        status, log = ended(process, signal.SIGTERM)
        assert (status, loaded(log)) == (0, ["serves version 2", "serves version 3"])
    engine = CheckpointDir(tmp_path / "engine", mode=mode)  # type: ignore[arg-type]
    assert engine.held() is not None
    assert run.is_in(engine, 3)


def test_it_follows_and_ends_on_sigint(tmp_path: Path, run: Run) -> None:
    with command(tmp_path, tmp_path / "engine", "--follow", "--poll-s", 0.1) as (process, url):
        client = HotLoadClient(url)
        run.publish()
        client.wait("weight_v000003", poll_s=0.05, timeout_s=60)
        status, errors = ended(process, signal.SIGINT)
        *log, last = errors.splitlines()
        assert (status, last) == (130, "error: interrupted")
        assert loaded("\n".join(log)) == ["serves version 2", "serves version 3"]


@pytest.mark.parametrize("step", ["apply.journal_flushed", "apply.record_written"])
def test_a_kill_in_the_middle_of_a_pull_loses_nothing(tmp_path: Path, run: Run, step: str) -> None:
    (tmp_path / "host_engine.py").write_text(ENGINE)
    with command(tmp_path, "host_engine:engine") as (process, url):
        client = HotLoadClient(url)
        client.wait("weight_v000002", poll_s=0.05, timeout_s=60)
        (tmp_path / "stop-at").write_text(step)
        run.publish()
        client.tell("3")
        eventually((tmp_path / "reached").exists, "the pull is in the middle")
        assert [r.readiness for r in client.status()] == [False]
        assert [r.identity for r in client.status()] == ["2"]
        assert ended(process, signal.SIGKILL)[0] == -signal.SIGKILL
    run.publish()
    with command(tmp_path, tmp_path / "engine") as (process, url):
        HotLoadClient(url).wait("weight_v000004", poll_s=0.05, timeout_s=60)
        status, log = ended(process, signal.SIGTERM)
        assert (status, loaded(log)) == (0, ["serves version 4"])
    assert run.is_in(CheckpointDir(tmp_path / "engine"), 4)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("engine", "--host", "0.0.0.0"), "expected a token"),
        (("engine", "--token-env", "NOT_SET_ANYWHERE"), "NOT_SET_ANYWHERE: expected a token"),
        (("no_such_module:engine",), "expected module:name of an engine"),
        (("host_engine:no_such_name",), "expected module:name of an engine"),
        (("host_engine:nothing",), "found int"),
        (("foreign",), "foreign"),
    ],
)
def test_wrong_usage_is_one_line(
    tmp_path: Path, run: Run, arguments: tuple[str, ...], match: str
) -> None:
    (tmp_path / "host_engine.py").write_text(ENGINE)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "photo.jpg").touch()
    done = subprocess.run(
        [*COMMAND, "serve", *arguments, "--store", "store"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ")
    assert match in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "engine").exists()


def test_publish_tells_and_says_who_listened(tmp_path: Path, run: Run) -> None:
    from safetensors.numpy import save_file

    save_file({**run.weights, "w": run.weights["w"] + 1}, tmp_path / "next.safetensors")
    with command(tmp_path, tmp_path / "engine", "--token-env", "SERVE_TOKEN") as (process, url):
        HotLoadClient(url, token=TOKEN).wait("weight_v000002", poll_s=0.05, timeout_s=60)
        told = ("--notify", f"{url},{url}/elsewhere", "--notify-token-env", "SERVE_TOKEN")
        done = subprocess.run(
            [*COMMAND, "publish", "store", "next.safetensors", *told],
            cwd=tmp_path,
            env={**os.environ, "SERVE_TOKEN": TOKEN},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert f"{url}/hot_load/v1/models/hot_load took weight_v000003" in done.stdout
        assert f"{url}/elsewhere/hot_load/v1/models/hot_load did not take" in done.stdout
        assert TOKEN not in done.stdout + done.stderr
        HotLoadClient(url, token=TOKEN).wait("weight_v000003", poll_s=0.05, timeout_s=60)
        status, log = ended(process, signal.SIGTERM)
        assert (status, loaded(log)) == (0, ["serves version 2", "serves version 3"])
