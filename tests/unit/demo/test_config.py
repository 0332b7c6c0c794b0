from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from syncline.demo.config import BaseReport, DemoConfig, DemoResult, StepReport
from syncline.errors import ConfigError


@pytest.mark.parametrize(
    ("setting", "found"),
    [
        ({"steps": 0}, "steps from 1"),
        ({"prompts": 82}, "prompts from 1 to 81, found 82"),
        ({"samples": 1}, "samples from 2"),
        ({"max_new_tokens": 0}, "max_new_tokens from 1"),
        ({"learning_rate": 0.0}, "learning rate"),
        ({"tiny": True, "model": Path("m")}, "leave one out"),
    ],
)
def test_a_wrong_setting_is_refused_and_named(setting: dict, found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        DemoConfig(**setting)


def test_a_given_learning_rate_wins() -> None:
    assert DemoConfig().rate == 1e-6
    assert DemoConfig(tiny=True, learning_rate=1e-3).rate == 1e-3


def test_a_result_sums_its_steps_and_differs_where_anything_does(
    base_report: BaseReport, step_report: StepReport
) -> None:
    steps = (step_report, replace(step_report, payload_bytes=60))
    result = DemoResult({}, 2, base_report, steps, Path("p.png"), None, 1.0)
    assert (result.payload_bytes, result.full_bytes) == (100, 4000)
    assert result.times_smaller == 40.0
    assert result.bit_identical
    assert not replace(result, differences={"w": "missing in the engine"}).bit_identical


def test_a_step_derives_density_and_pause(step_report: StepReport) -> None:
    assert step_report.density == 0.01
    assert step_report.times_smaller == 50.0
    assert step_report.pause_s == pytest.approx(0.03)
    assert replace(step_report, payload_bytes=0).times_smaller == 2000
