"""`syncline serve DIR --engine sglang`, and the commands of the how-to page, against a double of the server."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from sglang_scenes import Scene, build
from syncline.hotload import HotLoadClient
from syncline.sglang.change import LOADER

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "keep-an-sglang-server.md"
PATIENCE_S = 120.0


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = build(tmp_path, "0.5.23", ranks=2)
    with made.fake:
        yield made


@contextmanager
def running(directory: Path, *words: str) -> Iterator[str]:
    """Run a `syncline` command; yield the URL in its first line."""
    process = subprocess.Popen(
        [sys.executable, "-m", "syncline.cli", *words],
        stdout=subprocess.PIPE,
        text=True,
        cwd=directory,
    )
    try:
        assert process.stdout is not None
        found = re.search(r"on (http\S+)", process.stdout.readline())
        assert found is not None
        yield found[1]
    finally:
        process.terminate()
        process.communicate()


def until(true: Callable[[], bool]) -> None:
    """Return when it is."""
    ends = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.1)


def ready_at(url: str, identity: str) -> bool:
    (status,) = HotLoadClient(url).status()
    return status.readiness and status.identity == identity


def test_the_command_follows_and_says_so(scene: Scene, rng: np.random.Generator) -> None:
    words = ("serve", "model", "--engine", "sglang", "--url", scene.fake.url, "--store", "run")
    with running(scene.root, *words, "--staging", "staging", "--poll-s", "0.1") as url:
        until(lambda: ready_at(url, "weight_v000001"))
        scene.check(1)
        scene.train(rng)
        until(lambda: ready_at(url, "weight_v000002"))
        scene.check(2)
        with urllib.request.urlopen(url + "/metrics") as answer:
            text = answer.read().decode()
        figures = dict(re.findall(r"^(syncline_\w+)\S* (\S+)$", text, re.MULTILINE))
        assert figures["syncline_version"] == "2"
        assert figures["syncline_ready"] == "1"
        assert figures["syncline_changed_tensors"] == str(len(scene.weights))
        assert figures["syncline_dense_tensors"] == "0"
        assert float(figures["syncline_pause_seconds"]) > 0
        scene.fake.is_dead = True
        until(lambda: not ready_at(url, "weight_v000002"))


def test_a_server_that_asks_for_a_token_gets_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.fake.token = "s3cret"
    monkeypatch.setenv("ENGINE_TOKEN", "s3cret")
    words = ("serve", "model", "--engine", "sglang", "--url", scene.fake.url, "--store", "run")
    with running(scene.root, *words, "--engine-token-env", "ENGINE_TOKEN") as url:
        until(lambda: ready_at(url, "weight_v000001"))


@pytest.mark.parametrize(
    "words, match",
    [
        (("--engine", "sglang", "--url", "http://127.0.0.1:1"), "needs DIR"),
        (("model", "--engine", "sglang"), "needs --url"),
        (("model", "--engine", "sglang", "--url", "http://h", "--pause", "keep"), "--pause"),
        (("--engine", "vllm", "--url", "http://h", "--staging", "s"), "neither"),
    ],
)
def test_options_that_do_not_go_together(
    tmp_path: Path, words: tuple[str, ...], match: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "syncline.cli", "serve", *words, "--store", "run"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 2
    assert match in done.stderr


def test_the_commands_of_the_how_to_page(scene: Scene, rng: np.random.Generator) -> None:
    pull, launch, serve, status = (
        block.strip() for block in re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    )
    for line in pull.splitlines():
        name, *words = shlex.split(line)
        assert name == "syncline"
        subprocess.run(
            [sys.executable, "-m", "syncline.cli", *words],
            check=True,
            cwd=scene.root,
            stdout=subprocess.DEVNULL,
        )
    words = shlex.split(launch.replace("\\\n", " "))
    assert words[0] == "SYNCLINE_SGLANG_STAGING=$PWD/model.staging"
    assert words[words.index("--custom-weight-loader") + 1] == LOADER
    assert words[words.index("--model-path") + 1] == "model"
    scene.fake.staging = scene.root / "model.staging"
    served = serve.replace("http://127.0.0.1:30000", scene.fake.url)
    name, *words = shlex.split(served.replace("\\\n", " "))
    assert name == "syncline"
    with running(scene.root, *words) as url:
        scene.train(rng)
        until(lambda: ready_at(url, "weight_v000002"))
        asked = shlex.split(status.replace("http://127.0.0.1:8100", url))
        assert asked[:2] == ["curl", "-s"]
        with urllib.request.urlopen(asked[2]) as answer:
            assert json.loads(answer.read())["replicas"][0]["readiness"] is True
    scene.check(2)
