"""The commands on the page about the gate work as they stand there, on what its Python makes."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from scoring_servers import FakeVllm, serving
from syncline.cli import main
from syncline.scorers import MemoryScorer

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "gate-what-an-engine-computes.md"
URL = "http://127.0.0.1:8000"


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    monkeypatch.chdir(tmp_path)
    found: dict = {"__name__": "example"}
    for code in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(code, str(PAGE), "exec"), found)
    return found


@pytest.fixture
def url(names: dict) -> Iterator[str]:
    with serving(FakeVllm(names["served"])) as url:
        yield url


def gate(*arguments: str) -> int:
    try:
        main(["gate", *arguments])
    except SystemExit as ended:
        return int(ended.code)
    return 0


def test_the_commands_work(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = PAGE.read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    first, second = (line.replace(URL, url) for block in blocks for line in block.splitlines())
    capsys.readouterr()
    main(shlex.split(first)[1:])
    assert "version 1 learned" in capsys.readouterr().out
    main(shlex.split(second)[1:])
    report = json.loads(capsys.readouterr().out)
    assert (report["verdict"], report["is_good"]) == ("passed", True)
    assert report["limits"] == {
        key: value
        for key, value in json.loads(Path("limits.json").read_bytes()).items()
        if not key.startswith("format")
    }


def test_exit_status_3_is_above_the_limits_and_4_is_not_judged(
    url: str, names: dict, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gate("run", url) == UNJUDGED
    assert "not proven" in capsys.readouterr().out
    assert not Path("limits.json").exists()
    assert gate("run", url, "--proven", "--limits", "limits.json") == 0
    spoilt = names["engine"]._bits["head"].view(np.uint64)
    spoilt[names["probes"][0].continuation[0]] ^= 1 << 62
    assert gate("run", url, "--limits", "limits.json") == FLAGGED
    spoilt[names["probes"][0].continuation[0]] ^= 1 << 62
    assert gate("run", url, "--limits", "limits.json") == 0
    names["publisher"].publish(names["weights"])
    capsys.readouterr()
    assert gate("run", url, "--limits", "limits.json", "--wait-s", "0", "--json") == UNJUDGED
    assert json.loads(capsys.readouterr().out)["reason"] == "the store has no scores"
    assert gate("run", url, "--limits", "limits.json", "--version", "1") == 0


FLAGGED, UNJUDGED = 3, 4


def test_workers_that_hold_the_version_prove_it(names: dict) -> None:
    held = {"version": 1, "sha256": names["report"].manifest_sha256, "error": None}
    for workers, status in (
        ([held, held], 0),
        ([held, held | {"sha256": "0" * 64}], UNJUDGED),
        ([held, held | {"sha256": None}], UNJUDGED),
        ([], UNJUDGED),
    ):
        with serving(FakeVllm(names["served"]), workers=workers) as url:
            assert gate("run", url) == status


def test_what_goes_wrong_is_said_in_one_line(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("broken.json").write_text("{}")
    Path("checkpoint").mkdir()
    for arguments, status, words in (
        (["nowhere", url], 1, "no HEAD.json"),
        (["run", "not-a-url"], 1, "url: expected http"),
        (["run", url, "--limits", "broken.json"], 1, "broken.json"),
        (["run", url, "--version", "9"], 1, "version 9"),
        (["run", url, "--engine", "other"], 2, "'other' is not one of"),
        (["run", url, "--checkpoint", "checkpoint"], 1, "checkpoint"),
        (["run", url, "--token-env", "NO_SUCH_TOKEN"], 1, "NO_SUCH_TOKEN"),
    ):
        assert gate(*arguments) == status
        assert words in capsys.readouterr().err


def test_a_checkpoint_is_scored_in_place_of_the_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    from syncline.demo.models import load_model
    from syncline.demo.tiny import write_tiny
    from syncline.scorers import TorchScorer

    base, store = tmp_path / "base", str(tmp_path / "store")
    write_tiny(base, 0)
    main(["publish", store, str(base)])
    import torch

    behind = TorchScorer(load_model(base, torch.bfloat16))
    lengths = ("--length", "4", "--length", "12")
    with serving(FakeVllm(Resuming(behind))) as url:
        common = (store, url, "--checkpoint", str(base), *lengths)
        assert gate(*common, "--proven", "--json") == 0
        report = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert report["verdict"] == "learned"
        assert report["trainer"] == "LlamaForCausalLM bfloat16"
        assert report["deviation"]["max_difference"] < 1e-6
        config = json.loads((base / "config.json").read_bytes())
        (base / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
        assert gate(*common, "--proven", "--json") == 1
        assert "differences, the first in config.json" in capsys.readouterr().err


class Resuming(MemoryScorer):
    """Scores as a torch module does, and tells the last token again as its resumed one."""

    def __init__(self, behind: object) -> None:
        self._behind = behind

    def score(self, probes, top):
        from dataclasses import replace

        return [
            replace(scores, resumed=float(scores.logprobs[-1]))
            for scores in self._behind.score(probes, top)
        ]
