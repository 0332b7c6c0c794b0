"""The demo with a real SGLang process: weights travel through a store, and the rank holds the trainer's bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo_runs import check_demo

pytest.importorskip("sglang.srt", reason="needs the environment of make sglang-env")


@pytest.mark.slow
def test_the_rank_ends_bit_identical_and_no_process_is_left(tmp_path: Path) -> None:
    check_demo("sglang", tmp_path / "out")
