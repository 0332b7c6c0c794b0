from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from syncline.demo.config import BaseReport, DemoResult, StepReport
from syncline.demo.display import COLUMNS, JsonDisplay, TableDisplay
from syncline.demo.picture import draw


def result(base: BaseReport, step: StepReport, **differences: str) -> DemoResult:
    steps = (step, replace(step, step=2, reward=0.75))
    return DemoResult(differences, 2, base, steps, Path("p.png"), None, 12.0)


def test_json_is_one_object_a_line_and_the_last_has_the_verdict(
    base_report: BaseReport, step_report: StepReport
) -> None:
    stream = io.StringIO()
    display = JsonDisplay(stream)
    with display.live():
        display.phase("loading")
        display.base(base_report)
        display.step(step_report)
    display.result(result(base_report, step_report, w="missing in the engine"))

    base, step, last = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (base["kind"], base["vocabulary"]) == ("base", 98)
    assert (step["kind"], step["density"], step["times_smaller"]) == ("step", 0.01, 50.0)
    assert step["pause_s"] == 0.03
    assert (last["kind"], last["bit_identical"]) == ("result", False)
    assert last["differences"] == {"w": "missing in the engine"}
    assert (last["reward_first"], last["reward_last"]) == (0.25, 0.75)
    assert (last["steps"], last["changed"], last["payload_bytes"]) == (2, 20, 80)


def shown(base: BaseReport, step: StepReport, **differences: str) -> list[str]:
    stream = io.StringIO()
    display = TableDisplay(Console(file=stream, width=80))
    with display.live():
        display.base(base)
        display.step(step)
    display.result(result(base, step, **differences))
    return stream.getvalue().splitlines()


def test_setting_up_is_not_silent_where_no_status_line_is(base_report: BaseReport) -> None:
    stream = io.StringIO()
    display = TableDisplay(Console(file=stream, width=80))
    with display.live():
        display.phase("reading the model")
        assert stream.getvalue() == "reading the model ...\n"
        display.base(base_report)
        printed = stream.getvalue()
        display.phase("step 1: the engine generates")
    assert stream.getvalue() == printed


def test_the_table_has_a_row_a_step_under_headings_and_units(
    base_report: BaseReport, step_report: StepReport
) -> None:
    about, computes, headings, units, row, totals, verdict, picture = shown(
        base_report, step_report
    )
    assert "vocabulary cut from 262,144 to 98 tokens" in about
    assert "noise" in about
    assert computes == "Trainer computes in bfloat16; set up in 7 s."
    assert headings.split() == [heading for heading, *_ in COLUMNS]
    assert len(headings) == len(row) == len(units)
    assert row.split() == [
        *("1", "0.250", "1.000", "0", "50.0"),
        *("1", "2", "3", "4", "10", "20", "30", "2.5"),
    ]
    assert "50.0 times smaller; reward 0.25 -> 0.75; 12 s in all" in totals
    assert verdict.startswith("Bit-identical: all 2 tensors")
    assert picture == "Picture: p.png"


def test_every_tensor_that_differs_is_named(
    base_report: BaseReport, step_report: StepReport
) -> None:
    lines = shown(base_report, step_report, w="missing in the engine", v="SHA-256 is wrong")
    assert "w: missing in the engine" in lines
    assert "v: SHA-256 is wrong" in lines
    assert "NOT bit-identical: 2 of 2 tensors differ." in lines


def test_the_picture_is_a_readable_png(
    base_report: BaseReport, step_report: StepReport, tmp_path: Path
) -> None:
    steps = [replace(step_report, step=number) for number in range(1, 4)]
    pytest.importorskip("matplotlib")
    draw(base_report, steps, is_identical=True, target=tmp_path / "p.png")
    with pytest.importorskip("PIL.Image").open(tmp_path / "p.png") as picture:
        assert picture.format == "PNG"
        assert picture.size == (1200, 1200)
        assert len(picture.convert("RGB").getcolors(1 << 20)) > 3
