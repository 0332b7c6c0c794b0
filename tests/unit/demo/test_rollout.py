"""The trainer's end of an engine process, against small programs that behave in every wrong way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from syncline.demo.rollout import EngineProcess, RolloutRequest
from syncline.errors import PeerLostError, SynclineError, TransportTimeoutError

REQUEST = RolloutRequest(prompts=[[1, 2]], samples=2, max_new_tokens=4, stop="\n", seed=5)

ECHO = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    print(json.dumps({"result": [[[len(request["arguments"])]], request["act"]]}), flush=True)
"""


@contextmanager
def engine(program: str, tmp_path: Path, timeout_s: float = 60.0) -> Iterator[EngineProcess]:
    command = [sys.executable, "-c", program]
    with EngineProcess(command, log=tmp_path / "log", timeout_s=timeout_s) as process:
        yield process


def test_requests_and_replies_travel_as_json_lines(tmp_path: Path) -> None:
    with engine(ECHO, tmp_path) as process:
        assert process.rollout(REQUEST) == [[[5]], "rollout"]
        assert process.digests() == [[[0]], "digests"]


def test_a_dead_engine_is_an_error_with_its_status_and_the_end_of_its_log(tmp_path: Path) -> None:
    program = "import sys; sys.stdin.readline(); sys.exit('no memory left')"
    with (
        engine(program, tmp_path) as process,
        pytest.raises(PeerLostError, match=r"(?s)status 1 .*'sync'.*no memory left"),
    ):
        process.sync()


def test_an_engine_that_was_killed_between_requests_is_an_error(tmp_path: Path) -> None:
    with engine(ECHO, tmp_path) as process:
        process.digests()
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(PeerLostError, match=r"status -9 .*'rollout'.*log is empty"):
            process.rollout(REQUEST)
        with pytest.raises(PeerLostError, match="'sync'"):
            process.sync()


def test_a_silent_engine_is_an_error_and_is_killed(tmp_path: Path) -> None:
    program = "import time; time.sleep(600)"
    with engine(program, tmp_path, timeout_s=0.2) as process:
        with pytest.raises(TransportTimeoutError, match="did not answer 'digests' within"):
            process.digests()
        with pytest.raises(PeerLostError, match="status -9"):
            process.digests()


def test_an_error_reply_is_raised(tmp_path: Path) -> None:
    program = """
import sys
sys.stdin.readline()
print('{"error": "VerifyError: tensor w is wrong"}', flush=True)
sys.stdin.read()
"""
    with (
        engine(program, tmp_path) as process,
        pytest.raises(SynclineError, match="could not sync: VerifyError: tensor w is wrong"),
    ):
        process.sync()


def test_closing_ends_a_busy_process_and_may_be_repeated(tmp_path: Path) -> None:
    with engine("while True: pass", tmp_path) as process:
        assert is_running(process.pid)
    assert not is_running(process.pid)
    process.close()


def test_an_engine_does_not_outlive_a_trainer_that_was_killed(tmp_path: Path) -> None:
    trainer = f"""
import os, sys
from pathlib import Path
from syncline.demo.rollout import EngineProcess
engine = EngineProcess([sys.executable, "-c", {ECHO!r}], log=Path({str(tmp_path / "log")!r}))
engine.digests()
print(engine.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    run = subprocess.run(
        [sys.executable, "-c", trainer], capture_output=True, text=True, check=False
    )
    assert run.returncode == -signal.SIGKILL
    wait_until_gone(int(run.stdout))


def is_running(pid: int) -> bool:
    """Say whether there is such a process that is more than a status for its parent to collect."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def wait_until_gone(pid: int) -> None:
    deadline_s = time.monotonic() + 60
    while is_running(pid):
        assert time.monotonic() < deadline_s, f"process {pid} is still there"
        time.sleep(0.01)
