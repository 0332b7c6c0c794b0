"""The page on checkpoint directories names every step."""

from __future__ import annotations

import re
from pathlib import Path

from syncline.engines import checkpoint_dir

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "checkpoint-directory.md"


def test_every_step_is_on_the_page_and_no_other() -> None:
    found = set(re.findall(r"`((?:create|apply|flip)\.[a-z_]+)`", PAGE.read_text()))
    assert found == set(checkpoint_dir.STEPS)
