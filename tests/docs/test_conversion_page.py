"""The commands on the page about moving a run work as they stand there, on what its Python makes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from syncline.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "move-a-run-between-layouts.md"


def test_the_commands_work(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text()
    setup = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[0]
    exec(compile(setup, str(PAGE), "exec"), {"__name__": "example"})
    lines = [
        line
        for block in re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
    ]
    assert len(lines) == 7
    for line in lines:
        program, *arguments = shlex.split(line)
        assert program == "syncline"
        main(arguments)
    out = capsys.readouterr().out
    assert "3 versions, each read back and the same bit for bit" in out
    assert "skyrl-run (skyrl) converted to for-fireworks (fireworks)" in " ".join(out.split())
    assert "3 versions checked, 0 faults" in out


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["skyrl-run", "a", "--to", "slime"], 1, "pass base (--base)"),
        (["run", "a", "--to", "trl"], 1, "layout 'trl' is only read"),
        (["run", "run", "--to", "slime"], 1, "expected a directory apart from SRC"),
        (["run", "skyrl-run", "--to", "slime"], 1, "objects already"),
        (["run", "a", "--to", "sticks"], 2, "'sticks' is not one of"),
        (["nothing", "a", "--to", "slime", "--json"], 1, "no HEAD.json in "),
    ],
)
def test_what_goes_wrong_is_said_in_one_line(
    tmp_path, monkeypatch, capsys, arguments, status, words
):
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text()
    setup = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[0]
    exec(compile(setup, str(PAGE), "exec"), {"__name__": "example"})
    with pytest.raises(SystemExit) as ended:
        main(["convert", *arguments])
    assert ended.value.code == status
    found = capsys.readouterr()
    assert words in found.err
    assert ("--json" in arguments) == (found.out.startswith("{"))
