"""What fails around the real SGLang: it serves what it names, or is said not to be ready."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang.srt", reason="needs the environment of make sglang-env")

import sglang_dying
import sglang_tiny as tiny
import syncline
from sglang_pair import PROMPT, Pair
from sglang_real import SOURCE
from syncline.errors import (
    EndpointError,
    OutcomeUnknownError,
    SynclineError,
    TornUpdateError,
)
from syncline.sglang import partial, spans
from syncline.sglang.commit import STEPS, CommitOptions
from syncline.stores import FilesystemStore

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(tmp_path_factory.mktemp("failures"), tiny.QWEN3)
    yield made
    made.close()


@pytest.fixture
def pair(served: Pair) -> Pair:
    """Return a server that holds the newest version, with a follower that knows it."""
    served.another().sync()
    return served


def dies(*words: str) -> None:
    """Run a process of `sglang_dying` to its end, which is a kill."""
    done = subprocess.run(
        [sys.executable, sglang_dying.__file__, *words],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


def stays(pair: Pair, version: str, before: Any) -> None:
    """Check that the server serves this version on, under its name, and not another."""
    assert pair.control.label(60) == version
    assert pair.control.checksums(60) == before
    answer = pair.generate(PROMPT, 8)
    assert [span.label for span in spans.of_answer(answer, 8)] == [version]


@pytest.mark.parametrize("step", STEPS)
def test_a_follower_that_is_killed_leaves_the_old_name_until_everything_is_in(
    pair: Pair, step: str
) -> None:
    name, before = pair.control.label(60), pair.control.checksums(60)
    version = pair.train()
    pair.follower.close()
    dies("follower", pair.real.url, str(pair.root), step)
    has_name = pair.control.label(60) == str(version)
    assert has_name == (step == "labelled")
    if not has_name:
        assert pair.control.label(60) == name
    is_new = STEPS.index(step) >= STEPS.index("sent")
    assert (pair.control.checksums(60) != before) == is_new
    heir = pair.another()
    assert heir.held() is None and not heir.is_serving()
    done = heir.sync()
    assert done is not None and done.route == "from disk"
    assert heir.is_serving()
    pair.check()
    stays(pair, str(version), pair.control.checksums(60))


@pytest.mark.parametrize("step", ["paused", "sent", "labelled"])
def test_a_server_that_is_killed_in_an_update_is_not_said_to_hold_a_version(
    pair: Pair, step: str
) -> None:
    version = pair.train()
    follower = pair.another(reached=lambda at: pair.real.kill() if at == step else None)
    follower.sync(version - 1)
    if step == "labelled":  # the last call is lost
        with pytest.raises(SynclineError):
            follower.sync()
        assert follower.held() is None or not follower.is_serving()
    else:
        with pytest.raises(OutcomeUnknownError):
            follower.sync()
        assert follower.held() is None
    assert not follower.is_serving()
    with pytest.raises(SynclineError):
        follower.sync()
    pair.start()
    assert pair.control.label(60) == "default"
    assert not pair.follower.is_serving()
    pair.follower.sync()
    pair.check()
    stays(pair, str(version), pair.control.checksums(60))


def test_a_trainer_that_is_killed_leaves_the_last_version(pair: Pair) -> None:
    name, before = pair.control.label(60), pair.control.checksums(60)
    dies("trainer", str(pair.root))
    assert pair.follower.sync() is None
    assert pair.follower.is_serving()
    stays(pair, name, before)
    pair.publisher = syncline.Publisher(FilesystemStore(pair.root / "run"))
    version = pair.train()
    pair.follower.sync()
    pair.check()
    stays(pair, str(version), pair.control.checksums(60))


def test_a_store_that_is_gone_leaves_the_server_alone(pair: Pair) -> None:
    name, before = pair.control.label(60), pair.control.checksums(60)
    version = pair.train()
    away = (pair.root / "run").rename(pair.root / "away")
    with pytest.raises(SynclineError):
        pair.follower.sync()
    assert pair.follower.is_serving()
    stays(pair, name, before)
    away.rename(pair.root / "run")
    pair.follower.sync()
    stays(pair, str(version), pair.control.checksums(60))


def test_a_base_that_somebody_else_wrote_is_found_and_replaced(pair: Pair, tmp_path: Path) -> None:
    """SGLang keeps the old name when it loads weights from a directory; the follower must not."""
    metas, foreign = pair.checkpoint.tensors(), tmp_path / "foreign"
    partial.write(
        foreign, metas, metas, lambda name: pair.checkpoint.view(name) ^ 1, pair.root / "model"
    )
    pair.control.load_directory(str(foreign), 60)
    written = pair.control.checksums(60)
    version = pair.train(share=1.0)
    with pytest.raises(TornUpdateError, match="somebody else wrote its weights"):
        pair.follower.sync()
    assert pair.control.checksums(60) == written  # nothing was written over it
    assert pair.follower.held() is None and not pair.follower.is_serving()
    done = pair.follower.sync()
    assert done is not None and done.route == "from disk"
    pair.check()
    stays(pair, str(version), pair.control.checksums(60))


def test_a_frozen_request_forbids_the_update_and_ends_with_the_old_weights(pair: Pair) -> None:
    """The 400 comes when the new weights are in: they are taken out again."""
    name, before = pair.control.label(60), pair.control.checksums(60)
    version = pair.train(share=0.3)
    answers = pair.stream(PROMPT, 1200)
    next(answers)  # it runs
    frozen = pair.another(options=CommitOptions("in_place", step_timeout_s=120.0))
    with pytest.raises(EndpointError, match="400"):
        frozen.sync()
    last = list(answers)[-1]
    output = last["output_ids"]
    assert [span.label for span in spans.of_answer(last, len(output))] == [name]
    stays(pair, name, before)
    pair.control.flush(60)
    assert pair.generate(PROMPT, 1200)["output_ids"] == output
    frozen.sync()
    pair.check()
    stays(pair, str(version), pair.control.checksums(60))


def test_an_aborted_request_is_given_back_and_the_next_one_has_the_new_weights(pair: Pair) -> None:
    name = pair.control.label(60)
    version = pair.train(share=0.3)
    answers = pair.stream(PROMPT, 1200)
    next(answers)  # it runs
    aborting = pair.another(options=CommitOptions("abort", step_timeout_s=120.0))
    done: list[Any] = []
    updating = threading.Thread(target=lambda: done.append(aborting.sync()))
    updating.start()
    last = list(answers)[-1]
    updating.join()
    assert done[0] is not None
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    output = last["output_ids"]
    assert [span.label for span in spans.of_answer(last, len(output))] == [name]
    pair.check()
    stays(pair, str(version), pair.control.checksums(60))
