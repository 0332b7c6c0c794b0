"""`serve` refuses options that would do nothing where they are given."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from syncline.cli.serve import serve

ENGINE = ("model", "--engine", "sglang", "--url", "http://127.0.0.1:1")


@pytest.mark.parametrize(
    "words, match",
    [
        ((*ENGINE, "--adopt"), "--adopt needs DIR without --engine"),
        ((*ENGINE, "--mode", "swap"), "--mode needs DIR without --engine"),
        ((*ENGINE, "--gate-every", "2"), "--gate-every needs --gate"),
        ((*ENGINE, "--gate-limits", "limits.json"), "--gate-limits needs --gate"),
        (("model", "--pause", "keep"), "--pause needs --engine"),
        (("model", "--staging", "model.staging"), "--staging needs --engine"),
        (("model", "--engine-token-env", "NAME"), "--engine-token-env needs --engine"),
        (("module:engine", "--adopt"), "--adopt needs DIR"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_option_that_would_do_nothing_is_refused(
    words: tuple[str, ...], match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(serve, ["--store", "run", *words])
    assert done.exit_code == 2
    assert match in done.output
    assert not any(tmp_path.iterdir())
